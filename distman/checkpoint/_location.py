"""Which storage a path or URL belongs to, and what a checkpoint needs of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Protocol

from distman._base.arguments import require
from distman.checkpoint._local_storage import SCHEMES, LocalStorage

CONTENTS = "contents.jsonl"  # the table of contents of a sharded state, which is written last

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")  # fsspec chains schemes by "::"; these are refused, not overlooked
_SHORTENED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

_LOCAL = LocalStorage()


class NewFolder(Protocol):
    """A folder that is filled in its ``path``, where nobody looks, and becomes visible when it is complete."""

    path: str

    def publish(self) -> None:
        """Make it the one that is found from now on; that the one before cannot be removed is no error then."""

    def discard(self) -> None:
        """Remove it, unless it was published."""


class Storage(Protocol):
    """Where checkpoints are kept.

    A place is a string that :meth:`resolve` returned, with a slash and a name for what is in it. Methods run on rank 0
    or on every rank, and in threads at the same time; what they raise reaches all ranks.
    """

    def resolve(self, path: str) -> str:
        """Return the place that a path or URL stands for, whatever the current folder is later on."""

    def create(self, place: str) -> AbstractContextManager[IO[bytes]]:
        """Return a context that writes a file, which replaces the old one if the block ends without an error.

        Whatever ends the block or the process, a reader finds the old file or the whole new one. Folders above are
        made; what an earlier write of this file left when it was killed is removed. One call of the file's ``write``
        may take fewer bytes than it is given, and returns how many.
        """

    def open(self, place: str) -> IO[bytes]:
        """Return a file to read from; links are followed. FileNotFoundError if there is none."""

    def list(self, folder: str) -> list[str]:
        """Return the names of the complete files, links and folders in a folder; none if there is no such folder."""

    def saved_at(self, place: str) -> int:
        """Return when a file was written, in nanoseconds; only compared with other files of the same storage."""

    def remove(self, place: str) -> None:
        """Remove a file or folder, if it is there; whatever ends the process, no half of a folder is found."""

    def remove_leftovers(self, folder: str) -> None:
        """Remove what writers left half-written in a folder, which may not exist, when they were killed."""

    def link(self, place: str, target: str) -> None:
        """Let a name stand for another file or folder of its folder, from one moment to the next."""

    def linked(self, place: str) -> str | None:
        """Return the name that a link stands for, or its own if it is a file; None if there is neither."""

    def new_folder(self, place: str) -> NewFolder:
        """Return a folder to be filled with :meth:`create`, by other processes too, and then published."""

    def folder(self, place: str) -> str:
        """Return where the files of the folder are that was published last."""


@dataclasses.dataclass(frozen=True)
class Location:
    storage: Storage
    place: str

    def __str__(self) -> str:
        return self.place

    def __truediv__(self, name: str) -> Location:
        return Location(self.storage, f"{self.place}/{name}")

    @property
    def path(self) -> Path | str:
        """What users get and may pass again: a path on this host, or a URL."""
        return Path(self.place) if self.storage is _LOCAL else self.place


def locate(path: str | os.PathLike[str]) -> Location:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a Path, got {type(path).__name__}. Pass where the file or folder is.")
    text = os.fspath(path)
    url = _URL.match(text)
    if url is None and _SHORTENED_URL.match(text):
        raise ValueError(
            f"path must keep both slashes of a URL, got {text!r}, as pathlib.Path leaves it. Pass the URL as a string; "
            "a local folder whose name ends in a colon needs its absolute path."
        )
    storage = _LOCAL if url is None or url[1] in SCHEMES else _from_fsspec(url[1])
    return Location(storage, storage.resolve(text))


@functools.cache
def _from_fsspec(scheme: str) -> Storage:
    """Return the storage for what fsspec knows; what is missing is found here, not after an hour of training."""
    fsspec = require("fsspec", f"{scheme}://")
    from distman.checkpoint._fsspec_storage import FsspecStorage

    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError as error:
        raise ValueError(
            f"path must have a scheme that is known, got {scheme}://. Use one of fsspec's, such as s3://, add one with "
            "fsspec.register_implementation(), or pass a path."
        ) from error
    except ImportError as error:
        raise ImportError(
            f"{scheme}:// needs a package beside fsspec that is not installed. {str(error).rstrip('.')}."
        ) from error
    return FsspecStorage()
