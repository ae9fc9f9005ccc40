"""Checkpoints on a disk: files, links and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from distman._base.text import printable

SCHEMES = ("file", "local")
"""Schemes of URLs that mean a path on this host."""

_LOCK = ".lock"  # ends the name of a locked file beside a temporary folder
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # what fsync of a folder says on some network file systems
# What fchmod and fchown say on FUSE and CIFS mounts, where all files have the permissions of the mount; and fchown of
# owners that are not this user, or that a container does not know.
_CANNOT_CHANGE = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_AT_FDCWD = -100  # from fcntl.h: paths are relative to the current folder; Python does not export it
_RENAME_EXCHANGE = 2  # from linux/fs.h
_TOKEN_BYTES = 4  # random bytes in a temporary name, beside the pid: threads, and hosts with equal pids


class LocalStorage:
    """Files on a disk, local or shared: they are written beside their place, synced and renamed.

    What follows holds for every storage, unless it says how a disk does it. A place is a string that :meth:`resolve`
    returned, with a slash and a name for what is in it. Methods run on rank 0 or on every rank, and in threads at the
    same time; what they raise reaches all ranks.
    """

    def resolve(self, path: str) -> str:
        """Return the place that a path or URL stands for, whatever the current folder is later on.

        On a disk it is the real path: links are followed, so that a link to a checkpoint stays one.
        """
        scheme, found, rest = path.partition("://")
        if found and scheme in SCHEMES and not rest.startswith("/"):
            raise ValueError(
                f"path must be absolute in a URL of this host, got {path!r}. Write {scheme}:///folder/name."
            )
        return os.path.realpath(rest if found and scheme in SCHEMES else path)

    @contextlib.contextmanager
    def create(self, place: str) -> Iterator[IO[bytes]]:
        """Write a file, which replaces the old one if the block ends without an error.

        Whatever ends the block or the process, a reader finds the old file or the whole new one. Folders above are
        made; what an earlier write of this file left when it was killed is removed. One call of the file's ``write``
        may take fewer bytes than it is given, and returns how many.
        """
        path = Path(place)
        if path.is_dir():
            raise IsADirectoryError(f"the place of a file must not be a directory, got {place}. Name a file in it.")
        _make_folder(path.parent)
        _remove_leftovers(path.parent, re.escape(path.name))
        try:
            with _locked_beside(path) as (file, temporary):
                _keep_mode(file.fileno(), path)  # first: what is private is so while it is written, too
                yield file
                os.fsync(file.fileno())
                temporary.replace(path)
        except OSError as error:
            error.filename = error.filename or place
            raise
        _sync_folder(path.parent)

    def open(self, place: str) -> IO[bytes]:
        """Return a file to read from; links are followed. FileNotFoundError if there is none."""
        return Path(place).open("rb")

    def list(self, folder: str) -> list[str]:
        """Return the names of the complete files, links and folders in a folder; none if there is no such folder."""
        try:
            return [path.name for path in Path(folder).iterdir() if not path.name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def saved_at(self, place: str) -> int:
        """Return when a file was written, in nanoseconds; only compared with other files of the same storage."""
        return Path(place).stat().st_mtime_ns

    def remove(self, place: str) -> None:
        """Remove the file, link or folder, if it is there; whatever ends the process, no half of a folder is found."""
        path = Path(place)
        if path.is_dir() and not path.is_symlink():
            _remove_folder(_old(path), path)
            _remove_folder(path, path)
        else:
            path.unlink(missing_ok=True)

    def remove_leftovers(self, folder: str) -> None:
        """Remove what writers left half-written in a folder, which may not exist; of living ones it stays."""
        _remove_leftovers(Path(folder), ".+")

    def link(self, place: str, target: str) -> None:
        """Let a name stand for another file or folder of its folder, from one moment to the next."""
        link, temporary = Path(place), _beside(Path(place))
        is_linked = False
        try:
            while not is_linked:
                temporary.symlink_to(target)
                with contextlib.suppress(FileNotFoundError):  # another writer may have removed it as a leftover
                    temporary.replace(link)
                    is_linked = True
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(link.parent)

    def linked(self, place: str) -> str | None:
        """Return the name that a link stands for, or its own if it is a file; None if it leads nowhere."""
        link = Path(place)
        if not link.exists():
            return None
        target = link.readlink() if link.is_symlink() else link
        return None if target.name in ("", "..") else target.name

    def new_folder(self, place: str) -> FolderBeside:
        """Return a folder to be filled in its ``path`` with :meth:`create`, by other processes too, and published."""
        return FolderBeside(Path(place))

    def check_replaceable(self, place: str, marker: str) -> None:
        """Refuse a file, and a folder without the marker that is not empty: a new folder would replace it."""
        path = Path(place)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"the place of a folder must not be a file, got {place}. Name another one.")
        found = next(path.iterdir(), None) if path.exists() and not (path / marker).exists() else None
        if found is not None:
            raise FileExistsError(
                f"{place} must be new or empty, or a checkpoint of save_sharded(), which the new one replaces, got a "
                f"folder with {printable(found.name)}. Name another one, such as {path / 'checkpoint'}."
            )

    def folder(self, place: str) -> str:
        """Return where the files of the folder are that was published last.

        On a disk it is the place; an old folder is put back whose successor's writer was killed between two renames.
        """
        _put_back(Path(place))
        return place


class FolderBeside:
    """A folder that is filled beside its place, and exchanged with the one there when it is complete.

    It cannot be locked, so a locked file stands beside it, from before it is made until it has its place.
    """

    def __init__(self, place: Path) -> None:
        _make_folder(place.parent)
        _put_back(place)
        _remove_leftovers(place.parent, re.escape(place.name))
        self._place = place
        self._end = contextlib.ExitStack()
        try:
            _, lock = self._end.enter_context(_locked_beside(place, _LOCK))
            self._folder = lock.with_name(lock.name.removesuffix(_LOCK))
            self.path = str(self._folder)
            self._end.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder.mkdir()
            with _opened(self._folder) as descriptor:
                _keep_mode(descriptor, place, also=stat.S_IRWXU)  # it has yet to be filled
        except BaseException:  # another rank's failure too
            self._end.close()
            raise

    def publish(self) -> None:
        """Make it the one that is found from now on; that the one before cannot be removed is no error then."""
        _sync_folder(self._folder)
        if not self._place.exists():
            self._folder.rename(self._place)
        elif not _exchange(self._folder, self._place):
            _remove_folder(_old(self._place), self._place)
            self._place.rename(_old(self._place))
            self._folder.rename(self._place)
        _sync_folder(self._place.parent)
        self._end.close()  # the folder that was in the place has the temporary name now
        _remove_folder(_old(self._place), self._place)

    def discard(self) -> None:
        """Remove it, unless it was published."""
        self._end.close()
        _put_back(self._place)


@contextlib.contextmanager
def _locked_beside(path: Path, suffix: str = "") -> Iterator[tuple[io.FileIO, Path]]:
    """A new temporary file beside a path, locked, so that others see that its writer is alive; removed at the end.

    Between the creation and the lock another writer may take it for abandoned and remove it: then the next one is made,
    with another name, since that writer may be about to remove the first one.
    """
    temporaries: list[Path] = []  # each is noted before it exists: a failure may be raised as soon as it does
    try:
        while True:
            temporaries.append(_beside(path, suffix))
            with temporaries[-1].open("xb", buffering=0) as file:
                _lock(file)
                if temporaries[-1].exists():
                    yield file, temporaries[-1]
                    return
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):  # what stays is a leftover, which the next save removes
                temporary.unlink()


def _keep_mode(descriptor: int, path: Path, *, also: int = 0) -> None:
    """Give a new file or folder owner and permissions of the one it replaces, if any, as far as the system allows."""
    try:
        old = path.stat()
    except FileNotFoundError:
        return
    with _ignored(_CANNOT_CHANGE):  # before the permissions, of which a new owner resets a part
        os.fchown(descriptor, old.st_uid, old.st_gid)
    with _ignored(_CANNOT_CHANGE):
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode) | also)


def _remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove the temporary files and folders of dead writers, for final names that match a regular expression."""
    temporary = re.compile(rf"\.{pattern}\.\d+-[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.tmp({re.escape(_LOCK)})?", re.DOTALL)
    found = [path for path in folder.glob(".*.tmp*") if temporary.fullmatch(path.name)]
    for leftover in sorted(found, key=lambda path: path.suffix != _LOCK):
        if leftover.is_symlink():
            leftover.unlink(missing_ok=True)
        elif not leftover.is_dir():
            _unlink_abandoned(leftover)
        elif not leftover.with_name(f"{leftover.name}{_LOCK}").exists():
            shutil.rmtree(leftover, ignore_errors=True)


