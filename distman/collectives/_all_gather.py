"""Every rank gets the shards of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._torch_internals import EagerFunction
from distman.collectives import _reduce_scatter  # the module, since each of the two needs the other
from distman.collectives._border import still_carried
from distman.collectives._evenly import gather_evenly
from distman.collectives._exchange import exchange, layout_of
from distman.collectives._result_memory import new_empty
from distman.collectives._validation import (
    GroupLike,
    check_call,
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
    full: torch.Tensor = AllGather.apply(tensor, lengths, dim, use_fp32, members)
    return full


class AllGather(EagerFunction):
    """The primitive under :func:`all_gather_v`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        sizes: list[int],
        dim: int,
        use_fp32: bool,
        group: Group,
    ) -> torch.Tensor:
        ctx.arguments = sizes, dim, use_fp32, group
        tensor = still_carried(tensor, group)
        shape = list(tensor.shape)
        shape[dim] = sum(sizes)
        what = f"all_gather {layout_of(tensor, dim)} dim {dim} sizes {sizes}"
        full = new_empty(tensor, shape)
        if min(sizes) == max(sizes) and gather_evenly(tensor, full, dim, group, what):
            return full
        exchange([tensor] * group.size, full.split(sizes, dim), group, what)
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _reduce_scatter.ReduceScatter.apply(grad, *ctx.arguments), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return AllGather.apply(tangent, *ctx.arguments)
