"""One rank gets the shards of all ranks, or hands out the slices of a full tensor: each is the other's adjoint."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from distman._coordination.wait_scope import collective
from distman._torch_internals import traced_by, untraced
from distman.collectives import _debug
from distman.collectives._all_to_all import reshard
from distman.collectives._border import DTYPES, MAX_NDIM, REFUSED, carried, raise_refusals, refusal_text, still_carried
from distman.collectives._exchange import all_gather_texts, broadcast_numbers
from distman.collectives._validation import (
    GroupLike,
    check_call,
    check_member,
    check_sizes,
    normalize_dim,
    resolve_group,
    shard_sizes,
)
from distman.manager import DistributedManager


@collective
def gather_v(
    tensor: torch.Tensor, sizes: Sequence[int] | None = None, dim: int = 0, dst: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """Concatenate the shards of all ranks along ``dim`` on one rank, in rank order.

    Collective. Blocking. Differentiable: every rank gets its slice of the gradient on ``dst``. The backward pass is
    collective too: the other ranks run it through their empty results, for example ``result.sum().backward()``.

    Args:
        tensor: This rank's shard, shape ``(*, n, *)`` with n at ``dim``; n may differ between ranks and be 0.
        sizes: The n of every rank, the same list on all ranks; None lets the ranks exchange them.
        dim: Dim along which the shards follow each other.
        dst: The rank in the group that gets the full tensor.
        group: A process group, the name of one, or None for the world.

    Returns:
        On ``dst`` the full tensor, shape ``(*, sum(sizes), *)``; elsewhere an empty tensor, shape ``(*, 0, *)``.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Sizes, dim, dst, group or device do not fit; without ``sizes`` on every rank: the shards differ
            in dtype or in another dim.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> full = gather_v(torch.full((rank + 1, 2), rank), dst=1)
        >>> all_gather_objects(tuple(full.shape))
        [(0, 2), (3, 2)]
    """
    members = resolve_group(group)
    tensor = check_call(
        "gather_v", tensor, members, free_dim=dim, unites_grad=sizes is None, dim=dim, sizes=sizes, dst=dst
    )
    check_member("dst", dst, members)
    tensor, lengths, dim = shard_sizes("gather_v", tensor, sizes, dim, members)
    to_dst = [tensor.shape[dim] if rank == dst else 0 for rank in range(members.size)]
    from_all = lengths if members.rank == dst else [0] * members.size
    return reshard(tensor, (dim, to_dst), (dim, from_all), members, f"gather sizes {lengths} dst {dst}")


@collective
def scatter_v(
    tensor: torch.Tensor | None, sizes: Sequence[int], dim: int = 0, src: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """Hand out the slices of one rank's full tensor along ``dim``, in rank order.

    Collective. Blocking. Differentiable, once: the gradient on ``src`` is the slices' gradients, one behind the
    other.

    Args:
        tensor: On ``src`` the full tensor, shape ``(*, sum(sizes), *)``; elsewhere anything, such as None.
        sizes: Length of every rank's slice, the same list on all ranks.
        dim: Dim along which the slices follow each other.
        src: The rank in the group that holds the full tensor.
        group: A process group, the name of one, or None for the world.

    Returns:
        This rank's slice, shape ``(*, sizes[group rank], *)``, a new tensor, on the manager's device or, where a
        tensor was given, on that one's. It requires a gradient if the tensor on ``src`` does.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Sizes, dim, group, or the tensor on ``src`` do not fit.
        PlanMismatchError: On the other ranks: the tensor on ``src`` does not fit, or is one that messages cannot carry.
            On every rank that waits, in debug mode on all: the ranks call differently.

    Example on two ranks:
        >>> full = torch.arange(5) if rank == 0 else None
        >>> part = scatter_v(full, sizes=[3, 2])
        >>> all_gather_objects(part.tolist())
        [[0, 1, 2], [3, 4]]
    """
    members = resolve_group(group)
    _debug.compare_calls("scatter_v", members, dim=dim, sizes=sizes, src=src)
    check_member("src", src, members)
    sizes = check_sizes(sizes, members)
    header, problem = [REFUSED, *[0] * (3 + MAX_NDIM)], None
    try:
        tensor = carried(tensor, members) if isinstance(tensor, torch.Tensor) else tensor
        if members.rank == src:
            header = _describe(tensor, sizes, dim)
    except (TypeError, ValueError) as error:
        problem = error  # raised below on the source, when the others know that there is one
        tensor = None
    with untraced() if traced_by() else contextlib.nullcontext():
        dtype, needs_grad, axis, ndim, *shape = broadcast_numbers(header, src, members)
    if dtype == REFUSED:
        if members.rank != src or problem is None:
            raise_refusals(members)
        all_gather_texts(refusal_text(problem, "scatter_v", members), members)
        raise problem
    device = tensor.device if isinstance(tensor, torch.Tensor) else DistributedManager().device
    if members.rank == src and tensor is not None:
        full = tensor
    else:
        shape[axis] = 0
        full = still_carried(torch.empty(shape[:ndim], dtype=DTYPES[dtype], device=device), members, "tensor")
        if needs_grad:
            full.requires_grad_()
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:  # it gets a gradient of zeros
                # None of these keeps anything: a checkpointed rank repeats its forward pass when it needs what it kept.
                full = tensor.real[None][:0].to(full.dtype).reshape(full.shape)
    to_all = sizes if members.rank == src else [0] * members.size
    from_src = [sizes[members.rank] if rank == src else 0 for rank in range(members.size)]
    return reshard(full, (axis, to_all), (axis, from_src), members, f"scatter sizes {sizes} src {src}")


def _describe(tensor: torch.Tensor | None, sizes: list[int], dim: int) -> list[int]:
    if tensor is None:
        raise ValueError("tensor must be a tensor on rank src, got None. Pass the full tensor there.")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}. Pass a tensor.")
    axis = normalize_dim(dim, tensor.ndim)
    if tensor.shape[axis] != sum(sizes):
        raise ValueError(
            f"sizes must add up to the tensor's length {tensor.shape[axis]} along dim {dim}, got {sizes}. Pass the "
            "lengths of the slices."
        )
    needs_grad = torch.is_grad_enabled() and tensor.requires_grad
    shape = [*tensor.shape, *[0] * (MAX_NDIM - tensor.ndim)]
    return [DTYPES.index(tensor.dtype), int(needs_grad), axis, tensor.ndim, *shape]
