"""One test on several workers: tasks go out, ranks end or are ended, each gets its report."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from distman._base import timing
from distman._workers.output import describe_exit
from distman.testing._messages import RankReport, RankStatus, RankTask, Signal
from distman.testing._report import readable_stacks

if TYPE_CHECKING:
    from distman.testing._rank_pool import RankProcess


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
            if not self._workers[rank].has_ended(max(0.0, deadline - time.monotonic())):
                self._workers[rank].kill_here()
