"""`seqmesh.tools.ring_check` on real ranks, over gloo."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from seqmesh.kernels.rings import circuit
from seqmesh.tools import gpu_check, ring_check
from seqmesh.tools.ring_check import WAYS, documents, failures, layout_on, main
from seqmesh.trainer.parallel import Ranks
from tests.ranks import run_ranks


def right_then_wrong(ranks: Ranks) -> tuple[list[str], list[str]]:
    """As it is, and with merging that forgets what came before."""
    everything = documents(ranks.count, longest=200)
    right = failures(ranks, everything, torch.float32)
    with patch.object(circuit, "merge_", forget):
        return right, failures(ranks, everything, torch.float32)


def forget(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    out.copy_(part)
    lse.copy_(part_lse)


def test_rings_are_right_and_a_fault_is_found_on_every_rank() -> None:
    for right, wrong in run_ranks(right_then_wrong, 3):
        assert right == []
        assert {sentence.split(",")[0] for sentence in wrong} == {"rank 0", "rank 1", "rank 2"}
        assert all(", torch.float32: ring, window None, " in sentence for sentence in wrong)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_every_token_is_on_one_rank_of_its_document(count: int) -> None:
    for document in documents(count):
        tokens = torch.cat([document.held(rank) for rank in document.ranks])
        assert torch.equal(tokens.sort().values, torch.arange(document.length))
    for rank in range(count):
        layout = layout_on(rank, documents(count), torch.device("cpu"))
        assert len(layout.rings) >= 2
        assert [ring.held(ring.index) for ring in layout.rings] == layout.cu_seqlens.diff().tolist()
    assert {exchange for exchange, _ in WAYS} == {"ring", "gather"}


def test_one_rank_has_no_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="there is one rank: start two or more with torchrun"):
        main()


def test_gpu_check_runs_it_over_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ring_check, "run_apart", lambda count: asked.append(count) or "rank 1 fell")  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, said in ((1, None), (4, "rank 1 fell")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda found=count: found)
        assert gpu_check.check_rings() == said
    assert asked == [4]
