"""Optimizers: AdamW and LAMB over whole parameters or a rank's part of them, with their schedules."""

from seqmesh.trainer.optim.config import OptimConfig as OptimConfig
from seqmesh.trainer.optim.config import learning_rate as learning_rate
from seqmesh.trainer.optim.config import set_rate as set_rate
from seqmesh.trainer.optim.make import make_optimizer as make_optimizer
from seqmesh.trainer.optim.make import make_optimizer_over as make_optimizer_over
