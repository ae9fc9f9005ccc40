"""The sum of one tensor over a group, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group, process_group_of
from distman.collectives._border import still_carried
from distman.collectives._exchange import announce, exchange, exchange_and_add, layout_of
from distman.collectives._result_memory import new_empty
from distman.collectives._sums import HALVES, NOT_ADDED
from distman.topology import split_sizes

_MAX_BYTES_AT_ONCE = 2**20  # to all other ranks; above that it pays to send each its part of the sum first


@collective
def all_reduce_sum(tensor: torch.Tensor, group: Group, use_fp32: bool) -> torch.Tensor:
    """Return the sum over a group as a new tensor; the terms are of one shape and dtype, and are not changed."""
    tensor = still_carried(tensor, group)
    dtype = tensor.dtype
    if use_fp32 and dtype in HALVES:
        dtype = torch.float32
    elif dtype in NOT_ADDED:
        dtype = torch.int32  # a sum of truths is whether one is true
    term = tensor.detach().to(dtype).contiguous()
    total = term.clone() if group.size == 1 else sum_in_rank_order(term, group)
    return total.to(tensor.dtype).view(tensor.shape).detach()  # no view, so that it may be changed in place


@collective
def sum_in_rank_order(term: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of contiguous tensors over a group of several ranks, as a new tensor."""
    what = f"sum of {layout_of(term)}"
    if term.is_cuda:
        announce(group, what)
        total = term.clone()
        dist.all_reduce(total, group=process_group_of(group))
        return total
    flat = term.view(-1)
    if group.size == 2 or (group.size - 1) * flat.numel() * flat.itemsize <= _MAX_BYTES_AT_ONCE:
        return exchange_and_add([flat] * group.size, group, what, use_fp32=False)
    sizes = split_sizes(flat.numel(), group.size)
    part = exchange_and_add(flat.split(sizes), group, what, use_fp32=False)
    full = new_empty(flat, flat.shape)
    exchange([part] * group.size, full.split(sizes), group, what)
    return full
