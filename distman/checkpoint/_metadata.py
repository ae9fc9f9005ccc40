"""The table of contents of a sharded checkpoint, read without running what it says."""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from distman._torch_internals import layout_maker, memory_format_encoding, storage_info
from distman.checkpoint._location import Location
from distman.checkpoint._storage import METADATA
from distman.errors import CheckpointError

_STORAGE_INFO = storage_info()
_CLASSES: tuple[type, ...] = (
    contents.BytesStorageMetadata,
    contents.ChunkStorageMetadata,
    contents.Metadata,
    contents.MetadataIndex,
    contents.StorageMeta,
    contents.TensorProperties,
    contents.TensorStorageMetadata,
    memory_format_encoding(),
    _STORAGE_INFO,
    torch.Size,
)
_PATHS = {"pathlib", "pathlib._local"}  # the latter from Python 3.13 on
_KNOWN: dict[tuple[str, str], Any] = {
    **{(one.__module__, one.__name__): one for one in _CLASSES},
    **{(module, name): PurePosixPath for module in _PATHS for name in ("Path", "PosixPath", "WindowsPath")},
    **layout_maker(),
}


class _Unpickler(pickle.Unpickler):
    """Knows the few classes that describe tensors, and nothing that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} describes no tensor")


def read_metadata(folder: Location) -> Metadata:
    """Return the table of contents of a sharded checkpoint; nothing in it is run.

    Blocking.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: It is damaged, none, or wants to run code, or to read files outside the folder.
    """
    path = folder / METADATA
    try:
        with path.storage.open(path.place) as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no sharded checkpoint at {folder}: it has no file {METADATA}. Correct the path; on several hosts, save "
            "where all of them can read."
        ) from error
    try:
        found = _Unpickler(io.BytesIO(text)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path} is damaged or describes something other than tensors; nothing in it was run: {error}. Load "
            "another checkpoint; if a function is named here, do not trust this source."
        ) from error
    if not isinstance(found, Metadata) or not _stays_inside(found.storage_data):
        raise CheckpointError(
            f"{path} does not describe tensors in this folder, but is a {type(found).__name__}. Load another "
            "checkpoint."
        )
    found.storage_meta = found.storage_meta or StorageMeta()
    return found


def _stays_inside(storage_data: object) -> bool:
    return isinstance(storage_data, dict) and all(
        isinstance(one, _STORAGE_INFO) and one.relative_path == PurePosixPath(one.relative_path).name
        for one in storage_data.values()
    )
