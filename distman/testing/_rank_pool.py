"""The resident workers of one pytest process: as many as the largest test needed so far."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from distman._workers.server_process import ResidentServer, ServerProcess, WorkerStartError, spawn_server
from distman.testing._messages import RankReport, RankTask
from distman.testing._rank_process import RankProcess, open_log
from distman.testing._test_run import TestRun

if TYPE_CHECKING:
    from distman.testing._debugger import Debugger

# By name: it imports torch, which the pytest process need not load.
_ENTRY = "distman.testing._rank_loop:prepare"


class RankPool:
    """Runs tests on workers that stay; starts at the first test, replaces workers that are gone."""

    def __init__(self, environ: Callable[[], dict[str, str]], verbosity: int) -> None:
        self._environ = environ
        self._verbosity = verbosity
        self._stores: Path | None = None
        self._server = ResidentServer(self._start_server)
        self._workers: list[RankProcess] = []
        self._num_tests = 0
        self._problem: WorkerStartError | None = None

    def _start_server(self) -> ServerProcess:
        self._remove_stores()
        self._stores = Path(tempfile.mkdtemp(prefix="distman-testing-"))
        options = [str(self._stores), self._verbosity]
        return spawn_server(_ENTRY, options, environ=self._environ(), output=open_log())

    def _remove_stores(self) -> None:
        if self._stores is not None:
            shutil.rmtree(self._stores, ignore_errors=True)  # the server may have done so

    def run(
        self,
        make_task: Callable[[int, str], RankTask],
        world_size: int,
        timeout: float,
        dies: Sequence[int],
        debugger: Debugger | None,
    ) -> list[RankReport]:
        """Run one test and return what became of each rank, in rank order.

        ``make_task`` is given the rank and the file for the store. Where no workers can be started, that is a
        WorkerStartError, then again at every later test, at once.
        """
        if self._problem is not None:
            raise self._problem
        try:
            stores = self._prepare(world_size)
        except WorkerStartError as error:
            self._problem = error
            raise
        self._num_tests += 1
        store_file = stores / str(self._num_tests)
        test_run = TestRun(self._workers[:world_size], timeout, dies, debugger)
        try:
            test_run.start([make_task(rank, str(store_file)) for rank in range(world_size)])
            return test_run.finish()
        finally:
            test_run.abandon()
            store_file.unlink(missing_ok=True)

    def _prepare(self, world_size: int) -> Path:
        """Replace the workers that are gone since the last test, and return the directory for stores."""
        for worker in [one for one in self._workers if one.was_killed or one.has_ended()]:
            worker.close()
            self._workers.remove(worker)
        while len(self._workers) < world_size:
            self._workers.append(self._server.start_worker(RankProcess))
        return cast("Path", self._stores)  # made with the server

    def close(self) -> None:
        self._server.close()
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._remove_stores()
