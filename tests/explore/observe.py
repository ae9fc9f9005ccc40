"""A case from outside: when each rank was gone, what it said, and what is left of the job."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.processes import Process, poll
from tests.launch.slurm import SlurmCluster

from .around import broken_files
from .cases import NATIVE, START_LIMIT, SWALLOWING, Case, Effect
from .faults import memory_group
from .records import Records
from .starters import Job, start_case

HANG = 30.0  # seconds beyond the promised time after which nothing more is waited for
START_PATIENCE = 120.0  # seconds for all ranks to start and to come to the place, on a loaded machine
TIDYING = 5.0  # seconds for the last processes of a job to go
NOT_OURS = ("pymp-", "kernel-")  # what a loader's worker, or a kernel, leaves in its temporary folder when it is ended
LOOKS_PER_MEASUREMENT = 20  # of which a hundred are made in a second
LONGEST_TEXT = 20_000  # characters of what a rank said that are shown; one that swallows errors in a loop says much


@dataclass(frozen=True)
class End:
    """The end of a rank.

    Attributes:
        rank: Which rank.
        seconds: From the fault until its process was gone; None where it was not.
        exit_code: As it saw it itself; None where a signal ended it.
        said: Its standard output and standard error.
        left: Files and shared memory that it left behind.
        broken: Files of its program that are not whole.
        open: Descriptors that were left when it had caught the failure and ended the job.
    """

    rank: int
    seconds: float | None
    exit_code: Any
    said: str
    left: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    open: tuple[str, ...] = ()


def _shown(text: str) -> str:
    return text[-LONGEST_TEXT:]


@dataclass(frozen=True)
class Outcome:
    """What was seen of a case.

    Attributes:
        places: Host and process id of each rank; those that never spoke are missing.
        has_failed: Whether a fault happened.
        ends: How each rank ended.
        launcher_seconds: From the fault until the launcher ended; None where it did not, or there is none.
        launcher_code: Its exit code; None likewise.
        left_behind: Processes that were alive five seconds after the end.
        said: What the launcher said.
        seconds: From the start until the end.
        delay: Seconds from the fault on in which threads of the job could run, but had no core, all of them together.
    """

    places: dict[int, tuple[str, int]]
    has_failed: bool
    ends: tuple[End, ...]
    launcher_seconds: float | None
    launcher_code: int | None
    left_behind: tuple[str, ...]
    said: str
    seconds: float
    delay: float = 0.0

    def __str__(self) -> str:
        ends = [f"rank {end.rank}: {end.exit_code} after {end.seconds} s\n{_shown(end.said)}" for end in self.ends]
        launcher = f"launcher: {self.launcher_code} after {self.launcher_seconds} s\n{_shown(self.said)}"
        return "\n--- ".join(["", *ends, launcher])

    def survivors_seconds(self, case: Case) -> float | None:
        """Return when the last survivor had ended, None if one has not."""
        seconds = [end.seconds for end in self.ends if end.rank in case.survivors]
        return None if None in seconds else max(seconds)


class Watch:
    """Watches the processes of the ranks: who is there, when it is gone, and how long it waited for a core."""

    def __init__(self, case: Case, records: Records) -> None:
        self.case = case
        self.records = records
        self.ended: dict[int, float] = {}
        self.places: dict[int, tuple[str, int]] = {}
        self._waited: dict[Path, tuple[int, int]] = {}
        self._num_looks = 0

    @property
    def moment(self) -> float | None:
        """When the last fault happened, None before; one may come before another has had its turn."""
        records = [self.records.read(fault.rank, "fault") for fault in self.case.faults]
        return max((record["moment"] for record in records if record), default=None)

    @property
    def delay(self) -> float:
        """Seconds in which threads of the ranks could run, but had no core, since the fault."""
        return sum(last - first for first, last in self._waited.values()) / 1e9

    def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Watch until the condition is true, and return whether it became so in time."""

        def is_over() -> bool:
            self._look()
            return condition()

        return poll(is_over, timeout, interval=0.01)

    def are_gone(self, ranks: list[int]) -> bool:
        return self.ended.keys() >= {*ranks}

    def _look(self) -> None:
        for rank in range(self.case.ranks):
            if rank not in self.places and (identity := self.records.read(rank, "identity")):
                self.places[rank] = (identity["host"], identity["pid"])
            if rank in self.places and rank not in self.ended and not _is_alive(self.places[rank][1]):
                self.ended[rank] = time.time()
        self._num_looks += 1
        if self._num_looks % LOOKS_PER_MEASUREMENT == 0 and self.moment is not None:
            self._measure_delay()

    def _measure_delay(self) -> None:
        """Note how long each thread has waited for a core, when first seen after the fault and now."""
        for rank, (_, pid) in self.places.items():
            if rank in self.ended:
                continue
            with suppress(OSError):  # it has ended while we look
                for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                    with suppress(OSError):
                        waited = int(thread.read_text().split()[1])
                        self._waited[thread] = (self._waited.get(thread, (waited, 0))[0], waited)


def run(case: Case, launcher: Any) -> Outcome:
    """Run a case to its end, or to its time limit, with what the launcher's fixture gives."""
    folder = Path(tempfile.mkdtemp(prefix="distman-explore-"))
    records, work = folder / "records", folder / "work"
    for path in (folder, records, work):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    try:
        with start_case(case, launcher, records, work) as job:
            return _observe(case, job, Watch(case, Records(records)), work)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(launcher, SlurmCluster):
            launcher.cancel_jobs()


