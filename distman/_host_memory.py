"""Memory that processes of one user on one host share: anonymous, so that nothing is left when the last of them ends.

One process makes it and tells the others its process id and the descriptor there. It is open to those alone that may
look into that process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

CAN_BE_MADE = hasattr(os, "memfd_create")
"""Whether this system has such memory."""


def make_memory(name: str, size: int) -> int:
    """Return the descriptor of new memory, all zero, whose size nobody can change.

    Args:
        name: What it is for.
        size: Number of bytes.

    Raises:
        OSError: There is none.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def opened_memory(name: str, size: int, pid: int, descriptor: int) -> Iterator[int]:
    """Open the memory of another process for the length of a ``with`` block, which yields a descriptor here.

    Args:
        name: What it is for.
        size: Number of bytes.
        pid: The process that made it.
        descriptor: Its descriptor there.

    Raises:
        OSError: This process may not, or the numbers mean another process, or another file.
    """
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    if not str(path.readlink()).startswith(f"/memfd:{name}"):
        raise FileNotFoundError(f"{path} is no memory called {name}")
    here = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(here).st_size != size:
            raise FileNotFoundError(f"{path} has not {size} bytes")
        yield here
    finally:
        os.close(here)
