"""The table of contents of a sharded checkpoint: JSON, whose fields are checked; torch's own, a pickle, is not read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from distman._coordination.messages import _reader as reader_of
from distman._torch_internals import storage_info
from distman.checkpoint._location import CONTENTS, Location
from distman.errors import CheckpointError

_LARGEST = 2**63 - 1  # of the sizes and offsets that torch knows


def _number(value: int) -> int:
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{value} is not a size or an offset")
    return value


def _file(name: str) -> str:
    if name != PurePosixPath(name).name or name in ("", "..") or "\0" in name:
        raise ValueError(f"it must name files in its own folder, got {name!r}")
    return name


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a data type")
    return found


def _path(keys: list[Any]) -> tuple[str | int, ...]:
    if any(type(key) not in (str, int) for key in keys):
        raise ValueError("the way to an entry must consist of names and numbers")
    return tuple(keys)


_Number = Annotated[int, _number]
_Numbers = tuple[_Number, ...]

Row = tuple[str, _Numbers | None, _Number | None, _Number, Annotated[str, _file], _Number, _Number]
"""Where a tensor, a part of it, or an object is: name, offset, index, size, file, its beginning there, its length."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    dtype: Annotated[str, _dtype]
    size: _Numbers
    chunks: list[tuple[_Numbers, _Numbers]]  # their offsets and sizes


@dataclasses.dataclass(frozen=True)
class _Contents:
    tensors: dict[str, _Tensor]
    objects: list[str]
    paths: dict[str, Annotated[list[object], _path]]  # keys in nested dicts and lists
    rows: list[Row]


def row_of(result: WriteResult) -> Row:
    key, place = result.index, result.storage_data
    offset = None if key.offset is None else tuple(key.offset)
    return key.fqn, offset, key.index, result.size_in_bytes, place.relative_path, place.offset, place.length


def result_of(row: Row) -> WriteResult:
    name, offset, index, size, *place = row
    key = MetadataIndex(name, None if offset is None else torch.Size(offset), index)
    return WriteResult(key, size, storage_info()(*place))


def encoded(metadata: Metadata, results: Iterable[Iterable[WriteResult]]) -> bytes:
    """Return the table as a line of JSON and one with its checksum, by which a damaged one is known."""
    entries = metadata.state_dict_metadata
    tensors = {name: one for name, one in entries.items() if isinstance(one, TensorStorageMetadata)}
    contents = {
        "tensors": {
            name: {
                "dtype": str(one.properties.dtype).removeprefix("torch."),
                "size": one.size,
                "chunks": [[chunk.offsets, chunk.sizes] for chunk in one.chunks],
            }
            for name, one in tensors.items()
        },
        "objects": [name for name in entries if name not in tensors],
        "paths": metadata.planner_data,
        "rows": [row_of(result) for own in results for result in own],
    }
    text = json.dumps(contents).encode()
    return text + b"\n" + checksum(text)


def checksum(text: bytes) -> bytes:
    return b'"%08x"\n' % zlib.crc32(text)


def read_contents(folder: Location) -> Metadata:
    path = folder / CONTENTS
    try:
        with path.storage.open(path.place) as file:
            text, _, found = file.read().partition(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        remedy = "Correct the path; on several hosts, save where all of them can read."
        with contextlib.suppress(OSError):
            folder.storage.open((folder / ".metadata").place).close()
            remedy = "torch wrote this folder: load it by torch.distributed.checkpoint.load, and save it anew."
        raise FileNotFoundError(f"no sharded checkpoint at {folder}: it has no file {CONTENTS}. {remedy}") from error
    try:
        if found != checksum(text):
            raise ValueError("its checksum differs")
        contents: _Contents = reader_of(_Contents)(json.loads(text.decode()))  # else json would guess
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Load another checkpoint.") from error
    results = map(result_of, contents.rows)
    return Metadata(
        {name: _entry(one) for name, one in contents.tensors.items()}
        | {name: BytesStorageMetadata() for name in contents.objects},
        planner_data=contents.paths,
        storage_data={result.index: result.storage_data for result in results},
    )


def _entry(tensor: Any) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.size), chunks)
