"""Data that is not on this disk, and the copies of it that are.

`location` and `retry` ask a storage; `store` keeps parts here within a bound (`copies`: on the disk, `agenda`: what
comes next, `bringer`: a thread's steps, `cache`: where and how much); `once` builds what several jobs want once. Knows
nothing of formats.
"""
