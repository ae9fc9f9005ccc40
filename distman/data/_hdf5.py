"""Samples in an HDF5 file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


class Hdf5Dataset(Dataset[tuple[torch.Tensor, ...]]):
    """The samples of an HDF5 file: row ``i`` of each of its datasets that are named.

    Local. Every process opens the file for itself, when it first reads.

    Args:
        path: The file.
        names: Names of datasets in it, such as ``["fields", "grid/labels"]``, equally long.

    Raises:
        ImportError: h5py is not installed.
        FileNotFoundError: There is no such file.
        ValueError: The file has no dataset of a name, or they differ in length.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        self._path, self._names = Path(path), list(names)
        self._file: tuple[int, Any] | None = None
        found = {name: self._open().get(name) for name in self._names}
        missing = [name for name, data in found.items() if not hasattr(data, "shape")]
        if missing or not found:
            raise ValueError(f"names must be datasets in {path}, got {missing}. It has {sorted(self._open())}.")
        lengths = {name: len(data) for name, data in found.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"datasets must be equally long to make samples, got {lengths} from {path}.")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.as_tensor(self._open()[name][index]) for name in self._names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def read(self, rows: range) -> tuple[torch.Tensor, ...]:
        """Return consecutive samples as one batch, without reading others.

        Local.
        """
        return tuple(torch.as_tensor(self._open()[name][rows.start : rows.stop]) for name in self._names)

    def _open(self) -> Any:
        """Return the file as this very process has opened it."""
        if self._file is None or self._file[0] != os.getpid():
            try:
                import h5py
            except ImportError as error:
                raise ImportError("h5py must be there to read HDF5 files. Install it: pip install h5py") from error
            self._file = os.getpid(), h5py.File(self._path, "r")
        return self._file[1]
