"""The threads with which gloo listens to its connections, and how to wake them where gloo waits for their next turn."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_LOOK_EVERY = 0.001  # seconds; a tenth of what gloo waits for, and little for processes that share a core
_MOST_PER_CORE = 16
"""Threads of the host that want a core, in the mean: with more, the looks take longer than what they save. On two cores
48 ranks end in 0.37 s instead of 0.49, but 192 in 3.0 to 3.4 instead of 2.0."""
_POLLED = re.compile(r"^tfd: +(\d+) .*data: +([0-9a-f]+) .*ino:([0-9a-f]+)", re.MULTILINE)
"""What Linux says of each descriptor that is listened to, in ``proc_pid_fdinfo(5)``."""
_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_PIPE_TYPE = "_ZTVN4gloo9transport3tcp11DeferrablesE"
"""The type of what gloo keeps for such a pipe, as the linker calls it."""
_TYPE_OFFSET = 2 * struct.calcsize("P")
"""Where an object of C++ points to in the table of its type."""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Wake gloo's threads wherever gloo waits for their next turn meanwhile: a group ends.

    For each connection that gloo closes it waits for the next turn of the thread that listened to it, which takes 10 ms
    where nothing arrives: a second at the end of a job of 96 ranks. A byte in a thread's pipe gives it a turn.
    """
    listeners = [] if _is_crowded() else _find()
    if not listeners:
        yield
        return
    has_ended = threading.Event()

    def close() -> None:
        for listener in listeners:
            listener.close()

    def wake() -> None:
        try:
            while not has_ended.wait(_LOOK_EVERY):
                for listener in listeners:
                    listener.wake()
        finally:  # here, since Ctrl-C may end the other thread's wait for this one
            close()

    thread = threading.Thread(target=wake, name="distman-wake-gloo", daemon=True)
    try:
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # no thread can be had, as where a program ends
            close()
        yield
    finally:
        has_ended.set()
        if thread.is_alive():
            thread.join()


def _is_crowded() -> bool:
    """Return whether this host is so busy that to look would take longer than what it saves.

    Source:
        proc_loadavg(5): the fourth field begins with how many threads run or want to.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        num_runnable = int(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")[0])
        return num_runnable > _MOST_PER_CORE * (os.cpu_count() or 1)
    return False


class Listener:
    """One of gloo's threads.

    Args:
        info: The file that says what it listens to.
        pipe: Descriptor of its pipe, for reading and writing: where the thread ends first, nobody else could read what
            is written.
    """

    def __init__(self, info: Path, pipe: int) -> None:
        self._info, self._pipe = info, pipe
        self._num_polled = len(_polled(info))

    def close(self) -> None:
        os.close(self._pipe)

    def wake(self) -> None:
        """Wake it if it listens to less than at the last call, and only then: to end it must rest for 10 ms.

        Before gloo waits for its turn, it takes from it what it is about to close.
        """
        num_before, self._num_polled = self._num_polled, len(_polled(self._info))
        if self._num_polled < num_before:
            with contextlib.suppress(BlockingIOError):  # the pipe is full
                os.write(self._pipe, b"\0")


def _find() -> list[Listener]:
    """Return those of all groups; none where Linux does not tell what this process has, or torch is built otherwise."""
    listeners: list[Listener] = []
    with contextlib.suppress(OSError, ValueError), Path("/proc/self/mem").open("rb", buffering=0) as memory:
        table = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(_LIBRARY)), _PIPE_TYPE))
        for poll in os.listdir("/proc/self/fd"):  # noqa: PTH208 - paths of each of thousands of descriptors take long
            if _link(poll) == "anon_inode:[eventpoll]":
                info = Path(f"/proc/self/fdinfo/{poll}")
                for descriptor, address, inode in _polled(info):
                    if _read(memory.fileno(), address) == table + _TYPE_OFFSET:
                        listeners.extend(Listener(info, pipe) for pipe in _open(descriptor, inode))
    return listeners


def _polled(info: Path) -> list[tuple[int, int, int]]:
    """Return descriptor, address of what is kept for it, and inode of each that is listened to."""
    try:
        text = info.read_text(encoding="utf-8")
    except OSError:  # the thread has ended
        return []
    return [(int(descriptor), int(address, 16), int(inode, 16)) for descriptor, address, inode in _POLLED.findall(text)]


def _link(descriptor: str) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
    except OSError:  # closed meanwhile
        return None


def _read(memory: int, address: int) -> int | None:
    """Return what this process has at an address, which other code may use for a number of its own."""
    try:
        return int.from_bytes(os.pread(memory, struct.calcsize("P"), address), sys.byteorder)
    except (OSError, OverflowError):
        return None


def _open(descriptor: int, inode: int) -> list[int]:
    """Open a pipe of this process once more, unless its descriptor is another file's by now."""
    if _link(str(descriptor)) != f"pipe:[{inode}]":
        return []
    try:
        pipe = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    if os.fstat(pipe).st_ino == inode:
        return [pipe]
    os.close(pipe)
    return []
