"""Files that concern their owner alone: new ones, closed to others, never through a link that somebody planted."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_OTHERS = 0o077
"""Permissions of the group and of all others."""


def write_new(path: Path, text: str) -> None:
    """Write a file that only its owner can read.

    Local. What cannot be encoded, such as a surrogate in a path, is escaped.

    Raises:
        FileExistsError: Something is there, be it a link that leads nowhere.
        OSError: It cannot be written.
    """
    descriptor = open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def open_itself(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return the descriptor of a file, which is no link.

    Local.

    Args:
        path: The file.
        flags: Those of ``os.open``.
        mode: Permissions of a new file.

    Raises:
        OSError: With ``ELOOP``, it is a link; else it cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_anew(path: Path, mode: int = 0o600) -> int:
    """Return the descriptor of a new file in the place of one that may be there.

    Local. Nothing is written through a link, nor into a file that somebody else has put there and may read. A device,
    such as ``/dev/null``, is written to.

    Args:
        path: The file.
        mode: Its permissions.

    Raises:
        FileExistsError: There is something else, such as a folder or a pipe.
        OSError: It is a link, or cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat().st_mode
        if stat.S_ISLNK(found):
            raise OSError(f"{path} must not be a link, but it is. Name the file itself, or remove the link.")
        if stat.S_ISCHR(found):
            return open_itself(path, os.O_WRONLY)
        if stat.S_ISREG(found):
            path.unlink()
    return open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def private_folder() -> Path:
    """Return a folder in the temporary one that only this user can enter.

    Local. It is the same one each time, unless somebody else holds its name.

    Raises:
        OSError: There can be none.
    """
    folder = Path(tempfile.gettempdir()) / f"distman-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
    return folder if is_ours else Path(tempfile.mkdtemp(prefix="distman-"))
