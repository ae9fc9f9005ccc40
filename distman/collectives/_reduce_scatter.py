"""Every rank gets its slice of the sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._torch_internals import EagerFunction
from distman.collectives import _all_gather  # the module, since each of the two needs the other
from distman.collectives._border import still_carried
from distman.collectives._evenly import reduce_evenly
from distman.collectives._exchange import exchange_and_add, layout_of
from distman.collectives._validation import GroupLike, check_call, check_sizes, normalize_dim, resolve_group


@collective
def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: GroupLike = None,
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
    part: torch.Tensor = ReduceScatter.apply(tensor, sizes, dim, use_fp32, members)
    return part


class ReduceScatter(EagerFunction):
    """The primitive under :func:`reduce_scatter_v`, and the adjoint of ``AllGather``."""

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
        what = f"reduce_scatter {layout_of(tensor)} dim {dim} sizes {sizes} use_fp32 {use_fp32}"
        is_widened = use_fp32 and tensor.dtype in (torch.float16, torch.bfloat16)  # after it was sent as it is
        if min(sizes) == max(sizes) and not is_widened:
            part = reduce_evenly(tensor, dim, group, what)
            if part is not None:
                return part
        return exchange_and_add(tensor.split(sizes, dim), group, what, use_fp32=use_fp32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return _all_gather.AllGather.apply(grad, *ctx.arguments), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return ReduceScatter.apply(tangent, *ctx.arguments)
