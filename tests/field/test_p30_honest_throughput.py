"""Throughput figures that flatter packing: attention counted as if a pack were one document, padding as if it were
text.

Reports: NVIDIA-NeMo/Megatron-Bridge#3839 and #3529, NVIDIA-NeMo/RL#2790, meta-pytorch/torchtune#1875,
flashinfer-ai/flashinfer#1638. Our rule: FLOPs count the pairs that causal attention has, document by document,
L·(L+1)/2, fewer with a window; tokens per second are real ones, those with padding and the share of it stand apart.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from seqmesh.loader.embedded import Loader
from seqmesh.trainer.config import load_config
from seqmesh.trainer.flops import make_work
from seqmesh.trainer.grid import alone
from seqmesh.trainer.job import make_job
from seqmesh.trainer.loop import run
from seqmesh.trainer.monitor import StepClock, make_record, read_steps, step_line
from seqmesh.trainer.step import StepResult
from seqmesh.trainer.train import loader_settings
from tests.jobs import VOCAB, write_job
from tests.support import make_set

LAYERS, HEADS, HEAD_DIM = 4, 8, 64


def attention_flops(lengths: list[int], window: int | None = None) -> float:
    windows = [window] * LAYERS
    work = make_work(block_parameters=0, head_parameters=0, heads=HEADS, head_dim=HEAD_DIM, windows=windows)
    every = np.array(lengths, np.int64)
    pairs = work.layer_pairs(every, np.ones_like(every), np.zeros_like(every))
    return work.of_step(tokens=sum(lengths), supervised=0, layer_pairs=pairs)


def test_a_pack_of_four_documents_has_a_quarter_of_the_attention_of_one() -> None:
    unit = 12 * LAYERS * HEADS * HEAD_DIM
    assert attention_flops([8192]) == unit * (67_108_864 + 8192) / 2
    assert attention_flops([2048] * 4) == unit * (16_777_216 + 8192) / 2
    assert attention_flops([8192], window=2048) == unit * (2048 * 2049 // 2 + 6144 * 2048)
    assert attention_flops([2048] * 4, window=2048) == attention_flops([2048] * 4)


def test_half_padding_is_half_the_real_tokens_a_second_and_half_the_utilisation() -> None:
    records = []
    for tokens in (8192, 4096):
        result = StepResult(loss=1.0, grad_norm=1.0, fill=tokens / 8192, rows=8192, layer_pairs=0, lr=0.1, updated=True)
        records.append(
            make_record(
                result,
                FixedClock(2.0),
                step=1,
                epoch=0,
                tokens=tokens,
                rings=0,
                ring_bytes=0,
                imbalance=1.0,
                flops=1e9 * tokens,
                peak=1e13,
            )
        )
    full, half = records
    assert (full.tokens_per_second, full.rows_per_second, full.padding, full.fill) == (4096, 4096, 0, 1)
    assert (half.tokens_per_second, half.rows_per_second, half.padding, half.fill) == (2048, 4096, 0.5, 0.5)
    assert half.mfu == full.mfu / 2
    for part in ("2,048 tokens/s", "fill  50.0%", "padding 50.0%"):
        assert part in step_line(half, 10, 0.0)


class FixedClock(StepClock):
    """Every step takes as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._fixed = seconds

    @property
    def total(self) -> float:
        return self._fixed


def test_a_job_counts_its_padding_and_its_documents_attention(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", [16, 8] * 8, vocab=VOCAB)
    loader = {"data": str(data), "tokens_per_step": 24, "capacity": 48, "pad_to": 48, "shuffle": False}
    peak = 1e12
    job = write_job(tmp_path, data, ranks=1, steps=2, loader=loader, peak_flops=peak)
    config = load_config(job)
    (tmp_path / "run").mkdir()
    with Loader(loader_settings(config, 1), mode="inline") as batches:
        trained = make_job(config, alone(torch.device("cpu")), batches, lambda _line: None)
        run(trained)
    for record in read_steps(tmp_path / "run" / "log.jsonl").values():
        assert (record["tokens"], record["padding"], record["fill"]) == (24, 0.5, 0.5)
        assert record["rows_per_second"] == pytest.approx(2 * record["tokens_per_second"])
        pairs = 16 * 17 // 2 + 8 * 9 // 2
        flops = trained.work.of_step(tokens=24, supervised=22, layer_pairs=pairs)
        assert record["mfu"] == pytest.approx(flops / (record["total"] * peak))
