"""One rank hands out the blocks of a field, or puts them together: each is the other's adjoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distman.collectives import GroupLike, all_gather_v, broadcast_data, gather_v, resolve_group, scatter_v
from distman.domain._axes import weighted_sizes
from distman.topology import split_sizes

Dims = Mapping[int, GroupLike]


def scatter_domain(
    tensor: torch.Tensor | None, dims: Dims, *, weights: Mapping[int, Sequence[float]] | None = None
) -> torch.Tensor:
    """Hand out the blocks of a full field, which the first rank of the groups has.

    Collective. Blocking. Differentiable, once: the gradient is put together by :func:`gather_domain`.

    Args:
        tensor: On the rank that is the first of each group the full field; elsewhere anything, such as None.
        dims: For each split dim its group, such as the name of a mesh axis: ``{-2: "rows", -1: "columns"}``. The same
            on all ranks.
        weights: For some dims a number for each rank of the group, by which the shards are sized; the others are cut
            by :func:`distman.split_sizes`. The same on all ranks.

    Returns:
        This rank's block, a new tensor.

    Raises:
        TypeError: ``dims`` is not a mapping.
        ValueError: On every rank: the first rank has no tensor, or it has not these dims; weights do not fit.

    Example on two ranks:
        >>> block = scatter_domain(torch.arange(5) if rank == 0 else None, {-1: "world"})
        >>> all_gather_objects(block.tolist())
        [[0, 1, 2], [3, 4]]
    """
    check_dims(dims)
    groups = {dim: resolve_group(group) for dim, group in dims.items()}
    listed = list(groups.items())
    found: list[int] | str = _lengths(tensor, dims)
    steps = []
    for at, (dim, group) in enumerate(listed):
        if all(other.rank == 0 for _, other in listed[at + 1 :]):
            steps.append((at, dim, group))
            found = broadcast_data(found, src=0, group=dims[dim])
    if isinstance(found, str):
        raise ValueError(found)
    for at, dim, group in steps:
        tensor = scatter_v(tensor, block_sizes(found[at], dim, group.size, weights), dim, 0, dims[dim])
    if tensor is None:
        raise ValueError("dims must name a dim, got none. Pass {-1: 'world'}, say.")
    return tensor


def gather_domain(tensor: torch.Tensor, dims: Dims, *, everywhere: bool = False) -> torch.Tensor:
    """Put the blocks of a field together, on the rank that is the first of each group or on all of them.

    Collective. Blocking. Differentiable: each rank gets the gradient of its block, which is summed over the ranks that
    hold the full field. The backward pass is collective too: the others run it through their empty results.

    Args:
        tensor: This rank's block.
        dims: For each split dim its group, as in :func:`scatter_domain`.
        everywhere: Let all ranks have the full field.

    Returns:
        The full field, a new tensor; on ranks that do not get it an empty one.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry; ``dims`` is not a mapping.
        ValueError: Dims or groups do not fit; on every rank: the blocks differ in dtype or in a dim that is not split.

    Example on two ranks:
        >>> full = gather_domain(torch.full((2, rank + 1), rank), {-1: "world"})
        >>> all_gather_objects(tuple(full.shape))
        [(2, 3), (2, 0)]
    """
    check_dims(dims)
    for dim, group in reversed([*dims.items()]):
        if everywhere:
            tensor = all_gather_v(tensor, dim=dim, group=group)
        else:
            tensor = gather_v(tensor, dim=dim, group=group)
            if resolve_group(group).rank:
                break
    return tensor


def check_dims(dims: Dims) -> None:
    if not isinstance(dims, Mapping):
        raise TypeError(
            f"dims must map each split dim, counted from the end, to its group, such as {{-2: 'rows'}}, got {dims!r}."
        )


def block_sizes(length: int, dim: int, num: int, weights: Mapping[int, Sequence[float]] | None) -> list[int]:
    """Return the sizes of the blocks of so many ranks along a dim."""
    shares = (weights or {}).get(dim)
    if shares is None:
        return split_sizes(length, num)
    if len(shares) != num:
        raise ValueError(
            f"weights must hold one number for each of the {num} ranks of dim {dim}, got {list(shares)}. Pass as many "
            "as ranks."
        )
    return weighted_sizes(length, shares)


def _lengths(tensor: torch.Tensor | None, dims: Dims) -> list[int] | str:
    """Return the lengths of the split dims, or what is wrong with a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return f"tensor must be a field on the first rank, got {type(tensor).__name__}. Pass the full field there."
    if any(not -tensor.ndim <= dim < tensor.ndim for dim in dims):
        return f"dims must be dims of the field, of {tensor.ndim} dims, got {list(dims)}. Choose from these."
    return [tensor.shape[dim] for dim in dims]
