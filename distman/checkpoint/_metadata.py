"""The table of contents of a sharded checkpoint, read as data and only then turned into torch's classes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from distman._torch_internals import storage_info
from distman.checkpoint._inert_pickle import Made, Name, read_inert
from distman.checkpoint._location import METADATA, Location
from distman.errors import CheckpointError

_SEAL = b"\ndistman crc32 "  # stands after the pickle, where torch does not read, with the checksum of all before it
_LARGEST = 2**63 - 1  # of the sizes and offsets that torch knows

T = TypeVar("T")


def read_metadata(folder: Location) -> Metadata:
    """Return the table of contents of a sharded checkpoint; nothing in it is run, nor read outside the folder."""
    path = folder / METADATA
    try:
        with path.storage.open(path.place) as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no sharded checkpoint at {folder}: it has no file {METADATA}. Correct the path; on several hosts, save "
            "where all of them can read."
        ) from error
    try:
        value, end = read_inert(data)
        if len(data) > end and data != sealed(data[:end]):  # one that torch wrote by itself has no checksum
            raise ValueError("its checksum differs")
        return _Contents(end).metadata(value)
    except (ValueError, MemoryError) as error:  # MemoryError: of a length that nobody wrote
        raise CheckpointError(
            f"{path} is damaged or describes something other than tensors; nothing in it was run: {error}. Load "
            "another checkpoint; if a function is named here, do not trust this source."
        ) from error


def sealed(data: bytes) -> bytes:
    """Return a table of contents with its checksum, by which a damaged one is known."""
    return data + _SEAL + b"%08x" % zlib.crc32(data)


class _Contents:
    """Turns what a pickle of ``num_bytes`` says into torch's classes.

    It cannot describe more things than it has bytes without naming some of them again and again, which torch does not
    do, and which would take memory without end.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def metadata(self, value: Any) -> Metadata:
        state = self._state_of(value, "Metadata")
        paths = state.get("planner_data")
        return Metadata(  # what is left out describes the save, and no load needs it
            state_dict_metadata=self._mapping(state.get("state_dict_metadata"), _name, self._entry),
            planner_data=None if paths is None else self._mapping(paths, _name, self._path),
            storage_data=self._mapping(state.get("storage_data"), self._index, self._place),
            storage_meta=StorageMeta(),
        )

    def _entry(self, value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if _is_made(value, "BytesStorageMetadata"):
            return BytesStorageMetadata()
        state = self._state_of(value, "TensorStorageMetadata")
        chunks = [self._chunk(one) for one in self._all_of(list, state.get("chunks"))]
        return TensorStorageMetadata(_properties(state.get("properties")), self._size(state.get("size")), chunks)

    def _chunk(self, value: Any) -> ChunkStorageMetadata:
        state = self._state_of(value, "ChunkStorageMetadata")
        return ChunkStorageMetadata(self._size(state.get("offsets")), self._size(state.get("sizes")))

    def _index(self, value: Any) -> MetadataIndex:
        state = self._state_of(value, "MetadataIndex")
        offset, number = state.get("offset"), state.get("index")
        return MetadataIndex(
            _name(state.get("fqn")),
            None if offset is None else self._size(offset),
            None if number is None else _number(number),
        )

    def _place(self, value: Any) -> Any:
        """Return where an entry is: a part of a file in the folder itself."""
        state = self._state_of(value, "_StorageInfo")
        path = _name(state.get("relative_path"))
        if path != PurePosixPath(path).name or path in ("", "..") or "\0" in path:
            raise ValueError(f"it must name files in its own folder, got {path!r}")
        if state.get("transform_descriptors"):
            raise ValueError(
                f"{path} must hold what torch.save writes, got something that an extension of torch has transformed"
            )
        return storage_info()(path, _number(state.get("offset")), _number(state.get("length")))

    def _size(self, value: Any) -> torch.Size:
        if not _is_made(value, "Size") or len(value.args) != 1:
            raise ValueError(f"{_shown(value)} is not a shape")
        return torch.Size([_number(one) for one in self._all_of(tuple, value.args[0])])

    def _path(self, value: Any) -> tuple[str | int, ...]:
        return tuple([key if type(key) is str else _number(key) for key in self._all_of(tuple, value)])

    def _mapping(self, value: Any, key: Callable[[Any], Any], item: Callable[[Any], T]) -> dict[Any, T]:
        return {key(one): item(other) for one, other in self._all_of(dict, value).items()}

    def _state_of(self, value: Any, name: str) -> dict[str, Any]:
        if not _is_made(value, name):
            raise ValueError(f"{_shown(value)} is not a {name.lstrip('_')}")
        return self._all_of(dict, value.state) if value.state is not None else {}

    def _all_of(self, kind: type[T], value: Any) -> T:
        found: Any = _of_type(kind, value)
        self._left -= len(found)
        if self._left < 0:
            raise ValueError("it describes more than it holds")
        return cast("T", found)


def _properties(value: Any) -> TensorProperties:
    """Return what torch needs to know of a tensor: the data type; it calls the other properties deprecated."""
    state = value.state if _is_made(value, "TensorProperties") else None
    dtype = state[0] if type(state) is tuple and state else value
    found = vars(torch).get(dtype.name) if isinstance(dtype, Name) and dtype.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{_shown(dtype)} is not a data type")
    return TensorProperties(dtype=found)


def _is_made(value: Any, name: str) -> bool:
    """Return whether something is of a class of torch's, which has moved from module to module in its releases."""
    return isinstance(value, Made) and value.of.name == name and value.of.module.partition(".")[0] == "torch"


def _of_type(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"{_shown(value)} is not a {kind.__name__}")
    return value


def _name(value: Any) -> str:
    return _of_type(str, value)


def _number(value: Any) -> int:
    number = _of_type(int, value)
    if not 0 <= number <= _LARGEST:
        raise ValueError(f"{number} is not a size or an offset")
    return number


def _shown(value: Any) -> str:
    named = value.of if isinstance(value, Made) else value
    return str(named) if isinstance(named, Name) else f"a {type(value).__name__}"
