"""The blocks of a field: which rank has which, and how they are handed out, put together and read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from distman.collectives import GroupLike, all_gather_v, broadcast_data, gather_v, resolve_group, scatter_v
from distman.data import Hdf5Dataset
from distman.domain._axes import Boundary, IntArray, places
from distman.domain._halo import Halo, checked_windows, pair
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
    _check_weights(weights or {}, {dim: group.size for dim, group in groups.items()})
    found: list[int] | str = _lengths(tensor, dims)
    for name in dims.values():  # what the last one brings is the first rank's everywhere
        found = broadcast_data(found, src=0, group=name)
    if isinstance(found, str):
        raise ValueError(found)
    for at, (dim, group) in enumerate(groups.items()):
        if all(other.rank == 0 for other in [*groups.values()][at + 1 :]):
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
        ValueError: Dims or groups do not fit; on every rank of a group: its blocks differ in dtype or in another dim.

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
    return split_sizes(length, num) if shares is None else weighted_sizes(length, shares)


def _check_weights(weights: Mapping[int, Sequence[float]], nums: Mapping[int, int]) -> None:
    """Compare weights with the number of ranks along each dim, which all ranks know."""
    for dim, shares in weights.items():
        if dim not in nums:
            raise ValueError(
                f"weights must be for the split dims {list(nums)}, got some for dim {dim}. Name such dims."
            )
        if len(shares) != nums[dim]:
            raise ValueError(
                f"weights must hold one number for each of the {nums[dim]} ranks of dim {dim}, got {list(shares)}. "
                "Pass as many as ranks."
            )
        weighted_sizes(0, shares)


def _lengths(tensor: torch.Tensor | None, dims: Dims) -> list[int] | str:
    """Return the lengths of the split dims, or what is wrong with a tensor."""
    if not isinstance(tensor, torch.Tensor):
        return f"tensor must be a field on the first rank, got {type(tensor).__name__}. Pass the full field there."
    if any(not -tensor.ndim <= dim < tensor.ndim for dim in dims):
        return f"dims must be dims of the field, of {tensor.ndim} dims, got {list(dims)}. Choose from these."
    return [tensor.shape[dim] for dim in dims]


def neighbours(group: GroupLike = None, *, periodic: bool = False) -> tuple[int | None, int | None]:
    """Return the ranks before and behind this one in a group, such as along an axis of a mesh.

    Local.

    Args:
        group: The name of the axis, a process group, or None for the world.
        periodic: Whether the first rank and the last one are neighbours, too.

    Returns:
        Two ranks of the world; None beyond an end.

    Example on two ranks:
        >>> all_gather_objects(neighbours("world")), neighbours("world", periodic=True) == (1 - rank, 1 - rank)
        ([(None, 1), (0, None)], True)
    """
    members = resolve_group(group)
    ends = (members.ranks[-1], members.ranks[0]) if periodic else (None, None)
    around = (ends[0], *members.ranks, ends[1])
    return around[members.rank], around[members.rank + 2]


def weighted_sizes(length: int, weights: Sequence[float]) -> list[int]:
    """Return the sizes of parts of a length in proportion to weights.

    Local.

    Args:
        length: Length of the dim.
        weights: For each part, a number of 0 or more, such as the speed of its rank.

    Raises:
        ValueError: A weight is negative, or all are 0.

    Example:
        >>> weighted_sizes(10, [1, 3])
        [2, 8]
    """
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ValueError(f"weights must be 0 or more, and one above 0, got {list(weights)}. Pass one for each part.")
    ends = [round(length * part / total) for part in itertools.accumulate(weights)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


class DomainDataset(Dataset[tuple[torch.Tensor, ...]]):
    """This rank's block, with a halo, of each sample of arrays; nothing else is read.

    Local. Sample ``i`` is ``array[i]`` for each of the arrays. Pass it to :func:`distman.data.distributed_loader` with
    the group that splits the samples, so that the ranks that share a sample read the blocks of the same one.

    Args:
        arrays: An :class:`distman.data.Hdf5Dataset`, or arrays: those of NumPy, also mapped into memory from a file,
            of zarr, or others with a shape, a dtype and slices. Fields have as many dims as the first one; others, such
            as times, are read whole.
        dims: For each split dim, counted from the end, its group: ``{-2: "rows", -1: "columns"}``.
        halo: Entries before and after the block: a number, or a pair; or such for some dims, the others having none.
        boundary: What is beyond the ends of a field, as in :func:`halo_exchange`; or such for some dims, the others
            having ``"zeros"``.
        weights: For some dims a number for each rank of the group, as in :func:`scatter_domain`.

    Raises:
        TypeError: ``dims`` is not a mapping.
        ValueError: The arrays differ in the number of samples; dims, halo, boundary or weights do not fit.

    Example on two ranks:
        >>> field = torch.arange(6.0).numpy().reshape(1, 6)
        >>> dataset = DomainDataset([field], {-1: "world"}, halo=1, boundary="circular")
        >>> all_gather_objects([block.tolist() for block in dataset[0]])
        [[[5.0, 0.0, 1.0, 2.0, 3.0]], [[2.0, 3.0, 4.0, 5.0, 0.0]]]
    """

    def __init__(
        self,
        arrays: Hdf5Dataset | Sequence[Any],
        dims: Dims,
        *,
        halo: Halo | Mapping[int, Halo] = 0,
        boundary: Boundary | Mapping[int, Boundary] = "zeros",
        weights: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        check_dims(dims)
        self._source = arrays
        shapes = [tuple(array.shape) for array in self._arrays()]
        groups = {dim: resolve_group(group) for dim, group in dims.items()}
        _check_weights(weights or {}, {dim: group.size for dim, group in groups.items()})
        ndim = len(shapes[0]) if shapes else 0
        if len({shape[:1] for shape in shapes}) != 1 or not all(-ndim < dim < 0 for dim in dims):
            raise ValueError(
                f"arrays must have one number of samples, and behind it the dims {list(dims)}, counted from the end, "
                f"got the shapes {shapes}. Pass arrays with a row for each sample."
            )
        self._length: int = shapes[0][0]
        self._windows: list[list[_Window]] = []  # of each array and dim
        for shape in shapes:
            windows = [_window(0, length, length, "none") for length in shape[1:]]
            for dim, members in groups.items() if len(shape) == ndim else ():
                width = pair(halo.get(dim, 0) if isinstance(halo, Mapping) else halo)
                beyond = boundary.get(dim, "zeros") if isinstance(boundary, Mapping) else boundary
                sizes = block_sizes(shape[dim], dim, members.size, weights)
                bounds = checked_windows(dim, sizes, width, beyond).bounds[members.rank]
                windows[dim] = _window(*bounds, shape[dim], beyond)
            self._windows.append(windows)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        index = range(self._length)[index]  # an empty block is read of no array that would refuse it
        return tuple(map(_read, self._arrays(), itertools.repeat(index), self._windows))

    def _arrays(self) -> Sequence[Any]:
        return self._source.arrays() if isinstance(self._source, Hdf5Dataset) else self._source


_Part = tuple[slice, slice, IntArray | None]  # what is read, its place in the window, and its order if that is another
_Window = tuple[int, list[_Part]]  # its length, and what fills it


def _window(start: int, end: int, length: int, boundary: Boundary) -> _Window:
    entries = places(start, end, length, boundary)
    filled = np.flatnonzero(entries >= 0)
    parts = np.split(filled, np.flatnonzero(np.abs(np.diff(entries[filled])) > 1) + 1)
    return end - start, [_part(entries[part], int(part[0])) for part in parts if len(part)]


def _part(entries: IntArray, place: int) -> _Part:
    """Return how neighbouring entries are read at once, in whatever order, mirrored or repeated, they are."""
    low, high = int(entries.min()), int(entries.max()) + 1
    is_rising = len(entries) == high - low and entries[0] == low
    return slice(low, high), slice(place, place + len(entries)), None if is_rising else entries - low


def _read(array: Any, index: int, windows: Sequence[_Window]) -> torch.Tensor:
    dtype = np.dtype(array.dtype).newbyteorder("=")  # torch takes this machine's byte order alone
    block = np.zeros([length for length, _ in windows], dtype)
    for parts in itertools.product(*(found for _, found in windows)):
        piece = np.asarray(array[(index, *(read for read, _, _ in parts))])
        for dim, (_, _, order) in enumerate(parts):
            piece = piece if order is None else piece.take(order, dim)
        block[tuple(place for _, place, _ in parts)] = piece
    return torch.from_numpy(block) if block.ndim else torch.tensor(block)
