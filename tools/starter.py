"""The settings to begin a training job with, as a file with comments. docs/training.md lists all there are."""

STARTER = """\
# Begin: seqmesh prepare TEXTS --out shards --tokenizer train:8192
#        seqmesh train job.yaml
# Any setting can be changed for one start: seqmesh train job.yaml optim.lr=1e-3 steps=50
# All settings with their values: seqmesh train job.yaml --print-config

run: runs/first          # folder for logs and checkpoints; a job started again goes on from the newest
steps: 1000              # optimizer steps in all
ranks: 1                 # processes on this machine: one a GPU, or a few on a CPU
seed: 0                  # of the weights

loader:
  data: shards           # of seqmesh prepare; docs/data.md has what else is read
  tokens_per_step: 16384 # of a global batch, over all ranks; their number does not change it
  capacity: 4096         # most tokens of one micro-batch on one rank: what fits its memory
  overlong: split        # documents over the capacity; with more ranks, max_document lets them span several
  seed: 0                # of the order of documents

model:
  vocab_size: 8192       # at least that of the tokenizer
  width: 256
  layers: 4
  heads: 8
  kv_heads: 4

optim:
  lr: 1.0e-3
  warmup: 50             # steps

checkpoint:
  every: 100             # steps
  keep: 2

log:
  tensorboard: false     # pip install 'seqmesh[tensorboard]'; log.jsonl is always written
"""