def _observe(case: Case, job: Job, watch: Watch, work: Path) -> Outcome:
    began = time.monotonic()
    expected = list(range(case.ranks)) if case.is_harmless else case.survivors
    everyone = list(range(case.ranks))
    watch.until(lambda: watch.moment is not None or _is_over(job, watch, everyone), START_PATIENCE)
    waits_for_stopped = case.place == "end" and Effect.SILENT in case.effects

    def is_over() -> bool:
        if waits_for_stopped and watch.are_gone(case.survivors):
            _continue(case, watch)
        return _is_over(job, watch, expected)

    has_ended = watch.until(is_over, case.limit + HANG if watch.moment is not None else 0.0)
    ended, code = time.time(), job.code
    if has_ended:
        watch.until(lambda: watch.are_gone(expected if waits_for_stopped else everyone), _tidying(case, job))
    else:
        job.ask_for_stacks()
    left_behind = _left_behind(case, job, watch) if has_ended else ()
    moment = watch.moment
    since = moment or ended
    outcome = Outcome(
        places=watch.places,
        has_failed=moment is not None,
        ends=tuple(_end(job, watch, rank, since) for rank in range(case.ranks)),
        launcher_seconds=max(0.0, ended - since) if has_ended and job.has_launcher else None,
        launcher_code=code,
        left_behind=(*left_behind, *_left_files(case, work)),
        said=job.said,
        seconds=time.monotonic() - began,
        delay=watch.delay,
    )
    job.kill()
    _remove_memory_groups(case, watch)
    return outcome


def _is_over(job: Job, watch: Watch, expected: list[int]) -> bool:
    """Return whether the launcher has ended, or without one, all ranks whose end is expected."""
    if job.has_launcher:
        return job.code is not None
    return watch.are_gone(expected) or all(part.returncode is not None for part in job.parts)


def _tidying(case: Case, job: Job) -> float:
    """Return the seconds to wait for the ranks that failed: those that are silent need not end by themselves."""
    return 0.5 if _stays(case, job) else TIDYING


def _stays(case: Case, job: Job) -> set[int]:
    """Return the ranks that nobody ends: those that are silent, or write to a pipe that nobody reads."""
    if job.has_launcher:
        return set()
    return {f.rank for f in case.faults if f.effect is Effect.SILENT or f.name == "raise-blocked-stderr"}


def _continue(case: Case, watch: Watch) -> None:
    """Continue a rank that is stopped when all others are done: it fails nobody, and must end normally."""
    for fault in case.faults:
        with suppress(ProcessLookupError, KeyError):
            os.kill(watch.places[fault.rank][1], signal.SIGCONT)


def _end(job: Job, watch: Watch, rank: int, since: float) -> End:
    records = watch.records
    code = job.code_of(rank)
    exit_code = (code if code >= 0 else None) if code is not None else records.read(rank, "end").get("code")
    temporary = records.folder / f"{rank}.tmp"
    pid = watch.places.get(rank, ("", 0))[1]
    return End(
        rank=rank,
        seconds=max(0.0, watch.ended[rank] - since) if rank in watch.ended else None,
        exit_code=exit_code,
        said=records.said(rank),
        left=(
            *(f"$TMPDIR/{path.name}" for path in temporary.glob("*") if not path.name.startswith(NOT_OURS)),
            *(str(path) for path in Path("/dev/shm").glob(f"*_{pid}_*") if pid),  # noqa: S108 - that is where they are
        ),
        broken=tuple(broken_files(watch.case.around, temporary.with_suffix(".files"))),
        open=tuple(records.read(rank, "clean").get("descriptors", ())),
    )


def _left_behind(case: Case, job: Job, watch: Watch) -> tuple[str, ...]:
    """Return what is alive; a silent rank that no launcher ends is ended here, and what is there for it must go too."""
    silent = {watch.places[rank][1] for rank in _stays(case, job) if rank in watch.places}

    def others() -> list[Process]:
        return [process for process in job.alive if not _belongs_to(process, silent)]

    is_awaited = case.place == "start" and bool(silent)  # by rank 0, which knows why the start failed
    is_ended = bool(silent) and not job.has_launcher  # by a rank of its host that stays, the failing one perhaps
    if not poll(lambda: not others(), TIDYING + is_awaited * START_LIMIT + is_ended * NATIVE, interval=0.1):
        return tuple(str(process) for process in others())
    for process in job.alive:
        if process.pid in silent:
            process.send(signal.SIGKILL)
    poll(lambda: not job.alive, TIDYING, interval=0.1)
    return tuple(str(process) for process in job.alive)


def _left_files(case: Case, folder: Path) -> list[str]:
    """Return the files that should not be there.

    Rank 0 may leave an unfinished one if it dies while it saves, or is ended by its launcher, or for not giving in.
    """
    fault = case.fault_of(0)
    is_ended = case.launcher != "env" or case.around in SWALLOWING
    dies_saving = case.place == "save" and (is_ended or (fault is not None and fault.effect is not Effect.RAISES))
    found = [path.name for path in folder.rglob("*") if path.is_file() and path.name != "state.pt"]
    return [name for name in found if not (dies_saving and name.startswith(".state.pt"))]


def _belongs_to(process: Process, pids: set[int]) -> bool:
    """Return whether a process is one of these, or there for them: it stands in for one, or serves their store."""
    is_for_them = "preloaded/bin/python" in process.command or "distman._store.server" in process.command
    return process.pid in pids or (is_for_them and bool(pids))


def _remove_memory_groups(case: Case, watch: Watch) -> None:
    for fault in case.faults:
        if fault.name == "oom-kill" and fault.rank in watch.places:
            with suppress(FileNotFoundError):
                memory_group(watch.places[fault.rank][1])[0].rmdir()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
