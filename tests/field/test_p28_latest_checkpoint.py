"""A mark of the latest checkpoint that points at one which is not there yet, or whose predecessor is gone already."""

import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from seqmesh.trainer.checkpoint import load_checkpoint, newest_checkpoint
from seqmesh.trainer.optim import OptimConfig, make_optimizer

# Saves steps from the newest on, each file synced slowly; the weights and the loader's state both say the step.
WORKER = """
import sys, time, pathlib, torch
from torch import nn
from seqmesh.trainer import checkpoint
from seqmesh.trainer.optim import OptimConfig, make_optimizer

folder = pathlib.Path(sys.argv[1])
sync = checkpoint.sync_file
checkpoint.sync_file = lambda path: (time.sleep(0.05), sync(path))
model = nn.Linear(64, 64)
optimizer = make_optimizer(model.parameters(), OptimConfig())
newest = checkpoint.newest_checkpoint(folder, print)
step = checkpoint.load_checkpoint(newest, model, optimizer)["step"] if newest else 0
print("ready", flush=True)
while True:
    step += 1
    with torch.no_grad():
        model.weight.fill_(step)
    tensors = checkpoint.gather_tensors(model, optimizer)
    checkpoint.save_checkpoint(folder, step, tensors, {"loader": {"step": step}}, keep=1)
    print("saved", step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    generator = random.Random(28)
    said = 0
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            time.sleep(generator.uniform(0.1, 1.2))  # about five saves
            worker.kill()
            lines = worker.stdout.read().splitlines()
        said = max([said, *(int(line.split()[1]) for line in lines if line.startswith("saved "))])
        newest = newest_checkpoint(tmp_path, print)
        if newest is None:
            assert said == 0
            continue
        model = nn.Linear(64, 64)
        state = load_checkpoint(newest, model, make_optimizer(model.parameters(), OptimConfig()))
        assert state["step"] == state["loader"]["step"]
        assert torch.equal(model.weight, torch.full_like(model.weight, state["step"]))
        assert state["step"] in (said, said + 1)  # complete, though perhaps killed before it could say so
        said = state["step"]
    assert said > 5
    assert len([path for path in tmp_path.iterdir() if not path.name.startswith(".")]) <= 2
