"""What a process asks the kernel about those above and below it, and how it ends the latter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # before a fork, after which nothing may be loaded
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h


def end_with_parent(number: int, parent: int) -> bool:
    """Let this process get a signal when its parent ends, whatever ends that; False if it has ended already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Become the parent of what is orphaned below this process."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """End the children by force, then their children, which have become ours, then the children of those."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def running_children() -> set[int]:
    """Return the children of this process that have not ended; those that have are waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return set(_children())


def _children() -> list[int]:
    """Return the children of this process, among them those that have ended and are not waited for."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or a sandbox such as gVisor
        return children_by_parent()


def children_by_parent() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and _parent(one) == os.getpid()]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text(errors="replace").rpartition(") ")[2].split()[1])
    except OSError:  # it has ended
        return 0
