"""What became of the ranks of a job, in words and as values."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distman._base.text import printable, printable_lines
from distman._cli.output import shown_ranks
from distman._cli.run.console import COMMAND
from distman._coordination.failure.record import DIED, EXITED, FailureRecord
from distman._coordination.failure.starter import RECORD
from distman._coordination.messages import MalformedMessageError, checked

OF_A_SHELL = 128  # what a shell adds to the number of a signal that ended a program, for its exit code

WANTS_RESTART = os.EX_TEMPFAIL  # of a rank that was told to stop and has saved, by ``distman.handler.Preempted``
_NUM_LINES = 10  # that are repeated where none begins a traceback
_TRACEBACK = "Traceback (most recent call last):"


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    rank: int
    pid: int
    exit_code: int  # or minus the number of the signal that ended it
    was_ended: bool  # whether its starter ended it
    own: FailureRecord | None = None  # what failed on it, as it said; None where it failed only because of another rank
    # what failed first in the job, as the job's store told it; None where it could not ask
    first: FailureRecord | None = None
    last_lines: str = ""  # of standard error

    def last_words(self) -> str:
        if self.own is not None:
            return self.own.traceback_text
        return f"distman run: rank {self.rank} ended since {self.first.headline}\n" if self.first is not None else ""

    @property
    def has_raised(self) -> bool:
        return self.own is not None and self.own.error_type != KeyboardInterrupt.__name__

    @property
    def end(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        return f"ended by {name}" if self.was_ended else f"died of {name}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    ranks: tuple[RankOutcome, ...]  # in the order in which they ended
    interruption: int | None = None  # the signal that this process was sent to end the job
    overdue: tuple[int, ...] = ()  # ranks that had not ended when their time to save was over
    grace: float = 0.0  # how many seconds that was

    @property
    def wants_restart(self) -> bool:
        """Whether all ranks were told to stop, have saved, and ask to be started again."""
        return bool(self.ranks) and all(one.exit_code == WANTS_RESTART for one in self.ranks)

    @property
    def failure(self) -> FailureRecord | None:
        """What failed first, as the ranks say, or as their ends do; None where nothing did.

        Of a job that was ended, only what a rank has raised itself: a save may have failed.
        """
        if self.wants_restart:
            return None
        ranks = [one for one in self.ranks if self.interruption is None or one.has_raised]
        known = {one.rank for one in ranks}
        failed = [one for one in ranks if one.exit_code]
        firsts = [one.first for one in failed if one.first is not None and one.first.rank in known]
        owns = [dataclasses.replace(one.own, rank=one.rank) for one in failed if one.own is not None]
        if not firsts and not owns:
            return _unexplained(failed[0]) if failed else None
        told = (firsts or owns)[0]
        guilty = next(one for one in self.ranks if one.rank == told.rank)
        if guilty.own is not None and guilty.exit_code:
            return dataclasses.replace(guilty.own, rank=guilty.rank, pid=guilty.pid)
        if told.error_type in (DIED, EXITED) and guilty.exit_code:  # its starter knows better how
            return _unexplained(guilty)
        return told

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that failed first, as a shell has it; 0 where none failed."""
        if self.wants_restart:
            return WANTS_RESTART
        if self.interruption is not None:
            return OF_A_SHELL + self.interruption
        failure = self.failure
        if failure is None:
            return 0
        codes = [one.exit_code for one in self.ranks if one.rank == failure.rank and not one.was_ended]
        # One rank alone cannot ask for the job to be started again.
        return next((code if code > 0 else OF_A_SHELL - code for code in codes if code not in (0, WANTS_RESTART)), 1)

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
        failure = self.failure
        if self.wants_restart:
            return f"distman run: the ranks have saved, and ask to be started again (exit code {WANTS_RESTART})."
        told = []
        if self.interruption is not None:
            told = [f"distman run: ended by {signal.Signals(self.interruption).name}."]
        if failure is None:
            return "\n".join([*told, *self._killed()])
        guilty = next(one for one in self.ranks if one.rank == failure.rank)
        headline = f"distman run: rank {guilty.rank} failed (pid {guilty.pid}, {guilty.end})"
        if failure.traceback_text:
            first = f"{headline}:\n{printable_lines(failure.traceback_text)}"
        else:
            first = f"{headline}: it {printable(failure.error_text)}"
        return "\n".join([*told, first, *self._others(failure), *self._killed()])

    def _killed(self) -> list[str]:
        ranks, grace = shown_ranks(self.overdue), f"{self.grace:g} s"
        told = f"Still running {grace} after SIGTERM, and killed: {ranks}. --grace SECONDS gives them longer."
        return [told] if self.overdue else []

    def _others(self, failure: FailureRecord) -> Iterable[str]:
        ends: dict[str, list[int]] = {}
        for one in self.ranks:
            if one.rank == failure.rank:
                continue
            if one.exit_code and one.own is not None:
                yield f"rank {one.rank} failed too ({one.end}): {one.own.error_type}: {printable(one.own.error_text)}"
            else:
                ends.setdefault(one.end, []).append(one.rank)
        if ends:
            yield f"The others: {'; '.join(f'{shown_ranks(ranks)}: {end}' for end, ranks in ends.items())}."


def _unexplained(one: RankOutcome) -> FailureRecord:
    """Return what is known of a rank that said nothing, as where Python could not even read its script."""
    is_killed = one.exit_code == -signal.SIGKILL and not one.was_ended
    killed = "was killed; the kernel's log (dmesg) says whether memory ran out."
    text = killed if is_killed else "wrote nothing to standard error."
    return FailureRecord(one.rank, socket.gethostname(), one.pid, DIED, text, "" if is_killed else one.last_lines)


def last_lines(data: bytes) -> str:
    """Return the last traceback in what a rank wrote, or the last lines; without colours, and as plain text."""
    text = COMMAND.sub(b"", data).decode(errors="backslashreplace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    return "".join(f"{line}\n" for line in lines[starts[-1] if starts else -_NUM_LINES :])


def read_error_file(path: Path) -> tuple[FailureRecord | None, FailureRecord | None]:
    """Return what a rank said of its own failure and of the first one; rank -1 where torch's decorator wrote it."""
    try:
        said: Any = json.loads(path.read_bytes())
        if RECORD in said:
            told = checked(said[RECORD], dict[str, FailureRecord | None], "the error file")
            return told["own"], told["first"]
        kind, _, text = said["message"]["message"].partition(": ")
        return FailureRecord(-1, "", 0, kind, text, said["message"]["extraInfo"]["py_callstack"]), None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, MalformedMessageError):
        return None, None
