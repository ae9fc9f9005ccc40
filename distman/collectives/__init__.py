"""Collectives that are differentiable and take shards of any sizes, one file for each and its adjoint."""

from __future__ import annotations

from distman.collectives._all_gather import all_gather_v, reduce_scatter_v
from distman.collectives._all_to_all import all_to_all_v, distributed_transpose, indexed_all_to_all_v
from distman.collectives._fused import FusedWork, fused_all_reduce
from distman.collectives._gather import gather_v, scatter_v
from distman.collectives._objects import all_gather_objects, broadcast_data, broadcast_if_ddp, gather_objects
from distman.collectives._validation import GroupLike

__all__ = [
    "FusedWork",
    "GroupLike",
    "all_gather_objects",
    "all_gather_v",
    "all_to_all_v",
    "broadcast_data",
    "broadcast_if_ddp",
    "distributed_transpose",
    "fused_all_reduce",
    "gather_objects",
    "gather_v",
    "indexed_all_to_all_v",
    "reduce_scatter_v",
    "scatter_v",
]
