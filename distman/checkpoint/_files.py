"""Files, links and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import io
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

_LOCK = ".writing"
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Stream:
    """Where a file is written: takes every byte or raises, and remembers why it did not.

    Args:
        file: An unbuffered file.

    Attributes:
        error: What was raised while writing; torch raises another error in its place.
    """

    def __init__(self, file: io.FileIO) -> None:
        self.error: BaseException | None = None
        self._file = file

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write everything, in as many pieces as the system wants, and return the number of bytes.

        Blocking.

        Raises:
            OSError: The disk is full, say.
        """
        left = memoryview(data)
        num_bytes = len(left)
        try:
            while left:
                left = left[self._file.write(left) :]
        except BaseException as error:  # an interrupt too must not be taken for a damaged file
            self.error = error
            raise
        return num_bytes

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def real_path(path: str | os.PathLike[str]) -> Path:
    """Return the place that a path stands for, whatever the current folder is later on; links are followed."""
    return Path(os.path.realpath(path))


def replace_file(path: Path, write: Callable[[Stream], None]) -> None:
    """Write a file that takes the place of the one before once it is complete and on the disk.

    Blocking. Whatever ends it, the path holds the old file or the whole new one; what an earlier process left
    behind when it was killed is removed.

    Args:
        path: The file; folders above it are made.
        write: Writes the content.

    Raises:
        OSError: It could not be written; the old file is as it was.
    """
    _make_folder(path.parent)
    remove_leftovers(path.parent, glob.escape(path.name))
    temporary = _beside(path)
    try:
        with temporary.open("xb", buffering=0) as file:
            _claim(file)
            write(Stream(file))
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    _sync_folder(path.parent)


def replace_link(link: Path, target: str) -> None:
    """Let a link point to another file of its folder, at once.

    Args:
        link: The link; it need not exist.
        target: Name of the file.
    """
    temporary = _beside(link)
    temporary.symlink_to(target)
    try:
        temporary.replace(link)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(link.parent)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Remove temporary files and folders whose writers were killed; those that are still being written stay.

    Args:
        folder: Where they are.
        pattern: Names of the files that they were to become, as ``glob`` understands them.
    """
    for leftover in folder.glob(f".{pattern}.*.tmp"):
        if leftover.is_symlink():
            leftover.unlink(missing_ok=True)
        elif leftover.is_dir():
            if not (leftover / _LOCK).exists() or _is_abandoned(leftover / _LOCK):
                shutil.rmtree(leftover, ignore_errors=True)
        elif _is_abandoned(leftover):
            leftover.unlink(missing_ok=True)


class NewFolder:
    """A folder that is filled beside its place, and put there when it is complete.

    Args:
        place: Where it shall be; folders above it are made.

    Attributes:
        path: Where it is until then.
    """

    def __init__(self, place: Path) -> None:
        _make_folder(place.parent)
        self._place = place
        put_back(place)
        remove_leftovers(place.parent, glob.escape(place.name))
        self.path = _beside(place)
        self.path.mkdir()
        self._lock = (self.path / _LOCK).open("xb", buffering=0)
        _claim(self._lock)

    def publish(self) -> None:
        """Put the folder in its place, on the disk; one that was there goes.

        Blocking.
        """
        (self.path / _LOCK).unlink()
        _sync_folder(self.path)
        if not self._place.exists():
            self.path.rename(self._place)
        elif not _exchange(self.path, self._place):
            self._place.rename(_old(self._place))
            self.path.rename(self._place)
        _sync_folder(self._place.parent)
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.rmtree(_old(self._place), ignore_errors=True)

    def discard(self) -> None:
        """Remove the folder, unless it is in its place."""
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        put_back(self._place)


def put_back(place: Path) -> None:
    """Put an old folder back whose successor's writer was killed between two renames.

    Elsewhere than on network file systems it cannot happen.
    """
    if _old(place).exists() and not place.exists():
        _old(place).rename(place)


def _old(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _make_folder(folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system can do that by itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _claim(file: io.FileIO) -> None:
    """Show others that the file has a writer, for as long as it is open; the system forgets it with the process."""
    with contextlib.suppress(OSError):  # a file system without locks: then nobody can have it, and nobody removes it
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_abandoned(path: Path) -> bool:
    """Return whether a file has no writer any more; False where that cannot be known."""
    try:
        with path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders take each other's place at once, and return whether the system can do that.

    Source:
        renameat2(2), RENAME_EXCHANGE; network file systems lack it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
