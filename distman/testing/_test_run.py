"""One test on several workers: tasks go out, ranks end or are ended, each gets its report."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from distman._workers.output import describe_exit
from distman._workers.worker_process import END_SECONDS
from distman.testing._messages import (
    Begin,
    Debug,
    Failing,
    Joined,
    Raised,
    RankReport,
    RankResult,
    RankStatus,
    RankTask,
    Release,
    Released,
)
from distman.testing._rank_process import RankProcess
from distman.testing._stacks import readable_stacks

if TYPE_CHECKING:
    from distman.testing._debugger import Debugger

# After the first failure the others are in a collective, which the failed rank's leaving ends at once, or on
# their way to a failure of their own; whoever needs longer than this will not end by itself.
_GRACE_SECONDS = 2.0
# To describe an error is to parse the source of every function on its way, and to show objects of the test.
_DESCRIPTION_SECONDS = 10.0
# To leave the group is one message between neighbours; on a machine that runs many tests at once it may take seconds.
_RELEASE_SECONDS = 10.0
# faulthandler writes at once, unless the process was stopped or is in a call of a driver.
_STACK_SECONDS = 2.0
_STACK_POLL_SECONDS = 0.02  # nothing says when a process has written its stacks to the end
# A process that dies closes its connection first, and is waited for by its server a moment later.
_DEATH_SECONDS = 5.0
# Ranks that fail alike do so at about the same time; the debugger looks at the lowest of them.
_CHOICE_SECONDS = 1.0


class TestRun:
    """One test on some workers, one per rank, in rank order."""

    def __init__(
        self, workers: Sequence[RankProcess], timeout: float, dies: Sequence[int], debugger: Debugger | None = None
    ) -> None:
        self._workers = dict(enumerate(workers))
        self._timeout = timeout
        self._dies = frozenset(dies)
        self._deadline = time.monotonic() + timeout
        self._debugger = debugger
        self._described_by: dict[int, float] = {}
        self._failing: dict[int, Failing] = {}
        self._choice_at = math.inf
        self._first_failure: int | None = None
        self._results: dict[int, RankResult] = {}
        self._running = set(self._workers)
        self._joining = set(self._workers)
        self._unreleased: set[int] = set()
        self._closed: set[int] = set()

    def start(self, tasks: Sequence[RankTask]) -> None:
        for rank, task in enumerate(tasks):
            self._workers[rank].forget_output()
            self._tell([rank], task)
        self._deadline = time.monotonic() + self._timeout
        self._note_deaths()

    def finish(self) -> list[RankReport]:
        """Wait for all ranks, end those that do not end, and return every rank's report."""
        while self._running and time.monotonic() < self._limit():
            self._listen()
        self._end_running(self._describe_stuck())
        self._release()
        return [self._report(rank) for rank in self._workers]

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
        connections = {self._workers[rank].connection: rank for rank in self._running - self._closed}
        lives = [self._workers[rank].life for rank in self._running]
        heard = wait([*connections, *lives], max(0.0, min(self._limit(), self._choice_at) - time.monotonic()))
        for rank in [connections[one] for one in connections if one in heard]:
            self._take_message(rank)
        if any(life in heard for life in lives):
            self._note_deaths()
        if self._failing and (time.monotonic() >= self._choice_at or self._running <= self._failing.keys()):
            self._debug()

    def _take_message(self, rank: int) -> None:
        message = self._receive(rank)
        if isinstance(message, Joined):
            self._note_joined(rank)
        elif isinstance(message, RankResult):
            self._running.discard(rank)
            self._unreleased.add(rank)
            self._note(rank, message)
        elif isinstance(message, Raised):
            self._described_by[rank] = time.monotonic() + _DESCRIPTION_SECONDS
        elif isinstance(message, Failing):
            if self._debugger is None or self._debugger.was_used:
                self._tell([rank], Debug(is_chosen=False))
            else:
                self._failing[rank] = message
                self._choice_at = min(self._choice_at, time.monotonic() + _CHOICE_SECONDS)

    def _debug(self) -> None:
        """Let the user look at one of the ranks that have failed, while the others wait."""
        failing, self._failing, self._choice_at = self._failing, {}, math.inf
        if self._debugger is None:
            return
        chosen, start = self._debugger.choose(failing), time.monotonic()
        self._debugger.converse(chosen, failing[chosen], self._workers[chosen].connection)
        self._tell(failing.keys() - {chosen}, Debug(is_chosen=False))
        now = time.monotonic()
        self._deadline += now - start
        for rank in failing:  # each has to say only now what was shown
            self._described_by[rank] = now + _DESCRIPTION_SECONDS

    def _note_joined(self, rank: int) -> None:
        """Begin the test when the last rank has joined the group, or failed to."""
        if rank in self._joining:
            self._joining.discard(rank)
            if not self._joining:
                self._tell(self._running, Begin())

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
                self._running.discard(rank)
                headline = describe_exit(worker.exit_code)
                self._note(rank, RankResult(RankStatus.DIED, headline, "", time.monotonic(), []))

    def _note(self, rank: int, result: RankResult) -> None:
        self._results[rank] = result
        self._note_joined(rank)
        is_expected = result.status is RankStatus.DIED and rank in self._dies
        if result.status is not RankStatus.PASSED and not is_expected and self._first_failure is None:
            self._first_failure = rank
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)

    def _describe_stuck(self) -> tuple[RankStatus, str]:
        if self._first_failure is None:
            return RankStatus.STUCK, f"had not ended after {self._timeout:g} s (stuck)"
        seconds = time.monotonic() - self._results[self._first_failure].ended_at
        return RankStatus.STOPPED, f"stopped {seconds:.1f} s after rank {self._first_failure} failed"

    def _end_running(self, how: tuple[RankStatus, str]) -> None:
        """Fetch the stacks of the ranks that have not ended, and end them."""
        ranks = sorted(self._running)
        stacks = self._fetch_stacks(ranks)
        for rank in ranks:
            if rank not in self._results or self._results[rank].status is RankStatus.PASSED:
                self._results[rank] = RankResult(*how, stacks[rank], time.monotonic(), [])
            self._workers[rank].kill()
        self._await_deaths(self._running)
        self._running.clear()

    def _fetch_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._workers[rank].request_stacks()
        deadline = time.monotonic() + _STACK_SECONDS
        texts = dict.fromkeys(ranks, "")
        while time.monotonic() < deadline:
            before, texts = texts, {rank: self._workers[rank].read_stacks() for rank in ranks}
            if all(texts.values()) and texts == before:
                break
            time.sleep(_STACK_POLL_SECONDS)
        return {rank: readable_stacks(text) for rank, text in texts.items()}

    def _release(self) -> None:
        """Let the ranks that have ended leave the group together, and wait until they have."""
        self._tell(self._unreleased, Release())
        self._deadline = time.monotonic() + _RELEASE_SECONDS
        while self._unreleased and time.monotonic() < self._deadline:
            connections = {self._workers[rank].connection: rank for rank in self._unreleased}
            heard = wait(connections, max(0.0, self._deadline - time.monotonic()))
            for rank in [connections[one] for one in connections if one in heard]:
                self._take_released(rank)
        self._running = self._unreleased
        self._unreleased = set()
        self._end_running(
            (RankStatus.STUCK, f"passed, but had not left the group {_RELEASE_SECONDS:g} s later (stuck)")
        )

    def _take_released(self, rank: int) -> None:
        message = self._receive(rank)
        self._unreleased.discard(rank)
        problem = message.problem if isinstance(message, Released) else None
        if message is None:
            has_ended = self._workers[rank].has_ended(_DEATH_SECONDS)
            what = describe_exit(self._workers[rank].exit_code) if has_ended else "closed its connection to pytest"
            problem = RankResult(RankStatus.DIED, f"{what}, after the test", "", time.monotonic(), [])
        if problem is None:
            return
        self._workers[rank].kill()
        if self._results[rank].status is RankStatus.PASSED:
            self._results[rank] = problem

    def _await_deaths(self, ranks: Iterable[int]) -> None:
        deadline = time.monotonic() + END_SECONDS
        for rank in ranks:
            if not self._workers[rank].has_ended(max(0.0, deadline - time.monotonic())):
                self._workers[rank].kill_here()

    def _report(self, rank: int) -> RankReport:
        result, worker = self._results[rank], self._workers[rank]
        return RankReport(
            rank,
            result.status,
            result.headline,
            result.detail,
            result.ended_at,
            worker.stdout,
            worker.stderr,
            tuple(result.warnings),
            result.types,
        )
