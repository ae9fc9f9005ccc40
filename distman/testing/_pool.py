"""The resident workers of one pytest process: as many as the largest test needed so far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from distman.testing._forking import ForkServer, WorkerProcess, WorkersUnavailableError
from distman.testing._messages import Fate, Ready, Task
from distman.testing._test_run import Course

_START_SECONDS = 120.0


class Pool:
    """Runs tests on workers that stay; starts at the first test, replaces workers that are gone.

    Args:
        environ: Makes the environment of the fork server.
        verbosity: pytest's ``-v`` count.
    """

    def __init__(self, environ: Callable[[], dict[str, str]], verbosity: int) -> None:
        self._environ = environ
        self._verbosity = verbosity
        self._server: ForkServer | None = None
        self._workers: list[WorkerProcess] = []
        self._num_tests = 0
        self._problem: WorkersUnavailableError | None = None

    def run(
        self, make_task: Callable[[int, str], Task], world_size: int, timeout: float, dies: Sequence[int]
    ) -> list[Fate]:
        """Run one test and return what became of each rank, in rank order.

        Blocks until every rank has ended or was ended.

        Args:
            make_task: Makes the task of a rank, given the rank and the file for the store.
            world_size: Number of ranks.
            timeout: Seconds until ranks that have not ended are stuck.
            dies: Ranks whose death is no failure.

        Raises:
            WorkersUnavailableError: No workers can be started; then again at every later test, at once.
        """
        if self._problem is not None:
            raise self._problem
        try:
            server = self._prepare(world_size)
        except WorkersUnavailableError as error:
            self._problem = error
            raise
        self._num_tests += 1
        store_file = server.store_directory / str(self._num_tests)
        workers = self._workers[:world_size]
        course = Course(server, workers, timeout, dies)
        try:
            course.start([make_task(rank, str(store_file)) for rank in range(world_size)])
            return course.finish()
        finally:
            course.abandon()
            store_file.unlink(missing_ok=True)

    def _prepare(self, world_size: int) -> ForkServer:
        """Return the server, with at least that many workers ready."""
        self._forget_ended()
        if self._server is None:
            self._server = ForkServer(self._environ(), self._verbosity)
        while len(self._workers) < world_size:
            self._workers.append(self._server.fork())
        self._await_ready(self._server)
        return self._server

    def _forget_ended(self) -> None:
        """Drop the workers, or the server, that are gone since the last test."""
        if self._server is None:
            return
        while not self._server.has_ended and wait([self._server.fileno()], 0):
            self._server.hear()
        if self._server.has_ended:
            self.close()
        for worker in [one for one in self._workers if one.was_killed or one.exit_code is not None]:
            worker.close()
            self._workers.remove(worker)

    def _await_ready(self, server: ForkServer) -> None:
        deadline = time.monotonic() + _START_SECONDS
        starting = {worker.connection: worker for worker in self._workers if not worker.is_ready}
        while starting:
            if not wait(starting, max(0.0, deadline - time.monotonic())):
                raise WorkersUnavailableError(f"No workers after {_START_SECONDS:g} s. {server.log()}")
            heard = wait(starting, 0)
            for worker in [starting.pop(one) for one in list(starting) if one in heard]:
                with contextlib.suppress(EOFError, ConnectionResetError):
                    worker.is_ready = isinstance(worker.connection.recv(), Ready)

    def close(self) -> None:
        """End all workers and the fork server.

        Blocks until they are gone.
        """
        if self._server is not None:
            self._server.close()
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._server = None
