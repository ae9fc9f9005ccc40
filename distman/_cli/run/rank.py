"""One rank as its starter sees it: a process, its end, and what it writes."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path

from distman._base.interpreter import environment, options
from distman._base.process_tree import end_with_parent

_READ_BYTES = 1 << 16


class Rank:
    """A process of the job, which ends with this one, whatever ends that.

    ``end`` is a descriptor that is readable when it has ended; ``outputs`` are those of its standard output and error,
    terminals of ``columns`` columns or pipes. ``exit_code`` may be minus the number of a signal; ``signals`` are those
    that its starter has sent.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        error_file: Path,
        *,
        cpus: Sequence[int] = (),
        columns: Sequence[int | None] = (None, None),
    ) -> None:
        self.rank = rank
        self.error_file = error_file
        self.exit_code: int | None = None
        self.signals: list[int] = []
        self.outputs: dict[int, int] = {}
        ends = [_open_terminal(width) if width is not None else os.pipe() for width in columns]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *options(), "-u", *command],
                env={**environment(environ), "TORCHELASTIC_ERROR_FILE": str(error_file)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=ends[0][1],
                stderr=ends[1][1],
                preexec_fn=ending_with_starter(signal.SIGKILL, cpus),
            )
        except BaseException:  # Ctrl-C too: the descriptors belong to nobody yet
            for ours, _ in ends:
                os.close(ours)
            raise
        finally:
            for _, theirs in ends:
                os.close(theirs)
        self.pid = self._process.pid
        self.end = os.pidfd_open(self.pid)
        self.outputs = {ours: stream for stream, (ours, _) in enumerate(ends, 1)}

    def read(self, output: int) -> bytes:
        """Return what it wrote to one of its outputs; nothing once that has ended."""
        try:
            return os.read(output, _READ_BYTES)
        except OSError:  # a terminal that nobody holds any more
            return b""

    def close(self, output: int) -> None:
        del self.outputs[output]
        os.close(output)

    def resize(self, columns: Sequence[int | None]) -> None:
        for output, stream in self.outputs.items():
            width = columns[stream - 1]
            if width is not None and os.isatty(output):
                _set_width(output, width)

    def reap(self) -> None:
        self.exit_code = self._process.wait()
        os.close(self.end)

    def send(self, number: int) -> None:
        if self.exit_code is None:
            self.signals.append(number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.end, number)


def ending_with_starter(number: int, cpus: Sequence[int] = ()) -> Callable[[], None]:
    """Return what a new process calls to get a signal when this one ends, whatever ends it."""
    starter = os.getpid()

    def prepare() -> None:
        if not end_with_parent(number, starter):
            os._exit(1)
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare


def _open_terminal(columns: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[1] &= ~termios.OPOST  # lines end as the rank ends them
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    _set_width(ours, columns)
    return ours, theirs


def _set_width(terminal: int, columns: int) -> None:
    rows = os.get_terminal_size(terminal).lines or 24
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
