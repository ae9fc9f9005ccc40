"""Every rank gets the shards of all ranks, or its slice of their sum: two operations, each the other's adjoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import all_gather_single, collects_batches, reduce_scatter_single
from distman.collectives._border import still_carried
from distman.collectives._exchange import announce, exchange, exchange_and_add, layout_of
from distman.collectives._linear import linear
from distman.collectives._result_memory import new_empty
from distman.collectives._sums import HALVES, NOT_ADDED
from distman.collectives._transport import carried
from distman.collectives._validation import (
    GroupLike,
    check_call,
    check_sizes,
    normalize_dim,
    resolve_group,
    shard_sizes,
)


@collective
def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
) -> torch.Tensor:
    """Concatenate the shards of all ranks along ``dim``, in rank order.

    Collective. Blocking. Differentiable: the gradient of a shard is the sum, over ranks, of the matching slice of the
    output gradients.

    Args:
        tensor: This rank's shard, shape ``(*, n, *)`` with n at ``dim``; n may differ between ranks and be 0.
        sizes: The n of every rank, the same list on all ranks; None lets the ranks exchange them.
        dim: Dim along which the shards follow each other.
        use_fp32: Add gradients of 16-bit floats up in float32.
        group: A process group, the name of one, or None for the world.

    Returns:
        The full tensor, shape ``(*, sum(sizes), *)``, a new tensor, equal on all ranks. Along dim 0 the shards are
        received straight into it; along others they are rearranged once.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Sizes, dim, group or device do not fit; without ``sizes`` on every rank: the shards differ in
            dtype or in another dim.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> shard = torch.full((rank + 1, 2), rank)  # one row on rank 0, two on rank 1
        >>> all_gather_v(shard)
        tensor([[0, 0],
                [1, 1],
                [1, 1]])
    """
    members = resolve_group(group)
    tensor = check_call(
        "all_gather_v",
        tensor,
        members,
        free_dim=dim,
        unites_grad=sizes is None,
        dim=dim,
        sizes=sizes,
        use_fp32=use_fp32,
    )
    tensor, lengths, dim = shard_sizes("all_gather_v", tensor, sizes, dim, members)
    return linear(tensor, join_shards, sum_slices, lengths, dim, use_fp32, members)


@collective
def reduce_scatter_v(
    tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0, use_fp32: bool = True, group: GroupLike = None
) -> torch.Tensor:
    """Add up the full tensors of all ranks, and return this rank's slice of the sum.

    Collective. Blocking. Differentiable: the gradient of a full tensor is the slices' gradients of all ranks, one
    behind the other.

    Args:
        tensor: A full tensor, shape ``(*, sum(sizes), *)``, of the same shape on all ranks.
        sizes: Length of every rank's slice along ``dim``, the same list on all ranks.
        dim: Dim along which the slices follow each other.
        use_fp32: Add 16-bit floats up in float32.
        group: A process group, the name of one, or None for the world.

    Returns:
        The slice, shape ``(*, sizes[group rank], *)``, a new tensor. The terms are added in rank order; over NCCL in
        its own, where slices are of one size and no 16-bit floats are added up in float32.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Sizes, dim, group or device do not fit.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> part = reduce_scatter_v(torch.arange(5) + rank, sizes=[3, 2])
        >>> all_gather_objects(part.tolist())
        [[1, 3, 5], [7, 9]]
    """
    members = resolve_group(group)
    tensor = check_call("reduce_scatter_v", tensor, members, dim=dim, sizes=sizes, use_fp32=use_fp32)
    dim = normalize_dim(dim, tensor.ndim)
    sizes = check_sizes(sizes, members)
    if tensor.shape[dim] != sum(sizes):
        raise ValueError(
            f"sizes must add up to the tensor's length {tensor.shape[dim]} along dim {dim}, got {sizes}. Pass the "
            "lengths of the slices."
        )
    return linear(tensor, sum_slices, join_shards, sizes, dim, use_fp32, members)


@collective
def join_shards(tensor: torch.Tensor, sizes: list[int], dim: int, _: bool, group: Group) -> torch.Tensor:
    tensor = still_carried(tensor, group)
    shape = list(tensor.shape)
    shape[dim] = sum(sizes)
    full = new_empty(tensor, shape)
    what = f"all_gather {layout_of(tensor, dim)} dim {dim} sizes {sizes}"
    backend = _backend_for(tensor, sizes, group, what)
    if backend is None:
        exchange([tensor] * group.size, full.split(sizes, dim), group, what)
        return full
    mine = tensor.resolve_conj().resolve_neg().contiguous()
    parts = full if dim == 0 else mine.new_empty(group.size, *mine.shape)
    all_gather_single(carried(parts), carried(mine), group=backend)
    if dim != 0:
        full.unflatten(dim, (group.size, -1)).copy_(parts.movedim(0, dim))
    return full


@collective
def sum_slices(tensor: torch.Tensor, sizes: list[int], dim: int, use_fp32: bool, group: Group) -> torch.Tensor:
    tensor = still_carried(tensor, group)
    what = f"reduce_scatter {layout_of(tensor)} dim {dim} sizes {sizes} use_fp32 {use_fp32}"
    is_added_here = tensor.dtype in NOT_ADDED or (use_fp32 and tensor.dtype in HALVES)  # after it was sent as it is
    backend = None if is_added_here else _backend_for(tensor, sizes, group, what)
    if backend is None:
        return exchange_and_add(tensor.split(sizes, dim), group, what, use_fp32=use_fp32)
    parts = torch.stack(tensor.resolve_conj().resolve_neg().chunk(group.size, dim)).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_single(carried(mine), carried(parts), group=backend)
    return mine


def _backend_for(tensor: torch.Tensor, sizes: Sequence[int], group: Group, what: str) -> dist.ProcessGroup | None:
    """Announce the one operation of a backend that moves shards of one length faster on GPUs, and return the backend.

    None where :func:`exchange` is to move them.
    """
    backend = process_group_of(group)
    is_even = min(sizes) == max(sizes) and tensor.numel()
    if backend is None or not is_even or not collects_batches(backend, tensor.device):
        return None
    announce(group, what)
    return backend
