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

from distman.testing._messages import Failing, Signal

_Connection: TypeAlias = "Connection[object, object]"


class Debugger:
    """Debugs one rank of a test that fails at pytest's terminal: that of ``--pdb-rank``, or the lowest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reporter = config.pluginmanager.getplugin("terminalreporter")
        self.was_used = self.quits = False

    def choose(self, failing: Mapping[int, Failing]) -> int:
        """Return which of the ranks that have failed to debug."""
        rank: int | None = self._config.getoption("pdb_rank")
        return rank if rank is not None and rank in failing else min(failing)

    def converse(self, rank: int, failing: Failing, connection: _Connection) -> None:
        """Let the user debug a rank, until the debugger is left or the rank is gone."""
        self.was_used = True
        with self._at_prompt(rank, failing), suppress(EOFError, ConnectionResetError, BrokenPipeError):
            connection.send(Signal.DEBUG)
            while not isinstance(message := connection.recv(), bool):
                if isinstance(message, str):
                    self._write(message)
                elif message is Signal.INPUT:
                    connection.send(self._read())
            self.quits = message

    @contextmanager
    def _at_prompt(self, rank: int, failing: Failing) -> Iterator[None]:
        """Show what failed, and give the terminal to the debugger inside."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        # Other plugins have clocks to stop meanwhile.
        self._config.hook.pytest_enter_pdb(config=self._config, pdb=self)
        try:
            self._write("\n")
            self._reporter.write_sep(">", "traceback")
            self._write(f"{failing.detail}\n")
            self._reporter.write_sep(">", f"entering PDB on rank {rank}")
            yield
            self._reporter.write_sep(">", "PDB continue")
        finally:
            self._config.hook.pytest_leave_pdb(config=self._config, pdb=self)
            capture.resume_global_capture()

    def _write(self, text: str) -> None:
        self._reporter.write(text, flush=True)

    def _read(self) -> str:
        """Return the next line, with its end; empty at the end of the input. Ctrl-C asks again, as in pdb."""
        while True:
            try:
                return sys.stdin.readline()
            except KeyboardInterrupt:
                self._write("\n--KeyboardInterrupt--\n(Pdb) ")


def offer_debugger(detail: str, trace: TracebackType | None, connection: _Connection) -> None:
    """Let the user look at the frames of a test that has failed on this rank, if this is the rank to look at."""
    connection.send(Failing(detail))
    if connection.recv() is not Signal.DEBUG:
        return
    debugger = _RemotePdb(connection)
    debugger.reset()
    debugger.interaction(None, trace)
    connection.send(bool(debugger.quitting))


class _RemotePdb(pdb.Pdb):
    def __init__(self, connection: _Connection) -> None:
        terminal = cast("IO[str]", _Terminal(connection))
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)
        self.prompt = "(Pdb) "

    def get_stack(
        self, frame: FrameType | None, trace: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the frames, and the last one that is not hidden, as pytest does."""
        stack, index = super().get_stack(frame, trace)
        while index and stack[index][0].f_locals.get("__tracebackhide__", False):
            index -= 1
        return stack, index


class _Terminal(io.TextIOBase):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def write(self, text: str) -> int:
        self._connection.send(text)
        return len(text)

    def readline(self, size: Any = -1) -> str:  # type: ignore[override]  # noqa: ARG002 - of the base class
        self._connection.send(Signal.INPUT)
        return cast("str", self._connection.recv())
