"""Packing, balancing and planning: integers in, integers out.

Names resolve on first use (PEP 562): importing the package costs nothing, using a routine imports numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqmesh.packer.lazy import lazy_names

if TYPE_CHECKING:
    from seqmesh.packer.balance import Partition as Partition
    from seqmesh.packer.balance import partition as partition
    from seqmesh.packer.bins import Bins as Bins
    from seqmesh.packer.bins import pack as pack
    from seqmesh.packer.cost import CostModel as CostModel
    from seqmesh.packer.cost import Machine as Machine
    from seqmesh.packer.cost import ModelShape as ModelShape
    from seqmesh.packer.mesh import plan_step as plan_step
    from seqmesh.packer.offload import Offload as Offload
    from seqmesh.packer.online import OnlinePacker as OnlinePacker
    from seqmesh.packer.online import packs as packs
    from seqmesh.packer.permute import permutation as permutation
    from seqmesh.packer.plan import Mesh as Mesh
    from seqmesh.packer.plan import StepPlan as StepPlan
    from seqmesh.packer.plan import check_plan as check_plan
    from seqmesh.packer.rows import Rows as Rows
    from seqmesh.packer.rows import plan_rows as plan_rows
    from seqmesh.packer.warm import warmup as warmup

_HOMES = {
    "Bins": "bins",
    "CostModel": "cost",
    "Machine": "cost",
    "Mesh": "plan",
    "ModelShape": "cost",
    "Offload": "offload",
    "OnlinePacker": "online",
    "Partition": "balance",
    "Rows": "rows",
    "StepPlan": "plan",
    "check_plan": "plan",
    "pack": "bins",
    "packs": "online",
    "partition": "balance",
    "permutation": "permute",
    "plan_rows": "rows",
    "plan_step": "mesh",
    "warmup": "warm",
}
__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
