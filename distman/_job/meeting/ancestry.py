"""Where this process comes from: its host and its ancestors, as far as ``/proc`` shows them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Process:
    """A process of this host."""

    pid: int
    parent: int  # its process id
    name: str  # of its program, shortened by the system
    started: float  # in seconds of time.time

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return what is known of a process; raise OSError if there is none, or the system does not show it."""
        stat = (_folder(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return cls(pid, int(fields[1]), name, time.time() - age)

    @property
    def command(self) -> list[str]:
        return _words(_folder(self.pid) / "cmdline")

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that it was started with; empty where they are not shown."""
        pairs = (word.partition("=") for word in _words(_folder(self.pid) / "environ"))
        return {name: value for name, _, value in pairs}

    @property
    def is_python(self) -> bool:
        command = self.command
        return bool(command) and Path(command[0]).name.startswith(("python", "pypy"))


def start_time() -> float:
    """Return when this process started, in seconds of :func:`time.time`; now, where the system does not tell."""
    try:
        return Process.of(os.getpid()).started
    except OSError:
        return time.time()


def boot_id() -> str:
    """Return the random id of this run of the host's system; an empty text where it is not shown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def ancestors() -> Iterator[Process]:
    """Generate the parent of this process, its parent, and so on, as far as they are shown."""
    pid = os.getppid()
    while pid > 1:
        try:
            process = Process.of(pid)
        except OSError:
            return
        yield process
        pid = process.parent


def _folder(pid: int) -> Path:
    return Path("/proc", str(pid))


def _words(file: Path) -> list[str]:
    try:
        return [os.fsdecode(word) for word in file.read_bytes().rstrip(b"\0").split(b"\0")]
    except OSError:
        return []
