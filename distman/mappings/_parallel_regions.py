"""Pairs of operations, each the other's adjoint for one loss that every rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman.collectives import (
    GroupLike,
    all_reduce_sum,
    check_call,
    join_shards,
    linear,
    normalize_dim,
    resolve_group,
    shard_sizes,
)
from distman.topology import split_sizes


@collective
def copy_to_parallel_region(input: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Use a replicated tensor on each rank of a region: as it is, with its gradient summed over the group.

    Local; its backward pass is collective. Differentiable.

    Args:
        input: A tensor that is equal on all ranks of the group.
        group: A process group, the name of one, or None for the world.

    Returns:
        The same values, a view.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: The group or the device does not fit.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.

    Example on two ranks:
        >>> x = torch.ones(2, requires_grad=True)
        >>> (copy_to_parallel_region(x) * (rank + 1)).sum().backward()
        >>> x.grad  # 1 from rank 0, 2 from rank 1
        tensor([3., 3.])
    """
    members = resolve_group(group)
    input = check_call("copy_to_parallel_region", input, members, name="input", is_local=True)
    return linear(input, _copy, all_reduce_sum, members, True)


@collective
def reduce_from_parallel_region(input: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Add up the partial results of the ranks of a region; the gradient of the sum is each one's gradient.

    Collective. Blocking. Differentiable. 16-bit floats are added up in float32.

    Args:
        input: This rank's partial result, of one shape on all ranks.
        group: A process group, the name of one, or None for the world.

    Returns:
        The sum, a new tensor, equal on all ranks.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: The group or the device does not fit.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> partial = torch.tensor([1.0, rank], requires_grad=True)
        >>> total = reduce_from_parallel_region(partial)
        >>> total.sum().backward()
        >>> total.tolist(), partial.grad.tolist()
        ([2.0, 1.0], [1.0, 1.0])
    """
    members = resolve_group(group)
    input = check_call("reduce_from_parallel_region", input, members, name="input")
    return linear(input, all_reduce_sum, _copy, members, True)


@collective
def scatter_to_parallel_region(input: torch.Tensor, dim: int = -1, group: GroupLike = None) -> torch.Tensor:
    """Take this rank's slice of a replicated tensor, sized by :func:`distman.split_sizes`.

    Local; its backward pass is collective and gathers the slices' gradients. Differentiable.

    Args:
        input: A tensor that is equal on all ranks of the group.
        dim: Dim to split.
        group: A process group, the name of one, or None for the world.

    Returns:
        The slice, a new tensor.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: The tensor has no such dim; or the group or the device does not fit.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.

    Example on two ranks:
        >>> part = scatter_to_parallel_region(torch.arange(5.0))
        >>> all_gather_objects(part.tolist())
        [[0.0, 1.0, 2.0], [3.0, 4.0]]
    """
    return scatter_region(input, dim, group, split_sizes)


def scatter_region(
    input: torch.Tensor, dim: int, group: GroupLike, split: Callable[[int, int], list[int]]
) -> torch.Tensor:
    """Do what :func:`scatter_to_parallel_region` does, with another split of the dim's length into as many parts."""
    members = resolve_group(group)
    input = check_call("scatter_to_parallel_region", input, members, name="input", is_local=True, dim=dim)
    dim = normalize_dim(dim, input.ndim)
    return linear(input, _take_slice, join_shards, split(input.shape[dim], members.size), dim, True, members)


@collective
def gather_from_parallel_region(
    input: torch.Tensor, dim: int = -1, shapes: Sequence[int] | None = None, group: GroupLike = None
) -> torch.Tensor:
    """Put the slices of the ranks of a region together; the gradient of a slice is that slice of the gradient.

    Collective. Blocking. Differentiable.

    Args:
        input: This rank's slice.
        dim: Dim along which the slices follow each other.
        shapes: Length of every rank's slice along ``dim``; None lets the ranks exchange them.
        group: A process group, the name of one, or None for the world.

    Returns:
        The full tensor, new and equal on all ranks.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Dim, shapes, group or device do not fit; without ``shapes`` on every rank: the slices differ in
            dtype or in another dim.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> features = torch.full((2, rank + 1), rank)
        >>> gather_from_parallel_region(features)
        tensor([[0, 1, 1],
                [0, 1, 1]])
    """
    members = resolve_group(group)
    input = check_call(
        "gather_from_parallel_region",
        input,
        members,
        name="input",
        free_dim=dim,
        unites_grad=shapes is None,
        dim=dim,
        shapes=shapes,
    )
    input, sizes, dim = shard_sizes("gather_from_parallel_region", input, shapes, dim, members)
    return linear(input, join_shards, _take_slice, sizes, dim, True, members)


def _copy(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def _take_slice(tensor: torch.Tensor, sizes: list[int], dim: int, _: bool, group: Group) -> torch.Tensor:
    part: torch.Tensor = tensor.split(sizes, dim)[group.rank]
    return part.clone(memory_format=torch.contiguous_format)
