"""The fault matrix as values: its cells, what can be seen of one, and what is wrong with that.

The promises: no cell hangs, and survivors that wait for the failed rank name it and its host.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .scripts.fault import FAULTS, PLACES, RENDEZVOUS_TIMEOUT, SECONDS_OF_PYTHON_CODE, WORLD_SIZE

LAUNCHERS = ("torchrun", "Open MPI 5", "MPICH 5", "Intel MPI", "srun", "srun -K")
RANKS = (0, WORLD_SIZE - 1)
EXCEPTIONS = ("raise", "unpicklable", "two arguments")
EXITS = ("sys.exit(0)", "sys.exit(3)")
SHORTEST = 5.0  # seconds within which a failure reaches everyone, not counted while the machine is busy elsewhere
SILENCE = 12.0  # seconds within which a rank that is stopped is missed
LATENESS = 4.0  # seconds by which a limit of the library may be passed
OPENS_STORE = "must open the job's store"  # rank 0, by whatever name


@dataclass(frozen=True)
class Cell:
    """One fault, in one place, on one rank, under one launcher."""

    launcher: str
    fault: str
    place: str
    rank: int

    def __str__(self) -> str:
        return f"{self.launcher}, {self.fault}, {self.place}, rank {self.rank}"

    @property
    def values(self) -> tuple[str | int, ...]:
        return (self.launcher, self.fault, self.place, self.rank)

    @property
    def pairs(self) -> frozenset[tuple[tuple[int, str | int], ...]]:
        """All pairs of values, each value with the number of its dimension."""
        return frozenset(itertools.combinations(enumerate(self.values), 2))

    @property
    def limit(self) -> float:
        """Seconds from the fault within which the last survivor must have ended."""
        if self.place == "after the last collective":
            return SHORTEST
        if self.place == "before initialize":
            return RENDEZVOUS_TIMEOUT + LATENESS
        if self.fault == "SIGSTOP":
            return SILENCE
        if self.place == "in Python code" and self.fault in EXITS:
            return SECONDS_OF_PYTHON_CODE + SHORTEST
        return SHORTEST

    @property
    def waits_for_the_stopped(self) -> bool:
        """Whether nobody is left to miss the rank that is stopped."""
        return self.place == "after the last collective" and self.fault == "SIGSTOP"

    @property
    def is_ended_by_launcher(self) -> bool:
        """Whether the launcher ends the survivors, which may then say nothing."""
        if self.fault == "sys.exit(3)":
            return self.launcher in ("torchrun", "Open MPI 5", "srun -K")
        return self.fault in ("SIGKILL", *EXCEPTIONS) and self.launcher != "srun"


def all_cells() -> list[Cell]:
    return [Cell(*values) for values in itertools.product(LAUNCHERS, FAULTS, PLACES, RANKS)]


def selection(cells: Iterable[Cell]) -> list[Cell]:
    """Return few of the cells in which every pair of values occurs that occurs in all of them.

    Greedy: the cell with the most new pairs is next, of several such the one with the rarest values so far,
    of several such the one that ends soonest.
    """
    cells = list(cells)
    missing = frozenset().union(*(cell.pairs for cell in cells))
    used: Counter[tuple[int, str | int]] = Counter()
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: (len(cell.pairs & missing), -_total(used, cell), -cell.limit))
        chosen.append(best)
        missing -= best.pairs
        used.update(enumerate(best.values))
    return sorted(chosen, key=cells.index)


def _total(used: "Counter[tuple[int, str | int]]", cell: Cell) -> int:
    return sum(used[value] for value in enumerate(cell.values))


@dataclass(frozen=True)
class Survivor:
    """The end of a rank that did not fail.

    Attributes:
        rank: Which rank.
        seconds: From the fault until its process was gone; None where the time limit ended it.
        exit_code: As it saw it itself; None where a signal ended it.
        said: The end of its standard error.
    """

    rank: int
    seconds: float | None
    exit_code: Any
    said: str


@dataclass(frozen=True)
class Outcome:
    """What was seen of a cell.

    Attributes:
        host: Host of the failing rank; empty where it never spoke.
        pid: Its process id.
        has_failed: Whether the fault happened.
        survivors: The other ranks.
        launcher_seconds: From the fault until the launcher ended; None where the time limit ended it.
        launcher_code: Its exit code; None likewise.
        left_behind: Processes that were alive five seconds after the end of the launcher.
        said: The end of what the launcher said.
        seconds: From the start of the launcher until its end.
        delay: Seconds from the fault on in which threads of the job could run, but had no core, all of them together.
    """

    host: str
    pid: int
    has_failed: bool
    survivors: tuple[Survivor, ...]
    launcher_seconds: float | None
    launcher_code: int | None
    left_behind: tuple[str, ...]
    said: str
    seconds: float
    delay: float = 0.0

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Outcome":
        survivors = tuple(Survivor(**survivor) for survivor in fields.pop("survivors"))
        return cls(survivors=survivors, left_behind=tuple(fields.pop("left_behind")), **fields)

    def __str__(self) -> str:
        ends = [f"rank {end.rank}: {end.exit_code} after {end.seconds} s\n{end.said}" for end in self.survivors]
        launcher = f"launcher: {self.launcher_code} after {self.launcher_seconds} s\n{self.said}"
        return "\n--- ".join(["", *ends, launcher])

    @property
    def survivors_seconds(self) -> float | None:
        """When the last survivor had ended."""
        times = [survivor.seconds for survivor in self.survivors]
        return None if None in times else max(times)


def judge(cell: Cell, outcome: Outcome) -> list[str]:
    """Return what is wrong with the outcome, a sentence each."""
    if not outcome.has_failed:
        errors = "; ".join(f"rank {end.rank}: {last_error(end.said)}" for end in outcome.survivors)
        return [f"the fault must happen, got another end. {errors}"]
    return [
        *_hangs(outcome),
        *_late(cell, outcome),
        *_wrong_ends(cell, outcome),
        *_nameless(cell, outcome),
        *(f"left behind: {process}" for process in outcome.left_behind),
    ]


def names_failed_rank(cell: Cell, outcome: Outcome, text: str) -> bool:
    """Return whether a text says which rank failed, and on which host."""
    if f"rank {cell.rank} ({outcome.host}, pid {outcome.pid})" in text:
        return True
    return cell.place == "before initialize" and _names_missing_rank(cell, outcome, text)


def _names_missing_rank(cell: Cell, outcome: Outcome, text: str) -> bool:
    """Who never came to the rendezvous has not said where it is: only Slurm tells the others."""
    names_rank = re.search(rf"\brank {cell.rank}\b", text) or (cell.rank == 0 and OPENS_STORE in text)
    return bool(names_rank) and (outcome.host in text or not cell.launcher.startswith("srun"))


def should_be_named(cell: Cell, survivor: Survivor) -> bool:
    """Return whether this survivor ended by its own decision, for which it has to give the reason."""
    return cell.place != "after the last collective" and survivor.exit_code not in (None, 0)


def _hangs(outcome: Outcome) -> Iterator[str]:
    for survivor in outcome.survivors:
        if survivor.seconds is None:
            yield f"rank {survivor.rank} hangs"
    if outcome.launcher_seconds is None:
        yield "the launcher hangs"


def _late(cell: Cell, outcome: Outcome) -> Iterator[str]:
    for survivor in outcome.survivors:
        if survivor.seconds is not None and survivor.seconds - outcome.delay > cell.limit:
            yield f"rank {survivor.rank} must end within {cell.limit:g} s, got {survivor.seconds:.1f} s"


def _wrong_ends(cell: Cell, outcome: Outcome) -> Iterator[str]:
    is_normal = cell.place == "after the last collective"
    for survivor in outcome.survivors:
        if is_normal and survivor.exit_code not in (None, 0):
            yield f"rank {survivor.rank} was done and must end with 0, got {survivor.exit_code}"
        if not is_normal and survivor.exit_code == 0:
            yield f"rank {survivor.rank} must not end with 0"
        if "Fatal Python error" in survivor.said and survivor.seconds is not None:
            yield f"rank {survivor.rank} crashed"
    if outcome.launcher_code == 0 and not (is_normal and cell.fault in (*EXITS, "SIGSTOP")):
        yield "the launcher must not end with 0"
    if outcome.launcher_code and is_normal and cell.fault == "sys.exit(0)":
        yield f"the launcher must end with 0, got {outcome.launcher_code}"


def _nameless(cell: Cell, outcome: Outcome) -> Iterator[str]:
    for survivor in outcome.survivors:
        if should_be_named(cell, survivor) and not names_failed_rank(cell, outcome, survivor.said):
            yield f"rank {survivor.rank} must name the failed rank and its host, got: {last_error(survivor.said)}"
    if cell.place == "after the last collective" or cell.is_ended_by_launcher:
        return
    all_were_ended = all(end.exit_code is None and end.seconds is not None for end in outcome.survivors)
    is_named = any(names_failed_rank(cell, outcome, survivor.said) for survivor in outcome.survivors)
    if all_were_ended and not is_named:
        yield "no survivor says why it ended"


def last_error(text: str) -> str:
    """Return the last error that was said, else the last line."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exit)\b.*)", text, re.MULTILINE)
    return str((errors or text.strip().splitlines() or ["nothing"])[-1])[:300]
