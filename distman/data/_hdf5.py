"""Samples in an HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from distman._base.arguments import require


class Hdf5Dataset(Dataset[tuple[torch.Tensor, ...]]):
    """The samples of an HDF5 file: sample ``i`` is row ``i`` of each of the datasets named.

    Local. Every process opens the file itself, when it first reads from it.

    Args:
        path: The file.
        names: Names of datasets in it, such as ``["fields", "grid/labels"]``, which must be equally long.

    Raises:
        ImportError: h5py is not installed.
        FileNotFoundError: The file does not exist.
        ValueError: A dataset does not exist in the file, or they differ in length.

    Example:
        >>> import h5py
        >>> with h5py.File("flow.h5", "w") as file:
        ...     file["fields"], file["labels"] = [[0.0, 1.0], [2.0, 3.0]], [0, 1]
        >>> dataset = Hdf5Dataset("flow.h5", ["fields", "labels"])
        >>> dataset[1]
        (tensor([2., 3.], dtype=torch.float64), tensor(1))
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        self._path, self._names = Path(path), list(names)
        self._opened: tuple[int, list[Any]] | None = None
        lengths = {name: len(data) for name, data in zip(self._names, self.arrays(), strict=True)}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"datasets must be equally long, got {lengths} from {path}. Name those with a row for each sample."
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.as_tensor(data[index]) for data in self.arrays())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def arrays(self) -> list[Any]:
        """Return the datasets of h5py as this process has opened them.

        Local.

        Example:
            >>> import h5py
            >>> with h5py.File("flow.h5", "w") as file:
            ...     file["labels"] = [5, 6, 7, 8]
            >>> Hdf5Dataset("flow.h5", ["labels"]).arrays()
            [<HDF5 dataset "labels": shape (4,), type "<i8">]
        """
        # Those opened before a fork cannot be shared with it. They are kept, since finding one by its name takes
        # several times as long as reading a row.
        if self._opened is None or self._opened[0] != os.getpid():
            h5py = require("h5py", "Hdf5Dataset")
            # HDF5 would read 64 kB around each row of a block that has a part of the rows.
            access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
            access.set_sieve_buf_size(0)
            file = h5py.File(h5py.h5f.open(os.fsencode(self._path), h5py.h5f.ACC_RDONLY, access))
            found = {name: file.get(name) for name in self._names}
            missing = [name for name, data in found.items() if not hasattr(data, "shape")]
            if missing or not found:
                raise ValueError(f"names must be datasets in {self._path}, got {missing}. The file has {sorted(file)}.")
            self._opened = os.getpid(), list(found.values())
        return self._opened[1]
