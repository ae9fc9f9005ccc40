"""The resident workers of one pytest process: as many as the largest test needed so far."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, cast

from distman._workers.output import append_only, read_output
from distman._workers.server_process import ResidentServer, ServerProcess, WorkerStartError, spawn_server
from distman._workers.worker_process import WorkerProcess
from distman.testing._environments import server_environ
from distman.testing._messages import RankReport, RankTask
from distman.testing._test_run import TestRun

# By name: it imports torch, which the pytest process need not load.
_ENTRY = "distman.testing._rank_loop:prepare"


class RankProcess(WorkerProcess):
    """A worker process that runs one rank of a test after another; one that was killed must not get another task."""

    def __init__(self, server: ServerProcess) -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[object, object] = Connection(ours.detach())
        self._outputs = _open_log(), _open_log()
        self.was_killed = False
        with theirs:
            super().__init__(server, {}, theirs.fileno(), *(file.fileno() for file in self._outputs))

    def read_outputs(self) -> list[str]:
        """Return what it wrote to standard output and standard error since ``forget_output``."""
        return [read_output(file.fileno()) for file in self._outputs]

    def forget_output(self) -> None:
        self.forget_stacks()
        for file in self._outputs:
            os.ftruncate(file.fileno(), 0)

    def kill(self) -> None:
        self.was_killed = True
        super().kill()

    def close(self) -> None:
        super().close()
        self.connection.close()
        for file in self._outputs:
            file.close()


def _open_log() -> IO[bytes]:
    """Return a file without a name, to which processes append; on disk, since tests may write much."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed with its process
    append_only(file.fileno())
    return file


class RankPool:
    """Runs tests on workers that stay; starts at the first test, replaces workers that are gone."""

    def __init__(self, verbosity: int) -> None:
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
        return spawn_server(_ENTRY, options, environ=server_environ(), output=_open_log())

    def _remove_stores(self) -> None:
        if self._stores is not None:
            shutil.rmtree(self._stores, ignore_errors=True)  # the server may have done so

    def run(self, task: RankTask, timeout: float, dies: Sequence[int]) -> list[RankReport]:
        """Run one test and return what became of each rank, in rank order.

        Rank and store of the task are filled in. Where no workers can be started, that is a WorkerStartError, then
        again at every later test, at once.
        """
        if self._problem is not None:
            raise self._problem
        try:
            stores = self._prepare(task.world_size)
        except WorkerStartError as error:
            self._problem = error
            raise
        self._num_tests += 1
        store_file = stores / str(self._num_tests)
        test_run = TestRun(self._workers[: task.world_size], timeout, dies)
        try:
            test_run.start(replace(task, store_file=str(store_file)))
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
