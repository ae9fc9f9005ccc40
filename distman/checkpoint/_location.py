"""Which storage a path or URL belongs to."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from distman._base.arguments import require
from distman.checkpoint._local_storage import SCHEMES, FolderBeside, LocalStorage

if TYPE_CHECKING:
    from distman.checkpoint._fsspec_storage import FsspecStorage, Generation

Storage: TypeAlias = "LocalStorage | FsspecStorage"
"""Where checkpoints are kept; :class:`LocalStorage` says what their methods do."""

NewFolder: TypeAlias = "FolderBeside | Generation"

CONTENTS = "contents.jsonl"  # the table of contents of a sharded state, which is written last

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")  # fsspec chains schemes by "::"; these are refused, not overlooked
_SHORTENED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

_LOCAL = LocalStorage()


@dataclasses.dataclass(frozen=True)
class Location:
    storage: Storage
    place: str

    def __str__(self) -> str:
        return self.place

    def __truediv__(self, name: str) -> Location:
        return Location(self.storage, f"{self.place}/{name}")

    def published(self) -> Location:
        """Return where the files of the folder are that was published last."""
        return Location(self.storage, self.storage.folder(self.place))

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
