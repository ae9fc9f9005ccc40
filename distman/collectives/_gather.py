"""One rank gets the shards of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._torch_internals import EagerFunction
from distman.collectives import _scatter  # the module, since each of the two needs the other
from distman.collectives._border import still_carried
from distman.collectives._exchange import exchange, layout_of
from distman.collectives._result_memory import new_empty
from distman.collectives._validation import (
    GroupLike,
    check_call,
    check_member,
    resolve_group,
    shard_sizes,
)


@collective
def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    dst: int = 0,
    group: GroupLike = None,
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
    full: torch.Tensor = Gather.apply(tensor, lengths, dim, dst, members)
    return full


class Gather(EagerFunction):
    """The primitive under :func:`gather_v`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sizes: list[int], dim: int, dst: int, group: Group) -> torch.Tensor:
        ctx.arguments = sizes, dim, dst, group
        tensor = still_carried(tensor, group)
        shape = list(tensor.shape)
        shape[dim] = sum(sizes) if group.rank == dst else 0
        full = new_empty(tensor, shape)
        nothing = tensor.narrow(dim, 0, 0)
        sends = [tensor if rank == dst else nothing for rank in range(group.size)]
        receives = full.split(sizes, dim) if group.rank == dst else [full] * group.size
        what = f"gather {layout_of(tensor, dim)} dim {dim} sizes {sizes} dst {dst}"
        exchange(sends, receives, group, what)
        return full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _scatter.Scatter.apply(grad, *ctx.arguments), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return Gather.apply(tangent, *ctx.arguments)
