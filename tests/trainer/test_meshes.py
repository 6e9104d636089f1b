"""A run that goes from mesh to mesh: sums, norms, updates and checkpoints over all dimensions, beside one process.

Gradients are not computed but made up, by name and process: what every process would have after its own micro-batches.
So their sums over replicas, tensor peers and the ends of a pipeline are known, and with them every step.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from seqmesh.kernels.tensor_parallel import Peers
from seqmesh.trainer.checkpoints import read
from seqmesh.trainer.checkpoints.load import load, newest_checkpoint
from seqmesh.trainer.checkpoints.read import read_whole as contents
from seqmesh.trainer.grid import Grid, ParallelConfig, alone, make_grid
from seqmesh.trainer.models.config import ModelConfig
from seqmesh.trainer.models.division import box_of, layers_of
from seqmesh.trainer.models.transformer import Transformer, parameter_shapes
from seqmesh.trainer.optim import OptimConfig
from seqmesh.trainer.parallel import Ranks
from seqmesh.trainer.part import Saved, place_of
from seqmesh.trainer.replicas import Replica, Sharding, make_replica
from seqmesh.trainer.replicas.held import EMBEDDING
from tests.checkpoints import saver_of, zeros
from tests.ranks import run_ranks
from tests.trainer.slow_lamb import SlowLamb

CONFIG = ModelConfig(  # vectors that are divided and that are not, an uneven vocabulary, buffers
    vocab_size=13, width=8, layers=4, heads=4, kv_heads=4, biases="qkv", experts=4, tied_embeddings=True, init_std=0.2
)
OPTIM = OptimConfig(name="lamb", lr=0.05, clip=None)
PROCESSES = 8
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Mesh:
    """What the processes are spread as."""

    tensor: int
    stages: int
    parts: int
    sharding: Sharding

    @property
    def replicas(self) -> int:
        return PROCESSES // (self.tensor * self.stages)


RUN = (
    Mesh(1, 1, 1, "parameters"),
    Mesh(1, 2, 1, "optimizer"),
    Mesh(2, 2, 1, "parameters"),
    Mesh(4, 1, 1, "optimizer"),
    Mesh(2, 2, 2, "replicated"),
    Mesh(2, 4, 1, "replicated"),
)


@cache
def shapes() -> dict[str, torch.Size]:
    return parameter_shapes(CONFIG)


def drawn(*key: object) -> Tensor:
    """[whole shape] for a key whose first entry is the parameter's name."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(shapes()[str(key[0])], generator=generator, dtype=torch.float64)


def is_divided(name: str, tensor: int) -> bool:
    return box_of(name, shapes()[name], 0, tensor).divided


def share(name: str, step: int, mesh: Mesh, replica: int, peer: int, stage: int) -> Tensor:
    """What a process adds to the gradient of a parameter: of one that is divided, its own piece of this."""
    end = stage if name == EMBEDDING else 0
    return drawn(name, step, replica, end, 0 if is_divided(name, mesh.tensor) else peer)


def whole_gradient(name: str, step: int, mesh: Mesh) -> Tensor:
    peers = 1 if is_divided(name, mesh.tensor) else mesh.tensor
    ends = {0, mesh.stages - 1} if name == EMBEDDING else {0}
    every = [share(name, step, mesh, r, p, s) for r in range(mesh.replicas) for p in range(peers) for s in ends]
    return torch.stack(every).sum(0)


class Job:
    """One process of a run on a mesh."""

    def __init__(self, mesh: Mesh, grid: Grid) -> None:
        self.mesh, self.grid = mesh, grid
        layers = layers_of(CONFIG.layers, mesh.stages * mesh.parts)[grid.stages.rank :: mesh.stages]
        peers = Peers(group=grid.tensor.group, rank=grid.tensor.rank, count=grid.tensor.count)
        self.model = Transformer(CONFIG, seed=0, layers=layers, peers=peers).double()
        self.replica: Replica = make_replica(self.model, grid, "free", mesh.sharding, extra=2)
        self.optimizer = self.replica.make_optimizer(OPTIM)

    def tensors(self) -> Saved:
        return self.replica.tensors(self.optimizer)

    def balances(self) -> list[Tensor]:
        """Of experts: the same on every process that has the layer."""
        return [buffer for name, buffer in self.model.named_buffers() if name.endswith("balance")]

    def load(self, path: Path) -> tuple[int, int, int]:
        """Bytes that this process read, those that are its to read, and those of them that it would also write."""
        parts = zeros(self.tensors())
        read = load(path, parts, self.grid).bytes_read
        self.replica.loaded(self.optimizer)
        own = [part for part in parts.values() if self.grid.data.is_first or not part.shared]
        counted = sum(part.local.nbytes for part in own if not part.spare)
        return read, sum(part.local.nbytes for part in own), counted

    def check_holds(self, path: Path) -> None:
        """What is put away: also what this process did not put there, and parameters of which it has a shard."""
        put_away, boxes = contents(path), self.model.boxes()
        for name, part in self.tensors().items():
            assert torch.equal(part.local, put_away[name][part.place]), (self.mesh, name)
        if self.mesh.sharding != "parameters":
            for name, parameter in self.model.named_parameters():
                whole = put_away[f"model/{name}"]
                assert torch.equal(parameter, whole[place_of(boxes[name].offsets, parameter.shape)]), (self.mesh, name)

    def make_gradient(self, step: int) -> None:
        grid, boxes = self.grid, self.model.boxes()
        self.replica.begin_step()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()  # what is sharded is whole from here to the step's end
        for name, parameter in self.model.named_parameters():
            box = boxes[name]
            given = share(name, step, self.mesh, grid.data.rank, grid.tensor.rank, grid.stages.rank)
            piece = given[place_of(box.offsets, parameter.shape)]
            if parameter.grad is None:
                parameter.grad = piece.clone()
            else:
                parameter.grad.copy_(piece)
        if grid.speaks:
            self.replica.extra += torch.tensor([1.0, grid.data.rank])

    def spoil(self, value: float, number: int) -> None:
        """One element of one parameter's gradient."""
        held = [p for p in self.model.parameters() if p.numel()]
        gradient = held[number % len(held)].grad
        assert gradient is not None
        gradient.view(-1)[-1] = value

    def finish(self, *, update: bool) -> tuple[float, list[float]]:
        """The norm and `extra`."""
        self.replica.reduce_()
        found = self.replica.norm(), self.replica.extra.tolist()
        if update:
            for group in self.optimizer.param_groups:
                group["lr"] = OPTIM.lr
            self.replica.scale_(0.5)
            self.replica.update(self.optimizer)
        self.replica.zero_()
        return found


