"""Checkpoints in an object store, or in any file system that fsspec knows: whole objects, and a marker written last."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import fsspec

_LINK = b"distman link to "  # content of an object that stands for another one of its folder, before the name
_TARGET = re.compile(r"\w[\w.+-]*", re.ASCII)
"""Names that a link may have: those of checkpoints and of their generations."""

_NAME_BYTES = 255  # the longest name of a file on the usual file systems
_TOKEN_BYTES = 8  # random bytes in a temporary name: nothing else tells the hosts that write to one store apart
_CURRENT = "current"
_GENERATION = "saved-"

_OURS = secrets.token_hex(_TOKEN_BYTES)
"""Stands beside the pid in the temporary names of this process, whose threads may write at the same time."""


class FsspecStorage:
    """Files behind a URL, which pass through the temporary folder of this host in both directions.

    What a program fails to produce never leaves the host, so that no half object is committed by closing it.
    """

    def resolve(self, path: str) -> str:
        scheme, _, rest = path.partition("://")
        if not rest.strip("/"):
            raise ValueError(
                f"path must name a file or folder in the store, got {path!r}. Write {scheme}://bucket/name."
            )
        return path.rstrip("/")

    @contextlib.contextmanager
    def create(self, place: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as local:
            try:
                yield local
                local.flush()
            except OSError as error:
                error.filename = error.filename or tempfile.gettempdir()
                raise
            _upload(_path_of(local), place)

    def open(self, place: str) -> IO[bytes]:
        """Download the file into a temporary one, which goes when it is closed, and return that."""
        target = self.linked(place)
        if target is None:
            raise FileNotFoundError(f"no such object: {place}")
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        try:
            fs, path = _locate(f"{_parent(place)}/{target}")
            fs.get_file(path, _path_of(file))
        except BaseException:
            file.close()
            raise
        return file

    def list(self, folder: str) -> list[str]:
        return [name for name, _ in _entries(folder) if not name.startswith(".")]

    def saved_at(self, place: str) -> int:
        """Return the store's time of the last modification; 0 if it keeps none."""
        fs, path = _locate(place)
        try:
            return int(fs.modified(path).timestamp() * 1e9)
        except NotImplementedError:
            return 0

    def remove(self, place: str) -> None:
        """Remove the object, or the folder, first what names the one that counts."""
        fs, path = _locate(place)
        with contextlib.suppress(FileNotFoundError):
            if fs.isdir(path):
                fs.rm_file(f"{path}/{_CURRENT}")
                fs.rm(path, recursive=True)
            else:
                fs.rm_file(path)

    def remove_leftovers(self, folder: str) -> None:
        """Remove temporary files of all other processes: nothing here tells whether a writer is alive."""
        _remove_leftovers(folder, ".+")

    def link(self, place: str, target: str) -> None:
        with self.create(place) as file:
            file.write(_LINK + target.encode())

    def linked(self, place: str) -> str | None:
        """Return the name in the object, or its own if it is a checkpoint; None if it leads nowhere."""
        fs, path = _locate(place)
        try:
            head = fs.cat_file(path, start=0, end=len(_LINK) + _NAME_BYTES)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        if not head.startswith(_LINK):
            return _name(place)
        target = head.removeprefix(_LINK).decode(errors="replace")
        if not _TARGET.fullmatch(target):  # it would lead out of the folder, or to another store
            return None
        return target if fs.exists(f"{_parent(path)}/{target}") else None

    def new_folder(self, place: str) -> Generation:
        """Return a folder of a new name within the place; a link says which one counts."""
        return Generation(self, place)

    def check_replaceable(self, place: str, marker: str) -> None:
        """Refuse nothing: what is in the place stays there."""

    def folder(self, place: str) -> str:
        """Return the folder that the link in the place names; without a link the place, or the one that it is for."""
        linked = self.linked(place)
        place = place if linked is None else f"{_parent(place)}/{linked}"
        current = self.linked(f"{place}/{_CURRENT}")
        return place if current is None else f"{place}/{current}"


class Generation:
    """A folder within a place, which counts as soon as the link beside it names it."""

    def __init__(self, storage: FsspecStorage, place: str) -> None:
        self._storage, self._place = storage, place
        self._name = f"{_GENERATION}{secrets.token_hex(_TOKEN_BYTES)}"
        self.path = f"{place}/{self._name}"

    def publish(self) -> None:
        self._storage.link(f"{self._place}/{_CURRENT}", self._name)
        with contextlib.suppress(Exception):  # the new folder counts already; the next publish() tries again
            self._remove_others()

    def _remove_others(self) -> None:
        fs, path = _locate(self._place)
        for name, kind in _entries(self._place):
            if kind == "directory" and name.startswith(_GENERATION) and name != self._name:
                fs.rm(f"{path}/{name}", recursive=True)

    def discard(self) -> None:
        """Remove the folder, unless the link names it: it may have been written although an error came back."""
        with contextlib.suppress(Exception):  # the first error is the one to know; the next publish() tries again
            if self._storage.folder(self._place) != self.path:
                fs, path = _locate(self.path)
                fs.rm(path, recursive=True)


def _locate(place: str, **options: Any) -> tuple[Any, str]:
    """Return the file system, which shows what is there now, whatever was listed before; and the path in it."""
    fs, path = fsspec.core.url_to_fs(place, **options)
    fs.invalidate_cache()
    return fs, path


def _path_of(file: IO[bytes]) -> str:
    """Return a path of an open file that has no name, so that it goes with a process that is killed."""
    return f"/proc/self/fd/{file.fileno()}"


def _name(place: str) -> str:
    return place.rpartition("/")[2]


def _parent(place: str) -> str:
    return place.rpartition("/")[0]


def _entries(folder: str) -> list[tuple[str, str]]:
    """Return names and types of what is in a folder."""
    fs, path = _locate(folder)
    try:
        found = fs.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(_name(one["name"].rstrip("/")), one["type"]) for one in found]


def _upload(local: str, place: str) -> None:
    """Let a file appear in a store whole or not at all.

    A file system that can rename gets it beside its place first. An object store, which cannot, shows an object when
    all of it has come; the transaction does the same for fsspec's memory. It belongs to a file system object, of which
    other threads must not have the same.
    """
    fs, path = _locate(place, skip_instance_cache=True)
    if type(fs).mv is fsspec.AbstractFileSystem.mv:
        with fs.transaction:
            fs.put_file(local, path)
        return
    folder, name = _parent(path), _name(path)
    fs.makedirs(folder, exist_ok=True)
    _remove_leftovers(_parent(place), re.escape(name))
    temporary = f"{folder}/.{name}.{os.getpid()}-{_OURS}{secrets.token_hex(_TOKEN_BYTES)}.tmp"
    try:
        fs.put_file(local, temporary)
        fs.mv(temporary, path)
        fs.invalidate_cache()
        if fs.exists(temporary):
            raise OSError(
                f"writing {place} failed: the file there could not be replaced, since a rename on this file system "
                "does not replace a file. Save to another file system."
            )
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to know; the next program tries again
            fs.rm_file(temporary)
        raise


def _remove_leftovers(folder: str, pattern: str) -> None:
    """Remove temporary files of other processes in a folder, for final names that match a regular expression."""
    fs, path = _locate(folder)
    temporary = re.compile(rf"\.{pattern}\.(?!{os.getpid()}-{_OURS})\d+-[0-9a-f]+\.tmp")
    for found, _ in _entries(folder):
        if temporary.fullmatch(found):
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{path}/{found}")
