"""What a process asks the kernel about itself and those above and below it, and how it ends the latter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # before a fork, after which nothing may be loaded
_PROC = Path("/proc")
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
    return [int(one.name) for one in _PROC.iterdir() if one.name.isdigit() and _parent(one) == os.getpid()]


def _parent(process: Path) -> int:
    try:
        return int(stat_of(process)[1][1])
    except OSError:  # it has ended
        return 0


def stat_of(folder: Path) -> tuple[str, list[str]]:
    """Return the name of a process, or thread, which the system cuts, and what else proc(5) says of it: state, ..."""
    text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()


def ancestors() -> Iterator[tuple[int, str]]:
    """Generate number and name of the parent of this process, of its parent, and so on, as far as they are shown."""
    pid = os.getppid()
    while pid > 1:
        try:
            name, fields = stat_of(_PROC / str(pid))
        except OSError:
            return
        yield pid, name
        pid = int(fields[1])


def command_of(pid: int) -> list[str]:
    return _words(pid, "cmdline")


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment variables that a process was started with; empty where they are not shown."""
    pairs = (word.partition("=") for word in _words(pid, "environ"))
    return {name: value for name, _, value in pairs}


def _words(pid: int, file: str) -> list[str]:
    try:
        return [os.fsdecode(word) for word in (_PROC / str(pid) / file).read_bytes().rstrip(b"\0").split(b"\0")]
    except OSError:
        return []


def runs_same_program(pid: int) -> bool:
    """Return whether a process of this host runs the program of this one: another one may have its number by now."""
    command = command_of(pid)
    return bool(command) and command == command_of(os.getpid())


def start_time() -> float:
    """Return when this process started, in seconds of :func:`time.time`; now, where the system does not tell."""
    try:
        _, fields = stat_of(_PROC / "self")
    except OSError:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def boot_id() -> str:
    """Return the random id of this run of the host's system; an empty text where it is not shown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
