"""``physicsnemo.distributed.fused_all_reduce``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distman import collectives
from distman.collectives import GroupLike, taken_apart
from distman.manager import DistributedManager

__all__ = ["fused_all_reduce"]


@torch.no_grad()
def fused_all_reduce(
    tensors: Any,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: GroupLike = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Do what :func:`distman.collectives.fused_all_reduce` does, before the manager is initialized too.

    Collective. Blocking unless ``async_op``. Not differentiable. Without the manager it is done over the process group
    that is there, one tensor after another; without a group there is one process.

    Returns:
        A tensor, a list, a dict or a TensorDict; with ``async_op`` a pair of that and a
        :class:`~distman.collectives.FusedWork`.

    Raises:
        TypeError: It is something else, or holds something else.
        ValueError: Integers are beside floats without ``buffer_dtype``.
    """
    if isinstance(tensors, Sequence) and not isinstance(tensors, str | bytes):
        tensors = list(tensors)  # a list comes back for any sequence, and a dict for any mapping
    elif isinstance(tensors, Mapping) and not hasattr(tensors, "batch_size"):
        tensors = dict(tensors)
    if DistributedManager.is_initialized():
        reduce: Any = collectives.fused_all_reduce  # typed by whether async_op is True, which is not known here
        return reduce(tensors, op=op, group=group, buffer_dtype=buffer_dtype, device=device, async_op=async_op)
    values, rebuild = taken_apart(tensors, op, buffer_dtype)
    results = [value.detach().clone() for value in values]
    if dist.is_initialized():  # a group that other code made, such as a fake one to trace a program with
        results = [_reduced(one, op, group, buffer_dtype) for one in results]
    result = rebuild(iter(results))
    return (result, collectives.FusedWork(None)) if async_op else result


def _reduced(tensor: torch.Tensor, op: Any, group: Any, buffer_dtype: torch.dtype | None) -> torch.Tensor:
    is_short = tensor.dtype in (torch.float16, torch.bfloat16)
    total = tensor.to(buffer_dtype or (torch.float32 if is_short else tensor.dtype))
    dist.all_reduce(total, op, group)
    return total.to(tensor.dtype)
