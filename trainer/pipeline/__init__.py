"""One replica as a pipeline of stages, each a process with some of the layers, under plans of uneven micro-batches."""
