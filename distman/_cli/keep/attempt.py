"""One try of a job: its command is started, watched, and ended when its ranks have failed but will not end."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from distman._cli.run.signals import HeardSignals, is_from_terminal
from distman._coordination.restart_notes import FAILURE, VARIABLE

_LOOK_EVERY = 0.5  # seconds between two looks for a failure
_AFTER_TERM = 5.0  # seconds from SIGTERM to SIGKILL
_KEPT_BYTES = 1 << 16  # of what was written last to standard error
_SHELL = 128  # what a shell adds to the number of the signal that ended a command


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a try ended."""

    exit_code: int
    errors: str  # what was written last to standard error
    interruption: int | None  # the signal by which this command was asked to end


def run_attempt(command: Sequence[str], folder: Path, grace: float, end_step: Callable[[], None]) -> Ended:
    """Start a command, and return when it has ended; signals that this process hears are handed on to it.

    Args:
        folder: Where the ranks write down what happens; it is there.
        grace: Seconds that the command has to end once a rank has failed.
        end_step: Ends what the command has started elsewhere.

    Raises:
        OSError: It cannot be started.
    """
    with HeardSignals() as signals:
        environ = {**os.environ, VARIABLE: str(folder)}
        process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)
        return _Watch(process, folder, grace, end_step, signals).wait()


class _Watch:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        grace: float,
        end_step: Callable[[], None],
        signals: HeardSignals,
    ) -> None:
        self._process = process
        self._folder = folder
        self._grace = grace
        self._end_step = end_step
        self._signals = signals
        self._errors = b""
        self._interruption: int | None = None
        self._steps: list[tuple[float, int]] = []  # when to send which signal

    def wait(self) -> Ended:
        assert self._process.stderr is not None
        reader = threading.Thread(target=self._show, args=(self._process.stderr,), daemon=True)
        reader.start()
        end = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            selector.register(self._signals.wake, selectors.EVENT_READ)
            while self._process.poll() is None:
                selector.select(_LOOK_EVERY)
                for number in self._signals.take():
                    self._hand_on(number)
                self._look_for_failure()
                self._take_steps()
        os.close(end)
        reader.join(_AFTER_TERM)  # a process that was left behind may hold the other end
        code = self._process.returncode
        errors = self._errors.decode(errors="backslashreplace")
        return Ended(code if code >= 0 else _SHELL - code, errors, self._interruption)

    def _show(self, stream: IO[bytes]) -> None:
        """Show what is written to standard error, and keep the last of it."""
        while data := os.read(stream.fileno(), _KEPT_BYTES):
            self._errors = (self._errors + data)[-_KEPT_BYTES:]
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()

    def _hand_on(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._interruption = number
        if number != signal.SIGWINCH and not (number == signal.SIGINT and is_from_terminal()):
            self._process.send_signal(number)

    def _look_for_failure(self) -> None:
        if not self._steps and any(self._folder.glob(FAILURE.format("*"))):
            end = time.monotonic() + self._grace
            self._steps = [(end, signal.SIGTERM), (end + _AFTER_TERM, signal.SIGKILL)]

    def _take_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number = self._steps.pop(0)
            self._end_step()
            self._process.send_signal(number)
