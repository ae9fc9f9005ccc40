"""The resident workers of one pytest process, as many as the largest test has needed so far, and the tests on them."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, cast

from distman._base import timing
from distman._workers.output import append_only, describe_exit, read_output
from distman._workers.server_process import ResidentServer, ServerProcess, WorkerProcess, WorkerStartError
from distman.testing._environments import server_environ
from distman.testing._messages import RankReport, RankStatus, RankTask, Signal
from distman.testing._report import readable_stacks

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
        return ServerProcess(_ENTRY, options, environ=server_environ(), output=_open_log())

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


class TestRun:
    """One test on some workers, one per rank, in rank order."""

    def __init__(self, workers: Sequence[RankProcess], timeout: float, dies: Sequence[int]) -> None:
        self._workers = workers
        self._timeout = timeout
        self._dies = dies
        self._deadline = math.inf
        self._described_by: dict[int, float] = {}  # until when ranks that have raised may describe their errors
        self._first_failure: RankReport | None = None
        self._reports: dict[int, RankReport] = {}
        self._running = set(range(len(workers)))
        self._joining = set(self._running)
        self._unreleased: set[int] = set()
        self._closed: set[int] = set()  # ranks that have closed their connection, and are about to end

    def start(self, task: RankTask) -> None:
        for rank, worker in enumerate(self._workers):
            worker.forget_output()
            self._tell([rank], replace(task, rank=rank))
        self._deadline = time.monotonic() + self._timeout
        self._note_deaths()

    def finish(self) -> list[RankReport]:
        """Wait for all ranks, end those that do not end, and return every rank's report."""
        while self._running and time.monotonic() < self._limit():
            self._listen()
        self._end_running(*self._describe_stuck())
        self._release()
        outputs = [worker.read_outputs() for worker in self._workers]
        return [replace(self._reports[rank], stdout=out, stderr=err) for rank, (out, err) in enumerate(outputs)]

    def abandon(self) -> None:
        """Kill the workers that still have the test, as after Ctrl-C; nothing to do after ``finish``."""
        for rank in self._running | self._unreleased:
            self._workers[rank].kill()
        self._await_deaths(self._running | self._unreleased)

    def _limit(self) -> float:
        """Return until when to wait: a rank that has only to describe its error has time of its own for that."""
        return max([self._deadline, *(self._described_by.get(rank, -math.inf) for rank in self._running)])

    def _listen(self) -> None:
        """Wait for the next message or death, and note what it says."""
        lives = [self._workers[rank].life for rank in self._running]
        ready, is_over = self._wait(self._running - self._closed, self._limit(), lives)
        for rank in ready:
            self._take_message(rank)
        if is_over:
            self._note_deaths()

    def _wait(self, ranks: Iterable[int], until: float, lives: Sequence[object] = ()) -> tuple[list[int], bool]:
        """Return the ranks that have sent a message or closed their connection, and whether one of the lives ended."""
        connections = {self._workers[rank].connection: rank for rank in ranks}
        heard = wait([*connections, *lives], max(0.0, until - time.monotonic()))  # type: ignore[list-item]  # sockets
        return [connections[one] for one in connections if one in heard], any(life in heard for life in lives)

    def _take_message(self, rank: int) -> None:
        message = self._receive(rank)
        if message is Signal.JOINED:
            self._note_joined(rank)
        elif isinstance(message, RankReport):
            self._unreleased.add(rank)
            self._note(message)
        elif message is Signal.RAISED:
            self._described_by[rank] = time.monotonic() + timing.TEST_DESCRIPTION

    def _note_joined(self, rank: int) -> None:
        """Begin the test when the last rank has joined the group, or failed to."""
        if rank in self._joining:
            self._joining.discard(rank)
            if not self._joining:
                self._tell(self._running, Signal.BEGIN)

    def _tell(self, ranks: Iterable[int], message: object) -> None:
        for rank in ranks:
            # A worker that is gone is noticed by its end.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._workers[rank].connection.send(message)

    def _receive(self, rank: int) -> object:
        """Return the rank's next message, or None if its connection is closed."""
        try:
            return self._workers[rank].connection.recv()
        except (EOFError, ConnectionResetError):
            self._closed.add(rank)
            return None

    def _note_deaths(self) -> None:
        for rank in sorted(self._running):
            worker = self._workers[rank]
            if not worker.has_ended():
                continue
            while rank in self._running - self._closed and worker.connection.poll():
                self._take_message(rank)
            if rank in self._running:
                self._note(RankReport(rank, RankStatus.DIED, describe_exit(worker.exit_code)))

    def _note(self, report: RankReport) -> None:
        self._running.discard(report.rank)
        self._reports[report.rank] = report
        self._note_joined(report.rank)
        is_expected = report.status is RankStatus.DIED and report.rank in self._dies
        if report.status is not RankStatus.PASSED and not is_expected and self._first_failure is None:
            self._first_failure = report
            self._deadline = min(self._deadline, time.monotonic() + timing.TEST_OTHERS_END)

    def _describe_stuck(self) -> tuple[RankStatus, str]:
        first = self._first_failure
        if first is None:
            return RankStatus.STUCK, f"had not ended after {self._timeout:g} s (stuck)"
        return RankStatus.STOPPED, f"stopped {time.monotonic() - first.ended_at:.1f} s after rank {first.rank} failed"

    def _end_running(self, status: RankStatus, headline: str) -> None:
        """Fetch the stacks of the ranks that have not ended, and end them."""
        ranks = sorted(self._running)
        stacks = self._fetch_stacks(ranks)
        for rank in ranks:
            if rank not in self._reports or self._reports[rank].status is RankStatus.PASSED:
                self._reports[rank] = RankReport(rank, status, headline, stacks[rank])
            self._workers[rank].kill()
        self._await_deaths(ranks)
        self._running.clear()

    def _fetch_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._workers[rank].request_stacks()
        deadline = time.monotonic() + timing.TEST_STACKS
        texts = dict.fromkeys(ranks, "")
        while time.monotonic() < deadline:
            before, texts = texts, {rank: self._workers[rank].read_stacks() for rank in ranks}
            if all(texts.values()) and texts == before:
                break
            time.sleep(timing.TEST_STACKS_PAUSE)
        return {rank: readable_stacks(text) for rank, text in texts.items()}

    def _release(self) -> None:
        """Let the ranks that have ended leave the group together, and wait until they have."""
        self._tell(self._unreleased, Signal.RELEASE)
        deadline = time.monotonic() + timing.TEST_RELEASE
        while self._unreleased and time.monotonic() < deadline:
            for rank in self._wait(self._unreleased, deadline)[0]:
                self._note_released(rank)
        self._running, self._unreleased = self._unreleased, set()
        headline = f"passed, but had not left the group {timing.TEST_RELEASE:g} s later (stuck)"
        self._end_running(RankStatus.STUCK, headline)

    def _note_released(self, rank: int) -> None:
        end, worker = self._receive(rank), self._workers[rank]
        self._unreleased.discard(rank)
        if not isinstance(end, RankReport):
            has_ended = worker.has_ended(timing.TEST_DEATH)
            how = describe_exit(worker.exit_code) if has_ended else "closed its connection to pytest"
            end = RankReport(rank, RankStatus.DIED, f"{how}, after the test")
        if end.status is not RankStatus.PASSED:
            worker.kill()
            if self._reports[rank].status is RankStatus.PASSED:
                self._reports[rank] = end

    def _await_deaths(self, ranks: Iterable[int]) -> None:
        deadline = time.monotonic() + timing.WORKER_END
        for rank in ranks:
            worker = self._workers[rank]
            if not worker.has_ended(max(0.0, deadline - time.monotonic())):
                with contextlib.suppress(ProcessLookupError):  # its server has not done it
                    os.killpg(worker.pid, signal.SIGKILL)
