"""A dataset of which each rank reads its block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from distman.collectives import resolve_group
from distman.data import Hdf5Dataset
from distman.domain._blocks import Dims, block_sizes, check_dims
from distman.domain._halo import Halo, checked_windows, pair
from distman.domain._windows import Boundary, Run, runs_of


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
        ndim = len(shapes[0]) if shapes else 0
        if len({shape[:1] for shape in shapes}) != 1 or not all(-ndim < dim < 0 for dim in dims):
            raise ValueError(
                f"arrays must have one number of samples, and behind it the dims {list(dims)}, counted from the end, "
                f"got the shapes {shapes}. Pass arrays with a row for each sample."
            )
        self._length: int = shapes[0][0]
        self._runs: list[list[list[Run]]] = []  # for each array and dim, what is read of it
        self._shapes: list[list[int]] = []
        for shape in shapes:
            self._runs.append([[Run(0, 0, length)] for length in shape[1:]])
            self._shapes.append(list(shape[1:]))
            for dim, group in dims.items() if len(shape) == ndim else ():
                members = resolve_group(group)
                width = pair(halo.get(dim, 0) if isinstance(halo, Mapping) else halo)
                beyond = boundary.get(dim, "zeros") if isinstance(boundary, Mapping) else boundary
                sizes = block_sizes(shape[dim], dim, members.size, weights)
                bounds = checked_windows(dim, sizes, width, beyond).bounds[members.rank]
                self._runs[-1][dim] = list(runs_of(*bounds, shape[dim], beyond))
                self._shapes[-1][dim] = bounds[1] - bounds[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(map(_read, self._arrays(), itertools.repeat(index), self._shapes, self._runs))

    def _arrays(self) -> Sequence[Any]:
        return self._source.arrays() if isinstance(self._source, Hdf5Dataset) else self._source


def _read(array: Any, index: int, shape: Sequence[int], runs: Sequence[Sequence[Run]]) -> torch.Tensor:
    block = np.zeros(shape, np.dtype(array.dtype).newbyteorder("="))  # torch takes this machine's byte order alone
    for parts in itertools.product(*runs):
        piece = np.asarray(array[(index, *(slice(run.source, run.source + run.num_sent) for run in parts))])
        piece = np.flip(piece, tuple(dim for dim, run in enumerate(parts) if run.step < 0))
        block[tuple(slice(run.target, run.target + run.length) for run in parts)] = piece
    return torch.from_numpy(block) if block.ndim else torch.tensor(block)
