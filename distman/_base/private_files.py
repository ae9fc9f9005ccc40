"""Files that concern their owner alone: new ones, closed to others, never through a link that somebody planted."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_OTHERS = 0o077  # permissions of the group and of all others


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner can read; what cannot be encoded, such as a surrogate, is escaped."""
    descriptor = open_itself(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def open_itself(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return the descriptor of a file; raise OSError with ``ELOOP`` if it is a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def create_anew(path: Path, mode: int = 0o600) -> int:
    """Return the descriptor of a new file in the place of one that may be there."""
    # Nothing is written through a link, nor into a file that somebody else has put there and may read. A device, such
    # as ``/dev/null``, is written to.
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
    """Return a folder in the temporary one that only this user can enter: the same one, unless its name is taken."""
    folder = Path(tempfile.gettempdir()) / f"distman-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
    return folder if is_ours else Path(tempfile.mkdtemp(prefix="distman-"))
