"""Why a try failed, and which hosts the next one has to do without."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from distman._base.text import printable
from distman._coordination.failure.record import DIED, SILENT
from distman._coordination.failure.starter import FAILURE, HOST, SAVED
from distman._coordination.messages import MalformedMessageError, decode

Kind = TypeVar("Kind")

# A line of srun on tasks that ended. Source: Slurm, src/srun/libsrun/launch.c.
_TASKS = re.compile(r"^srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<end>.+?)(?: \(core dumped\))?$", re.MULTILINE)
_CANCELLED = re.compile(r"_step_signal: Terminating |\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT ")
_OUT_OF_MEMORY = re.compile(r"out[ _-]of[ _-]memory|oom[ _-]kill", re.IGNORECASE)


def _without_stop(sentence: str) -> str:
    return printable(sentence).rstrip(".")


@dataclasses.dataclass(frozen=True)
class Ended:
    exit_code: int
    errors: str  # what the launcher and the ranks wrote last to standard error
    interruption: int | None  # the signal by which this command was asked to end
    did_not_end: bool  # though a rank had failed, and the command had its time


@dataclasses.dataclass(frozen=True)
class Accusation:
    """The failure that a host saw first."""

    rank: int
    kind: str
    text: Annotated[str, _without_stop]  # the sentence that names rank, host and cause


@dataclasses.dataclass(frozen=True)
class HostNote:
    ranks: tuple[int, ...]
    oom_kills: int  # since the host started, when the try began
    step: str | None  # of the Slurm job


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the ranks of one try wrote down."""

    hosts: Mapping[str, HostNote]
    failures: Mapping[str, Accusation]  # by the host that saw it
    saved: int | None  # step of the last checkpoint

    @classmethod
    def read(cls, folder: Path) -> Notes:
        saved = _read(folder, SAVED, dict[str, int])
        step = next((one["step"] for one in saved.values()), None)
        return cls(_read(folder, HOST, HostNote), _read(folder, FAILURE, Accusation), step)

    @property
    def step(self) -> str | None:
        return next((host.step for host in self.hosts.values()), None)

    def host_of(self, rank: int) -> str | None:
        return next((name for name, host in self.hosts.items() if rank in host.ranks), None)


@dataclasses.dataclass(frozen=True)
class Health:
    problem: str | None
    oom_kills: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    reason: str
    bad_hosts: frozenset[str] = frozenset()


def judge(notes: Notes, ended: Ended, check: Callable[[str], Health]) -> Verdict:
    """Return why a try failed, and which hosts are bad.

    A host is bad if one of its ranks fell silent or was killed from outside, or if a check finds something. It is not
    if the program failed, memory ran out, or ranks of several hosts were killed at once.
    """
    suspects = _suspects(notes) or _first_killed(notes, ended.errors)
    if not suspects:
        return Verdict(f"it ended with exit code {ended.exit_code}, and no rank wrote down why")
    suspect = suspects[0]
    host = notes.host_of(suspect.rank)
    if len(suspects) > 1:  # hosts that lost each other
        hosts = dict.fromkeys(host for one in suspects if (host := notes.host_of(one.rank)))
        found = {host: problem for host in hosts if (problem := check(host).problem) is not None}
        reasons = [suspect.text, *(f"{host} {problem}" for host, problem in found.items())]
        return Verdict(". ".join(reasons), frozenset(found))
    if host is None or suspect.kind not in (DIED, SILENT):
        return Verdict(suspect.text)
    if suspect.kind == SILENT or (ended.did_not_end and suspect.rank not in _ends(ended.errors)):
        return Verdict(suspect.text, frozenset([host]))
    health = check(host)
    if health.problem is not None:
        return Verdict(f"{suspect.text}. {host} {health.problem}", frozenset([host]))
    excuse = _excuse(notes, suspect.rank, host, ended.errors, health)
    return Verdict(f"{suspect.text}. {excuse}") if excuse else Verdict(suspect.text, frozenset([host]))


def waits_for_lost_hosts(notes: Notes, errors: str) -> bool:
    """Return whether srun says that all tasks have ended but for those on hosts of failed ranks that said nothing."""
    left = {rank for host in notes.hosts.values() for rank in host.ranks} - _ends(errors).keys()
    lost = {notes.host_of(one.rank) for one in _suspects(notes)} - notes.failures.keys()
    return bool(left) and {notes.host_of(rank) for rank in left} <= lost


def _suspects(notes: Notes) -> list[Accusation]:
    """Return whom most hosts accuse, one host one vote; several where as many accuse one as the other."""
    votes = Counter((one.rank, one.kind) for one in notes.failures.values())
    most = max(votes.values(), default=0)
    by_vote = {(one.rank, one.kind): one for one in notes.failures.values()}
    return [by_vote[vote] for vote, number in sorted(votes.items()) if number == most]


def _first_killed(notes: Notes, errors: str) -> list[Accusation]:
    """Return the rank that srun saw killed before it ended the others, which then had no time to write down why."""
    for rank, end in _ends(errors).items():
        if end == "Killed" and _ended_first(rank, errors):
            return [Accusation(rank, DIED, f"rank {rank} on {notes.host_of(rank)} was killed, says srun")]
    return []


def _excuse(notes: Notes, rank: int, host: str, errors: str, health: Health) -> str | None:
    """Return why the death of a rank says nothing against its host, or None."""
    end = _ends(errors).get(rank, "Killed")
    if end not in ("Killed", "Terminated"):
        return f"Slurm says: {end}"
    if health.oom_kills > notes.hosts[host].oom_kills or _OUT_OF_MEMORY.search(errors):
        return f"Memory ran out on {host}"
    others = sorted(notes.hosts.keys() - notes.failures.keys() - {host})
    if others and not _ended_first(rank, errors):
        return f"Ranks on {', '.join(others)} ended at the same time"
    return None


def _ends(errors: str) -> dict[int, str]:
    """Return how tasks ended, by their rank, in the words of srun."""
    return {rank: match["end"] for match in _TASKS.finditer(errors) for rank in _numbers(match["tasks"])}


def _ended_first(rank: int, errors: str) -> bool:
    """Return whether srun saw a task end before it ended the others on its own account."""
    first, cancelled = _TASKS.search(errors), _CANCELLED.search(errors)
    if first is None or cancelled is None or first.start() > cancelled.start():
        return False
    return _numbers(first["tasks"]) == [rank]


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as ``0,2-4``."""
    pairs = [part.split("-") for part in text.split(",") if part]
    return [number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1)]


def _read(folder: Path, name: str, kind: type[Kind]) -> dict[str, Kind]:
    """Return what the files hold that have a name, by what stands for ``{}`` in it."""
    before, _, after = name.partition("{}")
    found = {}
    for path in sorted(folder.glob(name.format("*"))):
        with contextlib.suppress(OSError, MalformedMessageError):
            found[path.name.removeprefix(before).removesuffix(after)] = decode(path.read_bytes(), kind, path.name)
    return found
