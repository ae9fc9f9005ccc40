"""``physicsnemo.distributed.utils``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from distman import collectives, mappings
from distman.collectives import GroupLike, all_reduce_sum, resolve_group
from distman.compat.physicsnemo.autograd import gather_v
from distman.metrics import reduce_loss

__all__ = [
    "all_gather_v_bwd_wrapper",
    "all_gather_v_wrapper",
    "compute_split_shapes",
    "distributed_transpose",
    "gather_v_wrapper",
    "get_memory_format",
    "indexed_all_to_all_v_wrapper",
    "indexed_all_to_all_v_wrapper_bwd",
    "mark_module_as_shared",
    "pad_helper",
    "reduce_loss",
    "scatter_v_wrapper",
    "split_tensor_along_dim",
    "truncate_helper",
    "unmark_module_as_shared",
]

P = ParamSpec("P")


class _MarkError(ValueError, RuntimeError):
    """A module's parameters are marked as shared already, or are not: an error of distman, and one of physicsnemo."""


def _raising_both(function: Callable[P, torch.nn.Module]) -> Callable[P, torch.nn.Module]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> torch.nn.Module:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise _MarkError(str(error)) from None

    return call


def compute_split_shapes(size: int, num_chunks: int) -> list[int]:
    """Return the lengths of the chunks of a dim: all are equal but the last, which takes what is left.

    Local. That may be more than the others have. :func:`distman.split_sizes` is balanced instead.

    Example:
        >>> compute_split_shapes(14, 4), compute_split_shapes(9, 4)
        ([4, 4, 4, 2], [2, 2, 2, 3])
    """
    length = -(-size // num_chunks)
    if num_chunks > 1 and size - length * (num_chunks - 1) <= 0:  # nothing would be left for the last one
        length = size // num_chunks
    return [length] * (num_chunks - 1) + [size - length * (num_chunks - 1)]


def get_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels_last for a tensor with that layout in memory, else the contiguous format. Local."""
    return torch.channels_last if tensor.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def pad_helper(tensor: torch.Tensor, dim: int, new_size: int, mode: str = "zero") -> torch.Tensor:
    """Append zeros along a dim or, with ``mode="conj"``, the conjugates of what follows the first entry, reversed.

    Local. Differentiable.
    """
    num_new = new_size - tensor.shape[dim]
    if mode == "conj":
        return torch.cat([tensor, tensor.narrow(dim, 1, num_new).conj().flip(dim)], dim)
    shape = list(tensor.shape)
    shape[dim] = num_new
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def truncate_helper(tensor: torch.Tensor, dim: int, new_size: int) -> torch.Tensor:
    """Return what is below an index along a dim, as a new tensor of the same memory format. Local. Differentiable."""
    return tensor.narrow(dim, 0, new_size).contiguous(memory_format=get_memory_format(tensor))


def split_tensor_along_dim(tensor: torch.Tensor, dim: int, num_chunks: int) -> tuple[torch.Tensor, ...]:
    """Return the chunks of a tensor along a dim, of the lengths of :func:`compute_split_shapes`; views.

    Local. Differentiable.

    Raises:
        ValueError: There is no such dim, or it is too short.
    """
    if dim >= tensor.ndim:
        raise ValueError(
            f"dim must be below {tensor.ndim}, the number of the tensor's dims, got {dim}. Choose another."
        )
    if tensor.shape[dim] < num_chunks:
        raise ValueError(
            f"the tensor must have {num_chunks} entries along dim {dim} for as many chunks, got {tensor.shape[dim]}. "
            "Choose another dim, or fewer ranks."
        )
    parts: tuple[torch.Tensor, ...] = tensor.split(compute_split_shapes(tensor.shape[dim], num_chunks), dim)
    return parts


def distributed_transpose(
    tensor: torch.Tensor, dim0: int, dim1: int, group: GroupLike = None, async_op: bool = False
) -> tuple[list[torch.Tensor], collectives.FusedWork | None]:
    """Turn shards along ``dim1`` into shards along ``dim0``, as the pieces that came from each rank.

    Collective. Blocking, with ``async_op`` too. Differentiable.

    Returns:
        The pieces in rank order, and the work object or None.
    """
    sizes = collectives.all_gather_v(torch.tensor([tensor.shape[dim1]], device=tensor.device), group=group).tolist()
    whole = collectives.distributed_transpose(tensor, dim0, dim1, group, sizes=sizes)
    return list(whole.split(sizes, dim1)), collectives.FusedWork(None) if async_op else None


def all_gather_v_wrapper(
    tensor: torch.Tensor, sizes: Sequence[Any] | None = None, dim: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """Do what :func:`distman.collectives.all_gather_v` does, without a gradient. Collective. Blocking."""
    lengths = None if sizes is None else [size[dim] if isinstance(size, Sequence) else size for size in sizes]
    with torch.no_grad():
        full = collectives.all_gather_v(tensor, lengths, dim, group=group)
    return full.contiguous(memory_format=get_memory_format(tensor))


all_gather_v_bwd_wrapper = torch.no_grad()(collectives.reduce_scatter_v)
gather_v_wrapper = torch.no_grad()(gather_v)
scatter_v_wrapper = torch.no_grad()(collectives.scatter_v)


@torch.no_grad()
def indexed_all_to_all_v_wrapper(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Do what :func:`distman.collectives.indexed_all_to_all_v` does, without a gradient. Collective. Blocking."""
    return collectives.indexed_all_to_all_v(tensor, indices, sizes, dim=dim, group=group)


def indexed_all_to_all_v_wrapper_bwd(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    tensor_size_along_dim: int,
    use_fp32: bool = True,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Send the gradients of :func:`indexed_all_to_all_v_wrapper` back, and add them up where they came from.

    Collective. Blocking.
    """
    shape = list(tensor.shape)
    shape[dim] = tensor_size_along_dim
    with torch.enable_grad():
        sent = tensor.new_zeros(shape, requires_grad=True)
        received = collectives.indexed_all_to_all_v(sent, indices, sizes, use_fp32, dim, group)
    return torch.autograd.grad(received, sent, tensor)[0]


@_raising_both
def mark_module_as_shared(
    module: torch.nn.Module,
    process_group: GroupLike = None,
    recurse: bool = True,
    use_fp32_reduction: bool = True,
) -> torch.nn.Module:
    """Do what :func:`distman.mappings.mark_module_as_shared` does.

    Local; each backward pass through the module becomes collective.

    Raises:
        _MarkError: A parameter is marked already.
    """
    return mappings.mark_module_as_shared(module, process_group, recurse, use_fp32_reduction)


unmark_module_as_shared = _raising_both(mappings.unmark_module_as_shared)


def _reduce(input_: torch.Tensor, use_fp32: bool = True, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the sum of a tensor over a group; the tensor stays as it is."""
    return all_reduce_sum(input_, resolve_group(group), use_fp32=use_fp32)


def _split(input_: torch.Tensor, dim_: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's chunk of a tensor that all ranks hold."""
    members = resolve_group(group)
    part = split_tensor_along_dim(input_, dim_, members.size)[members.rank]
    return part.contiguous(memory_format=get_memory_format(input_))
