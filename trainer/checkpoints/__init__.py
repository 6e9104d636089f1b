"""Checkpoints in two stages: a copy that the step waits for, then files that it does not."""
