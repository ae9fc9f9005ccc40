"""The terminal of pytest, for a debugger in a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distman.testing._messages import Failing


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
