"""A debugger in a rank, with the terminal of pytest: the worker has none, and only one rank at a time can use it."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import IO, Any, TypeAlias, cast

import pytest

from distman.testing._messages import Debug, DebuggerEnd, DebuggerInput, DebuggerOutput, Failing

_Connection: TypeAlias = "Connection[object, object]"


class Debugger:
    """What looks at one rank of a test that fails: at ``rank``, or at the lowest that does."""

    def __init__(self, rank: int | None, terminal: Terminal) -> None:
        self._rank = rank
        self._terminal = terminal
        self.was_used = False
        self.quits = False

    def choose(self, failing: Mapping[int, Failing]) -> int:
        """Return which of the ranks that have failed it looks at."""
        return self._rank if self._rank is not None and self._rank in failing else min(failing)

    def converse(self, rank: int, failing: Failing, connection: _Connection) -> None:
        """Let the user debug a rank, until the debugger is left or the rank is gone."""
        self.was_used = True
        with self._terminal.at_prompt(rank, failing), suppress(EOFError, ConnectionResetError, BrokenPipeError):
            connection.send(Debug(is_chosen=True))
            while not isinstance(message := connection.recv(), DebuggerEnd):
                if isinstance(message, DebuggerOutput):
                    self._terminal.write(message.text)
                elif isinstance(message, DebuggerInput):
                    connection.send(self._terminal.read())
            self.quits = message.quits


class Terminal:
    """Where pytest's user sits."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter = config.pluginmanager.getplugin("terminalreporter")

    @contextmanager
    def at_prompt(self, rank: int, failing: Failing) -> Iterator[None]:
        """Show what failed, and give the terminal to the debugger inside."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        # Other plugins have clocks to stop meanwhile.
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=self)
        try:
            self.write("\n")
            self._reporter.write_sep(">", "traceback")
            self.write(f"{failing.detail}\n")
            self._reporter.write_sep(">", f"entering PDB on rank {rank}")
            yield
            self._reporter.write_sep(">", "PDB continue")
        finally:
            self._config.hook.pytest_leave_pdb(config=self._config, pdb=self)
            capture.resume_global_capture()

    def write(self, text: str) -> None:
        self._reporter.write(text, flush=True)

    def read(self) -> str:
        """Return the next line, with its end; nothing where there is none. Ctrl-C asks again, as in pdb."""
        while True:
            try:
                return sys.stdin.readline()
            except KeyboardInterrupt:
                self.write("\n--KeyboardInterrupt--\n(Pdb) ")


def offer_debugger(headline: str, detail: str, trace: TracebackType | None, connection: _Connection) -> None:
    """Let the user look at the frames of a test that has failed on this rank, if this is the rank to look at."""
    connection.send(Failing(headline, detail))
    message = connection.recv()
    if not isinstance(message, Debug) or not message.is_chosen or trace is None:
        return
    debugger = _RemotePdb(connection)
    debugger.reset()
    debugger.interaction(None, trace)
    connection.send(DebuggerEnd(quits=bool(debugger.quitting)))


class _RemotePdb(pdb.Pdb):
    def __init__(self, connection: _Connection) -> None:
        files = cast("IO[str]", _Input(connection)), cast("IO[str]", _Output(connection))
        super().__init__(stdin=files[0], stdout=files[1], nosigint=True, readrc=False)
        self.prompt = "(Pdb) "

    def get_stack(
        self, frame: FrameType | None, trace: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames, and the last one that is not hidden, as pytest does."""
        stack, index = super().get_stack(frame, trace)
        while index and stack[index][0].f_locals.get("__tracebackhide__", False):
            index -= 1
        return stack, index


class _Output(io.TextIOBase):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        self._connection.send(DebuggerOutput(text))
        return len(text)


class _Input(io.TextIOBase):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def readline(self, size: Any = -1) -> str:  # type: ignore[override]  # noqa: ARG002 - of the base class
        self._connection.send(DebuggerInput())
        return cast("str", self._connection.recv())
