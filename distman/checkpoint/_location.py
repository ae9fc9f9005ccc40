"""Which storage a path or URL belongs to."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path

from distman._base.arguments import require
from distman.checkpoint._local_storage import SCHEMES, LocalStorage
from distman.checkpoint._storage import Storage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")  # fsspec chains schemes by "::"; these are refused, not overlooked
_SHORTENED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

_LOCAL = LocalStorage()
_registered: dict[str, Storage] = dict.fromkeys(SCHEMES, _LOCAL)


@dataclasses.dataclass(frozen=True)
class Location:
    storage: Storage = dataclasses.field(hash=False)  # one of a site's own may have no hash
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
    storage = _LOCAL if url is None else _registered.get(url[1]) or _from_fsspec(url[1])
    return Location(storage, storage.resolve(text))


def register_storage(scheme: str, storage: Storage) -> None:
    """Let URLs of a scheme be places in a storage of your own, in this process.

    Local. To be called on every rank, before the first path of the scheme.

    Args:
        scheme: What comes before ``://``. It takes precedence over what fsspec knows by that name.
        storage: The storage.

    Raises:
        ValueError: It is no scheme.

    Example:
        >>> save({"step": 7}, "model.pt")
        >>> class Released(Storage):  # for loading only
        ...     def resolve(self, path):
        ...         return path
        ...     def open(self, place):
        ...         return open(place.removeprefix("released://"), "rb")
        >>> register_storage("released", Released())
        >>> load("released://model.pt")
        {'step': 7}
    """
    if not _URL.fullmatch(f"{scheme}://"):
        raise ValueError(f"scheme must be letters, digits, '+', '-' and '.', got {scheme!r}. Leave '://' out.")
    _registered[scheme] = storage


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
            "register_storage(), or pass a path."
        ) from error
    except ImportError as error:
        raise ImportError(
            f"{scheme}:// needs a package beside fsspec that is not installed. {str(error).rstrip('.')}."
        ) from error
    return FsspecStorage()
