"""The sum of one tensor over a group, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman.collectives._exchange import process_group_of

_IN_FLOAT32 = (torch.float16, torch.bfloat16)
_IN_INT32 = (torch.int16, torch.bool)  # no backend adds them up; a sum of truths is whether one is true


@collective
def all_reduce_sum(tensor: torch.Tensor, group: Group, *, use_fp32: bool) -> torch.Tensor:
    """Return the sum of one tensor over a group, as a new tensor.

    Collective. Blocking.

    Args:
        tensor: The tensor, of one shape and dtype on all ranks; never changed.
        group: The group.
        use_fp32: Add 16-bit floats up in float32.
    """
    dtype = tensor.dtype
    if use_fp32 and dtype in _IN_FLOAT32:
        dtype = torch.float32
    elif dtype in _IN_INT32:
        dtype = torch.int32
    total = tensor.detach().to(dtype, copy=True).contiguous()
    if group.size > 1:
        dist.all_reduce(total, group=process_group_of(group))
    return total.to(tensor.dtype)


class AllReduceSum(torch.autograd.Function):
    """The sum as a function of all ranks' tensors: the gradient of a term is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, use_fp32: bool) -> torch.Tensor:
        ctx.arguments = group, use_fp32
        return all_reduce_sum(tensor, group, use_fp32=use_fp32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return AllReduceSum.apply(grad, *ctx.arguments), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> Any:
        return AllReduceSum.apply(tangent, *ctx.arguments)
