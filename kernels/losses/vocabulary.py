"""`linear_cross_entropy_sum` where the vocabulary is spread over the ranks of a group, as in tensor parallelism.

Every member holds all rows and a contiguous slice of the weight, in the group's order. One all-gather of three numbers
a row for each chunk makes the rows' statistics; no logits travel. Gradients of rows are not reduced here. Before, one
of six numbers a member shows whether all have the same rows: the host waits for it, and for no other look at labels.

Shapes: T rows, W width, V vocabulary, v a member's slice of it, m members.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from seqmesh.kernels.loss import UNSUPERVISED, check_label_dtype, check_labels, check_linear, supervised_rows
from seqmesh.kernels.losses import chunked

SAME = ("rows", "width", "supervised labels", "lowest label", "highest label")  # on all members


def vocab_parallel_cross_entropy_sum(
    hidden: Tensor, weight_shard: Tensor, labels: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of hidden @ weightᵀ as sum and count, weight being the members' shards one after the other.

    hidden [T, W] and labels [T], the same on all members; labels are UNSUPERVISED or 0..V−1, V the sum of the shards'
    rows. weight_shard [v, W]: sizes may differ, 0 included. -> (sum [], count []), the same on all members, otherwise
    as `linear_cross_entropy_sum` gives them. Every member of the group makes the call, and none but this group is used;
    None is that of all ranks.

    Backward communicates nothing. It gives the gradient of the shard, and **this member's share of hidden's gradient**:
    the shares of all members sum to it. What gave each member its hidden (`tensor_parallel.gather_linear`) sums them in
    its own backward.

    Raises ValueError like `linear_cross_entropy_sum`, and where members disagree about the rows or the labels. What can
    be seen only together, a label beyond the whole vocabulary above all, is an error on all members alike.
    """
    check_linear(hidden, weight_shard, labels)
    check_label_dtype(labels)
    sizes = _agree(hidden, weight_shard, labels, group)
    rows, targets = supervised_rows(hidden, labels)
    first = sum(sizes[: dist.get_rank(group)])
    total = chunked.slice_sum(rows, weight_shard, targets - first, merge=partial(_merge, group=group))
    return total, (labels != UNSUPERVISED).sum()


def _agree(hidden: Tensor, weight_shard: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Rows of every member's shard; raises on all members where their inputs cannot belong together."""
    known = torch.tensor([len(weight_shard), *hidden.shape], device=hidden.device)
    mine = torch.cat((known, _bounds(labels)))
    sizes, *same = torch.stack(_gather(mine, group)).T.tolist()
    for name, values in zip(SAME, same, strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"{name} of the group's members are {values}: must be the same on all")
    if sum(sizes) == 0:
        raise ValueError("weight_shard has no rows on any member: the vocabulary is empty")
    supervised, lowest, highest = (values[0] for values in same[2:])
    if supervised and (lowest < 0 or highest >= sum(sizes)):
        check_labels(labels, sum(sizes))  # says which
    return [int(size) for size in sizes]


def _bounds(labels: Tensor) -> Tensor:
    """[3] how many labels are supervised, the lowest of them and the highest, for which the host need not wait."""
    supervised = labels != UNSUPERVISED
    if len(labels) == 0:
        return torch.zeros(3, dtype=torch.int64, device=labels.device)
    lowest = labels.masked_fill(~supervised, torch.iinfo(labels.dtype).max).min()
    highest = labels.masked_fill(~supervised, torch.iinfo(labels.dtype).min).max()
    return torch.stack((supervised.sum(), lowest.to(torch.int64), highest.to(torch.int64)))


def _merge(statistics: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """`chunked.Merge` over the group's slices; in the same order on all members, hence with the same result."""
    largest, total, target = torch.stack(_gather(statistics, group)).unbind(dim=1)  # each [m, n]
    top = largest.amax(dim=0)
    return torch.stack((top, (total * (largest - top).exp()).sum(dim=0), target.sum(dim=0)))


def _gather(mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return gathered
