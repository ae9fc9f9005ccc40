"""Shards of one length on all ranks: one operation of the backend, which is faster than messages on GPUs."""

from __future__ import annotations

import torch

from distman._coordination.tracking import check_all_run_here
from distman._coordination.wait_scope import collective
from distman._groups.registry import Group, process_group_of
from distman._torch_internals import all_gather_single, collects_batches, reduce_scatter_single
from distman.collectives._exchange import announce
from distman.collectives._transport import carried


@collective
def gather_evenly(tensor: torch.Tensor, full: torch.Tensor, dim: int, group: Group, what: str) -> bool:
    """Put the equal shards of all ranks together in ``full``; return False where :func:`exchange` is to do it."""
    pg = process_group_of(group)
    if pg is None or not tensor.numel() or not collects_batches(pg, tensor.device):
        return False
    check_all_run_here(group.ranks, "the backward pass of a collective")
    announce(group, what)
    mine = tensor.resolve_conj().resolve_neg().contiguous()
    parts = full if dim == 0 else mine.new_empty(group.size, *mine.shape)
    all_gather_single(carried(parts), carried(mine), group=pg)
    if dim != 0:
        full.unflatten(dim, (group.size, -1)).copy_(parts.movedim(0, dim))
    return True


@collective
def reduce_evenly(tensor: torch.Tensor, dim: int, group: Group, what: str) -> torch.Tensor | None:
    """Return this rank's slice of the sum of the ranks' tensors; None where :func:`exchange` is to move them."""
    pg = process_group_of(group)
    is_summed = tensor.dtype not in (torch.int16, torch.bool)  # by no backend
    if pg is None or not is_summed or not tensor.numel() or not collects_batches(pg, tensor.device):
        return None
    check_all_run_here(group.ranks, "the backward pass of a collective")
    announce(group, what)
    parts = torch.stack(tensor.resolve_conj().resolve_neg().chunk(group.size, dim)).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_single(carried(mine), carried(parts), group=pg)
    return mine
