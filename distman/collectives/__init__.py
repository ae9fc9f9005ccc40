"""Collectives that are differentiable and take shards of any sizes, one file for each and its adjoint."""

from __future__ import annotations

import sys

from distman._base.public_names import missing_name

# What is imported as itself is for other parts of the package.
from distman.collectives._all_gather import (
    all_gather_v,
    join_shards as join_shards,
    reduce_scatter_v,
)
from distman.collectives._all_reduce import all_reduce_sum as all_reduce_sum
from distman.collectives._all_to_all import (
    all_to_all_v,
    distributed_transpose,
    indexed_all_to_all_v,
    reshard as reshard,
)
from distman.collectives._border import refuse as refuse, still_carried as still_carried, with_memory as with_memory
from distman.collectives._debug import compare_calls as compare_calls, tell_apart as tell_apart
from distman.collectives._exchange import (
    all_gather_numbers as all_gather_numbers,
    control_device as control_device,
    exchange as exchange,
    layout_of as layout_of,
    send_buffers as send_buffers,
)
from distman.collectives._fused import FusedWork, fused_all_reduce, taken_apart as taken_apart
from distman.collectives._gather import gather_v, scatter_v
from distman.collectives._headers import refuse_in_sum as refuse_in_sum, sum_numbers as sum_numbers
from distman.collectives._linear import linear as linear
from distman.collectives._objects import all_gather_objects, broadcast_data, broadcast_if_ddp, gather_objects
from distman.collectives._result_memory import new_empty as new_empty
from distman.collectives._validation import (
    GroupLike,
    admitted as admitted,
    check_call as check_call,
    check_member as check_member,
    check_sizes as check_sizes,
    normalize_dim as normalize_dim,
    resolve_group as resolve_group,
    shard_sizes as shard_sizes,
)

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


def __getattr__(name: str) -> object:
    raise missing_name(name, sys._getframe(1), __name__)
