"""What became of the ranks of a job, in words and as values."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterable

from distman._coordination.failure.record import DIED, FailureRecord
from distman._run.placement import shown_ranks
from distman._text import printable, printable_lines

_OF_A_SHELL = 128
"""What a shell adds to the number of a signal that ended a program, for its exit code."""


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """How a rank ended.

    Attributes:
        rank: The rank.
        pid: Its process id.
        exit_code: Its exit code, or minus the number of the signal that ended it.
        was_ended: Whether its starter ended it.
        failure: What failed first as far as it knew; None where it said nothing.
    """

    rank: int
    pid: int
    exit_code: int
    was_ended: bool
    failure: FailureRecord | None

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        return f"ended by {name}" if self.was_ended else f"died of {name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        ranks: How each rank ended, in the order in which they did.
        interruption: The signal that this process was sent to end the job; None if it was not.
    """

    ranks: tuple[RankOutcome, ...]
    interruption: int | None = None

    @property
    def failure(self) -> FailureRecord | None:
        """What failed first: what the ranks say, or else what their ends say; None where nothing did."""
        told = self._told()
        if told is None:
            return next((_unexplained(one) for one in self.ranks if one.exit_code), None)
        of = {one.rank: one for one in self.ranks}
        if told.error_type == DIED and of[told.rank].exit_code:  # its starter knows better how
            return _unexplained(of[told.rank])
        return told

    def _told(self) -> FailureRecord | None:
        """Return what a rank told of itself, or else what the others told of one."""
        failed = [one for one in self.ranks if one.failure is not None and one.exit_code]
        for one in failed:
            if one.failure is not None and one.failure.rank in (one.rank, -1):
                return dataclasses.replace(one.failure, rank=one.rank, pid=one.pid)
        known = {one.rank for one in self.ranks}
        return next((one.failure for one in failed if one.failure is not None and one.failure.rank in known), None)

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that failed first, as a shell has it; 0 where none failed."""
        if self.interruption is not None:
            return _OF_A_SHELL + self.interruption
        failure = self.failure
        if failure is None:
            return 0
        codes = [one.exit_code for one in self.ranks if one.rank == failure.rank and not one.was_ended]
        return next((code if code > 0 else _OF_A_SHELL - code for code in codes if code), 1)

    def to_json(self) -> str:
        """Return what tools read: the failure, and how each rank ended."""
        failure = self.failure
        said = {
            "exit_code": self.exit_code,
            "failure": None if failure is None else dataclasses.asdict(failure),
            "ranks": [{"rank": one.rank, "pid": one.pid, "exit_code": one.exit_code} for one in self.ranks],
        }
        return json.dumps(said, indent=2)

    def report(self) -> str:
        """Return what a user is to read at the end: who failed and why, and what became of the others."""
        failure = self.failure
        if self.interruption is not None:
            return f"distman run: ended by {signal.Signals(self.interruption).name}."
        if failure is None:
            return ""
        guilty = next(one for one in self.ranks if one.rank == failure.rank)
        headline = f"distman run: rank {guilty.rank} failed (pid {guilty.pid}, {guilty.end})"
        if failure.traceback_text:
            first = f"{headline}:\n{printable_lines(failure.traceback_text)}"
        else:
            first = f"{headline}: it {printable(failure.error_text)}"
        return "\n".join([first, *self._others(failure)])

    def _others(self, failure: FailureRecord) -> Iterable[str]:
        ends: dict[str, list[int]] = {}
        for one in self.ranks:
            if one.rank == failure.rank:
                continue
            told = one.failure
            is_own = one.exit_code and told is not None and told.rank == one.rank
            if is_own and told is not None:
                yield f"rank {one.rank} failed too ({one.end}): {told.error_type}: {printable(told.error_text)}"
            else:
                ends.setdefault(one.end, []).append(one.rank)
        if ends:
            yield f"The others: {'; '.join(f'{shown_ranks(ranks)}: {end}' for end, ranks in ends.items())}."


def _unexplained(one: RankOutcome) -> FailureRecord:
    text = "said nothing of why; what it wrote is above."
    if one.exit_code == -signal.SIGKILL and not one.was_ended:
        text = "was killed; the kernel's log (dmesg) says whether memory ran out."
    return FailureRecord(one.rank, "", one.pid, DIED, text)
