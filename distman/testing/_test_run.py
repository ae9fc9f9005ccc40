"""The course of one test: tasks go out, ranks end or are ended, each gets its fate."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait

from distman.testing._forking import ForkServer, WorkerProcess, read_capture
from distman.testing._messages import (
    STACK_SIGNAL,
    Begin,
    Ending,
    Fate,
    Joined,
    Outcome,
    Release,
    Released,
    Task,
)
from distman.testing._stacks import readable_stacks

# After the first failure the others are in a collective, which the failed rank's leaving ends at once, or on
# their way to a failure of their own; whoever needs longer than this will not end by itself.
GRACE_SECONDS = 2.0
_RELEASE_SECONDS = 10.0
_STACK_SECONDS = 2.0
_DEATH_SECONDS = 5.0


class Course:
    """One test on some workers.

    Args:
        server: Tells of workers that died.
        workers: One per rank, in rank order.
        timeout: Seconds until ranks that have not ended are stuck.
        dies: Ranks whose death is no failure.
    """

    def __init__(
        self, server: ForkServer, workers: Sequence[WorkerProcess], timeout: float, dies: Sequence[int]
    ) -> None:
        self._server = server
        self._workers = dict(enumerate(workers))
        self._timeout = timeout
        self._dies = frozenset(dies)
        self._deadline = time.monotonic() + timeout
        self._first_failure: int | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._running = set(self._workers)
        self._joining = set(self._workers)
        self._unreleased: set[int] = set()
        self._closed: set[int] = set()

    def start(self, tasks: Sequence[Task]) -> None:
        """Send every rank its task."""
        for rank, task in enumerate(tasks):
            self._workers[rank].forget_output()
            self._tell([rank], task)
        self._deadline = time.monotonic() + self._timeout
        self._note_deaths()

    def finish(self) -> list[Fate]:
        """Wait for all ranks, end those that do not end, and return every rank's fate.

        Blocks.
        """
        while self._running and time.monotonic() < self._deadline:
            self._listen()
        self._end_running(self._describe_stuck())
        self._release()
        return [self._fate(rank) for rank in self._workers]

    def abandon(self) -> None:
        """Kill the workers that still have the test, as after Ctrl-C; nothing to do after ``finish``.

        Blocks until they are gone.
        """
        for rank in self._running | self._unreleased:
            self._workers[rank].kill()
        self._await_deaths(self._running | self._unreleased)

    def _listen(self) -> None:
        """Wait for the next message and note what it says."""
        connections = {self._workers[rank].connection: rank for rank in self._running - self._closed}
        server = self._server.fileno()
        heard = wait([*connections, server], max(0.0, self._deadline - time.monotonic()))
        for rank in [connections[one] for one in connections if one in heard]:
            self._take_message(rank)
        if server in heard:
            self._server.hear()
            self._note_deaths()

    def _take_message(self, rank: int) -> None:
        message = self._receive(rank)
        if isinstance(message, Joined):
            self._note_joined(rank)
        elif isinstance(message, Outcome):
            self._running.discard(rank)
            self._unreleased.add(rank)
            self._note(rank, message)

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
            if worker.exit_code is None:
                continue
            while rank in self._running - self._closed and worker.connection.poll():
                self._take_message(rank)
            if rank in self._running:
                self._running.discard(rank)
                headline = _describe_exit(worker.exit_code)
                self._note(rank, Outcome(Ending.DIED, headline, "", time.monotonic(), []))

    def _note(self, rank: int, outcome: Outcome) -> None:
        self._outcomes[rank] = outcome
        self._note_joined(rank)
        is_expected = outcome.ending is Ending.DIED and rank in self._dies
        if outcome.ending is not Ending.PASSED and not is_expected and self._first_failure is None:
            self._first_failure = rank
            self._deadline = min(self._deadline, time.monotonic() + GRACE_SECONDS)

    def _describe_stuck(self) -> tuple[Ending, str]:
        if self._first_failure is None:
            return Ending.STUCK, f"had not ended after {self._timeout:g} s (stuck)"
        seconds = time.monotonic() - self._outcomes[self._first_failure].ended_at
        return Ending.STOPPED, f"stopped {seconds:.1f} s after rank {self._first_failure} failed"

    def _end_running(self, how: tuple[Ending, str]) -> None:
        """Fetch the stacks of the ranks that have not ended, and end them."""
        ranks = sorted(self._running)
        stacks = self._fetch_stacks(ranks)
        for rank in ranks:
            if rank not in self._outcomes or self._outcomes[rank].ending is Ending.PASSED:
                self._outcomes[rank] = Outcome(*how, stacks[rank], time.monotonic(), [])
            self._workers[rank].kill()
        self._await_deaths(self._running)
        self._running.clear()

    def _fetch_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._workers[rank].signal(STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        texts = dict.fromkeys(ranks, "")
        while time.monotonic() < deadline:
            before, texts = texts, {rank: read_capture(self._workers[rank].stacks) for rank in ranks}
            if all(texts.values()) and texts == before:
                break
            time.sleep(0.02)
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
        self._end_running((Ending.STUCK, f"passed, but had not left the group {_RELEASE_SECONDS:g} s later (stuck)"))

    def _take_released(self, rank: int) -> None:
        message = self._receive(rank)
        self._unreleased.discard(rank)
        problem = message.problem if isinstance(message, Released) else None
        if message is None:
            self._await_deaths({rank})
            ended = _describe_exit(self._workers[rank].exit_code)
            problem = Outcome(Ending.DIED, f"{ended}, after the test", "", time.monotonic(), [])
        if problem is None:
            return
        self._workers[rank].kill()
        if self._outcomes[rank].ending is Ending.PASSED:
            self._outcomes[rank] = problem

    def _await_deaths(self, ranks: set[int]) -> None:
        deadline = time.monotonic() + _DEATH_SECONDS
        living = [self._workers[rank] for rank in ranks]
        while any(worker.exit_code is None for worker in living) and time.monotonic() < deadline:
            if wait([self._server.fileno()], max(0.0, deadline - time.monotonic())):
                self._server.hear()

    def _fate(self, rank: int) -> Fate:
        outcome, worker = self._outcomes[rank], self._workers[rank]
        return Fate(
            rank,
            outcome.ending,
            outcome.headline,
            outcome.detail,
            outcome.ended_at,
            read_capture(worker.stdout),
            read_capture(worker.stderr),
            tuple(outcome.warnings),
        )


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed the connection to pytest"
    if exit_code >= 0:
        return f"died with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-exit_code).name}"
    return f"died of signal {-exit_code}"