def go_on(ranks: Ranks, folder: Path) -> list[tuple[float, list[float], list[float], tuple[int, int, int]]]:
    """On every mesh: load what the last one left, put it away as it is, take a step, put that away. Of each the norm
    and the sums of the step, norms of gradients that one process spoils, and bytes as `Job.load` has them."""
    torch.set_num_threads(1)
    found = []
    for number, mesh in enumerate(RUN):
        config = ParallelConfig(tensor=mesh.tensor, stages=mesh.stages, parts=mesh.parts)
        job = Job(mesh, make_grid(ranks, config))
        newest = newest_checkpoint(folder, ranks, print)
        assert newest is not None
        with patch.object(read, "LONG", 1):
            sizes = job.load(newest)
        job.check_holds(newest)
        with saver_of(folder, job.tensors(), job.grid, keep=99) as saver:
            saver.save(2 * number + 1, job.tensors(), {})
            spoilt = list(spoilt_norms(job, number))
            job.make_gradient(number)
            norm, extra = job.finish(update=True)
            for buffer in job.balances():
                buffer.add_(1)
            saver.save(2 * number + 2, job.tensors(), {})
        job.check_holds(folder / f"step-{2 * number + 2:08d}")
        found.append((norm, extra, spoilt, sizes))
    return found


def spoilt_norms(job: Job, seed: int) -> Iterator[float]:
    for bad in (seed % PROCESSES, (3 * seed + 5) % PROCESSES):
        job.make_gradient(0)
        if job.grid.world.rank == bad:
            job.spoil(math.nan if bad % 2 else math.inf, bad + seed)
        yield job.finish(update=False)[0]


def put_away_alone(folder: Path) -> Job:
    """Step 0: the weights of the seed, moments and buffers of zeros."""
    job = Job(Mesh(1, 1, 1, "replicated"), alone(CPU))
    with saver_of(folder, job.tensors()) as saver:
        saver.save(0, job.tensors(), {})
    return job


def test_a_run_goes_from_mesh_to_mesh_as_on_one_process(tmp_path: Path) -> None:
    start = put_away_alone(tmp_path)
    results = run_ranks(go_on, PROCESSES, tmp_path)
    weights = {name: p.detach().clone() for name, p in start.model.named_parameters()}
    slow = SlowLamb([weights[name] for name in shapes()], OPTIM)
    for number, mesh in enumerate(RUN):
        gradient = {name: whole_gradient(name, number, mesh) for name in shapes()}
        norm = float(torch.cat([each.flatten() for each in gradient.values()]).norm())
        of_all = [found[number] for found in results]
        assert len({each[0] for each in of_all}) == 1, mesh  # the same bits
        assert of_all[0][0] == pytest.approx(norm, rel=1e-12), mesh
        assert all(each[1] == [mesh.replicas, sum(range(mesh.replicas))] for each in of_all), mesh
        assert all(not math.isfinite(each) for found in of_all for each in found[2]), mesh
        before, after = (contents(tmp_path / f"step-{2 * number + later:08d}") for later in (0, 1))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before), mesh  # loaded and put away, bit for bit
        slow.step([0.5 * gradient[name] for name in shapes()], OPTIM.lr)
        done = contents(tmp_path / f"step-{2 * number + 2:08d}")
        for i, (name, moment, square) in enumerate(zip(shapes(), slow.m, slow.v, strict=True)):
            for slot, expected in (("exp_avg", moment), ("exp_avg_sq", square)):
                assert torch.allclose(done[f"optimizer/{name}/{slot}"], expected, rtol=1e-11, atol=1e-13), (mesh, name)
            assert torch.allclose(done[f"model/{name}"], slow.parameters[i], rtol=1e-11, atol=1e-13), (mesh, name)
        assert done["optimizer/step"] == number + 1
        balances = [done[f"model/blocks.{layer}.mlp.balance"] for layer in range(CONFIG.layers)]
        assert all(each.eq(number + 1).all() for each in balances)
        read, own, counted = (sum(each) for each in zip(*(found[3] for found in of_all), strict=True))
        assert read == own  # a file's bytes once a model and not once a replica, but for what peers have in common
        assert counted == sum(tensor.nbytes for tensor in before.values())
    end = Job(Mesh(1, 1, 1, "replicated"), alone(CPU))
    last = tmp_path / f"step-{2 * len(RUN):08d}"
    end.load(last)
    end.check_holds(last)