def _put_back(place: Path) -> None:
    """Put an old folder back whose successor's writer was killed between two renames.

    That happens only where :func:`_exchange` does not work, as on network file systems.
    """
    if _old(place).exists() and not place.exists():
        _old(place).rename(place)


def _remove_folder(folder: Path, place: Path) -> None:
    """Remove a folder that is or was in a place: it is no checkpoint any more before the first of its files goes."""
    if folder.exists():
        leftover = _beside(place)
        folder.rename(leftover)
        shutil.rmtree(leftover, ignore_errors=True)  # what stays is a leftover, which the next save removes


def _old(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")


def _beside(path: Path, suffix: str = "") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(_TOKEN_BYTES)}.tmp{suffix}")


def _make_folder(folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system supports that."""
    with _opened(folder) as descriptor, _ignored(_CANNOT_SYNC):
        os.fsync(descriptor)


@contextlib.contextmanager
def _ignored(numbers: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(file: io.FileIO) -> None:
    """Show others that the file has a writer, for as long as it is open; the system unlocks it with the process's end.

    It waits for another writer that is just finding out whether the file is abandoned.
    """
    with contextlib.suppress(OSError):  # a file system without locks: there nothing is taken for abandoned either
        fcntl.flock(file, fcntl.LOCK_EX)


def _unlink_abandoned(path: Path) -> None:
    """Remove a file if it is known to have no writer; under the lock, so that none can take it in between."""
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders atomically, and return whether the system can do that.

    Source:
        renameat2(2), RENAME_EXCHANGE; network file systems lack it.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # old systems' C libraries lack it
    return bool(rename and rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
