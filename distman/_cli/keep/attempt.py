"""One try of a job: its command is started, watched, and ended when its ranks have failed but will not end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from distman._base import timing
from distman._cli.keep.placement import Placement
from distman._cli.keep.verdict import Ended, Notes, waits_for_lost_hosts
from distman._cli.run.job import ending_with_starter
from distman._cli.signals import is_from_terminal, received
from distman._coordination.restart_notes import FAILURE, VARIABLE

_KEPT_BYTES = 1 << 16  # of what was written last to standard error
_SHELL = 128  # what a shell adds to the number of the signal that ended a command


def run_attempt(
    command: Sequence[str], folder: Path, grace: float, placement: Placement, signals: socket.socket
) -> Ended:
    """Start a command, and return when it has ended; signals that this process hears are handed on to it.

    The ranks write into ``folder`` what happens. Once one has failed, the command has ``grace`` seconds to end. It gets
    SIGTERM where this process is killed.
    """
    environ = {**os.environ, VARIABLE: str(folder)}
    process = subprocess.Popen(
        command, env=environ, stderr=subprocess.PIPE, preexec_fn=ending_with_starter(signal.SIGTERM)
    )
    return _Watch(process, folder, grace, placement, signals).wait()


class _Watch:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        grace: float,
        placement: Placement,
        signals: socket.socket,
    ) -> None:
        self._process = process
        self._folder = folder
        self._grace = grace
        self._placement = placement
        self._signals = signals
        self._written = b""
        self._interruption: int | None = None
        self._steps: list[tuple[float, int]] = []  # when to send which signal
        self._is_ended = False

    def wait(self) -> Ended:
        reader = threading.Thread(target=self._show, args=(cast("IO[bytes]", self._process.stderr),), daemon=True)
        reader.start()
        end = os.pidfd_open(self._process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while self._process.poll() is None:
                selector.select(timing.KEEP_EVERY)
                for number in received(self._signals):
                    self._hand_on(number)
                self._look_for_failure()
                self._take_steps()
        os.close(end)
        reader.join(timing.KEEP_AFTER_TERM)  # a process that was left behind may hold the other end
        code = self._process.returncode
        return Ended(code if code >= 0 else _SHELL - code, self._errors, self._interruption, self._is_ended)

    @property
    def _errors(self) -> str:
        return self._written.decode(errors="backslashreplace")

    def _show(self, stream: IO[bytes]) -> None:
        """Show what is written to standard error, and keep the last of it."""
        while data := os.read(stream.fileno(), _KEPT_BYTES):
            self._written = (self._written + data)[-_KEPT_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads it any more; the command must still be able to write
                sys.stderr.buffer.write(data)
                sys.stderr.buffer.flush()

    def _hand_on(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._interruption = number
        if number != signal.SIGWINCH and not (number == signal.SIGINT and is_from_terminal()):
            self._process.send_signal(number)

    def _look_for_failure(self) -> None:
        """Give the command its time to end once a rank has failed; none where it waits for lost hosts alone."""
        if self._is_ended or not any(self._folder.glob(FAILURE.format("*"))):
            return
        now = time.monotonic()
        if not self._steps:
            self._steps = [
                (now + self._grace, signal.SIGTERM),
                (now + self._grace + timing.KEEP_AFTER_TERM, signal.SIGKILL),
            ]
        if waits_for_lost_hosts(Notes.read(self._folder), self._errors):
            self._steps = [(now, signal.SIGTERM), (now + timing.KEEP_AFTER_TERM, signal.SIGKILL)]

    def _take_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number = self._steps.pop(0)
            if not self._is_ended:
                self._placement.end_step(Notes.read(self._folder).step)
            self._is_ended = True
            self._process.send_signal(number)
