"""The fault matrix, run: what becomes of a job of three ranks when one of them fails.

``python -m tests.launch.fault_matrix --output docs/fault_matrix.md`` runs all cells and writes what it measured.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .fault_cells import LAUNCHERS, RANKS, Cell, Outcome, Survivor, all_cells, judge, selection
from .fault_table import as_markdown, entry
from .mpi import INTEL_MPI, MPICH, OPENMPI, MpiInstallation
from .processes import Running, kill_all, marked, poll
from .scripts.fault import FAULTS, PLACES, WORLD_SIZE
from .slurm import SlurmCluster
from .torchrun import Torchrun

SCRIPT = Path(__file__).parent / "scripts" / "fault.py"
WALL_LIMIT = 60.0
LOOKS_PER_MEASUREMENT = 20  # of which a hundred are made in a second
VARIABLES = {"DISTMAN_TIMEOUT": "15", "DISTMAN_SILENCE_TIMEOUT": "4", "OMP_NUM_THREADS": "1"}


Start = Callable[[Any, Sequence[str | Path], Mapping[str, str]], AbstractContextManager[Running]]


@dataclass(frozen=True)
class Starter:
    """How a launcher of the matrix starts a script on all ranks.

    ``fixture`` names the fixture that the tests give to ``start``; the command makes the same by ``make``.
    """

    fixture: str
    make: Callable[[], Any]
    start: Start


def _start_torchrun(torchrun: Torchrun, script: Sequence[str | Path], env: Mapping[str, str]) -> Any:
    return torchrun.start(*script, ranks=WORLD_SIZE, env=env)


def _start_mpi(mpi: MpiInstallation, script: Sequence[str | Path], env: Mapping[str, str]) -> Any:
    return mpi.start(*script, ranks=WORLD_SIZE, env=env)


def _start_srun(cluster: SlurmCluster, script: Sequence[str | Path], env: Mapping[str, str], *options: str) -> Any:
    return cluster.start_srun(f"-N{WORLD_SIZE}", f"-n{WORLD_SIZE}", *options, sys.executable, *script, env=env)


def _start_srun_kill(cluster: SlurmCluster, script: Sequence[str | Path], env: Mapping[str, str]) -> Any:
    return _start_srun(cluster, script, env, "-K")


STARTERS = {
    "torchrun": Starter("torchrun", Torchrun, _start_torchrun),
    "Open MPI 5": Starter("openmpi", lambda: MpiInstallation(OPENMPI).install(), _start_mpi),
    "MPICH 5": Starter("mpich", lambda: MpiInstallation(MPICH).install(), _start_mpi),
    "Intel MPI": Starter("intel_mpi", lambda: MpiInstallation(INTEL_MPI).install(), _start_mpi),
    "srun": Starter("slurm_cluster", SlurmCluster, _start_srun),
    "srun -K": Starter("slurm_cluster", SlurmCluster, _start_srun_kill),
}


class Watch:
    """Watches the processes of the ranks from outside: who is there, and when it is gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[int, float] = {}
        self._waited: dict[Path, tuple[int, int]] = {}
        self._looks = itertools.count()
        self._identities: dict[int, dict[str, Any]] = {}

    def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Watch until the condition is true, and return whether it became so in time."""

        def is_over() -> bool:
            self._look()
            return condition()

        return poll(is_over, timeout, interval=0.01)

    def _look(self) -> None:
        for rank in range(WORLD_SIZE):
            if rank not in self.ended and (identity := self.identity(rank)) and not _is_alive(identity["pid"]):
                self.ended[rank] = time.time()
        if next(self._looks) % LOOKS_PER_MEASUREMENT == 0:
            self._measure_delay()

    def _measure_delay(self) -> None:
        """Note how long each thread has waited for a core, when first seen after the fault and now."""
        if not any(self.folder.glob("*.fault")):
            return
        for identity in self._identities.values():
            for thread in Path(f"/proc/{identity['pid']}/task").glob("*/schedstat"):
                with suppress(OSError):  # it ended while we looked
                    waited = int(thread.read_text().split()[1])
                    self._waited[thread] = (self._waited.get(thread, (waited, 0))[0], waited)

    @property
    def delay(self) -> float:
        """Seconds in which threads of the ranks could run, but had no core, since the fault."""
        return sum(last - first for first, last in self._waited.values()) / 1e9

    def identity(self, rank: int) -> dict[str, Any]:
        if rank not in self._identities and (record := self.record(rank, "identity")):
            self._identities[rank] = record
        return self._identities.get(rank, {})

    def record(self, rank: int, name: str) -> dict[str, Any]:
        """Return what a rank recorded, nothing if it did not."""
        with suppress(FileNotFoundError):
            record: dict[str, Any] = json.loads((self.folder / f"{rank}.{name}").read_text())
            return record
        return {}

    def said(self, rank: int) -> str:
        with suppress(FileNotFoundError):
            return _ending((self.folder / f"{rank}.stderr").read_text(errors="replace"))
        return ""

    def survivor(self, rank: int, moment: float) -> Survivor:
        seconds = max(0.0, self.ended[rank] - moment) if rank in self.ended else None
        return Survivor(rank, seconds, self.record(rank, "end").get("code"), self.said(rank))


def run(cell: Cell, launcher: Any) -> Outcome:
    """Run a cell to its end, or to its time limit, with what the launcher's fixture gives."""
    folder = Path(tempfile.mkdtemp(prefix="distman-cell-"))
    folder.chmod(0o755)
    try:
        script = [SCRIPT, cell.fault, cell.place, str(cell.rank)]
        variables = {**VARIABLES, "TEST_DISTMAN_RECORDS": str(folder)}
        with STARTERS[cell.launcher].start(launcher, script, variables) as running:
            return _observe(cell, running, Watch(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(launcher, SlurmCluster):
            launcher.cancel_jobs()


def _observe(cell: Cell, running: Running, watch: Watch) -> Outcome:
    survivors = sorted({*range(WORLD_SIZE)} - {cell.rank})
    has_ended = watch.until(_end_of(cell, running, watch, survivors), WALL_LIMIT)
    ended, code = time.time(), running.returncode
    if has_ended:
        watch.until(lambda: watch.ended.keys() >= {*survivors}, 5.0)
    else:
        running.ask_for_stacks()
    moment = watch.record(cell.rank, "fault").get("moment")
    identity = watch.identity(cell.rank)
    return Outcome(
        host=identity.get("host", ""),
        pid=identity.get("pid", 0),
        has_failed=moment is not None,
        survivors=tuple(watch.survivor(rank, moment or ended) for rank in survivors),
        launcher_seconds=max(0.0, ended - (moment or ended)) if has_ended else None,
        launcher_code=code,
        left_behind=_left_behind(running) if has_ended else (),
        said=_ending(running.stdout + running.stderr),
        seconds=running.seconds,
        delay=watch.delay,
    )


def _end_of(cell: Cell, running: Running, watch: Watch, survivors: Sequence[int]) -> Callable[[], bool]:
    """Return what tells that a cell is over.

    A rank that is stopped when all others are done fails nobody: its launcher waits for it as for one that is slow.
    It is continued, and must end normally.
    """

    def is_over() -> bool:
        if cell.waits_for_the_stopped and watch.ended.keys() >= {*survivors}:
            with suppress(ProcessLookupError):
                os.kill(watch.identity(cell.rank)["pid"], signal.SIGCONT)
        return running.returncode is not None

    return is_over


def _left_behind(running: Running) -> tuple[str, ...]:
    if poll(lambda: not marked(running.marker), 5.0, interval=0.1):
        return ()
    left = tuple(str(process) for process in marked(running.marker))
    kill_all(lambda: marked(running.marker))
    return left


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _ending(text: str) -> str:
    return text[-8000:]


class Results:
    """The cells that are done, one in a line of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[Cell, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.outcomes[Cell(**entry["cell"])] = Outcome.of_json(entry["outcome"])

    def add(self, cell: Cell, outcome: Outcome) -> None:
        self.outcomes[cell] = outcome
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"cell": asdict(cell), "outcome": asdict(outcome)}) + "\n")


class Workshop:
    """The launchers as the command makes them, each when it is first needed; a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._made: dict[str, Any] = {}

    def __enter__(self) -> "Workshop":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def launcher(self, name: str) -> Any:
        fixture = STARTERS[name].fixture
        if fixture not in self._made:
            made = STARTERS[name].make()
            self._made[fixture] = self._stack.enter_context(made) if hasattr(made, "__exit__") else made
        return self._made[fixture]


def run_all(cells: Sequence[Cell], results: Results) -> None:
    """Run the cells that the results do not have, one after another."""
    with Workshop() as workshop:
        for number, cell in enumerate(cells, start=1):
            if cell in results.outcomes:
                continue
            outcome = run(cell, workshop.launcher(cell.launcher))
            results.add(cell, outcome)
            complaints = "".join(f"\n    {complaint}" for complaint in judge(cell, outcome))
            _say(f"{number} of {len(cells)}: {cell}: {entry(cell, outcome)}, in {outcome.seconds:.1f} s{complaints}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells, write the table, and return whether a promise was broken."""
    options = _options(arguments)
    cells = [cell for cell in all_cells() if _is_wanted(cell, options)]
    if options.selection:
        cells = selection(cells)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cluster is taken down
    results = Results(options.results)
    run_all(cells, results)
    outcomes = {cell: results.outcomes[cell] for cell in cells}
    if options.output:
        options.output.write_text(as_markdown(outcomes))
    num_broken = sum(bool(judge(cell, outcome)) for cell, outcome in outcomes.items())
    _say(f"{len(cells)} cells, a promise broken in {num_broken}")
    return int(num_broken > 0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.launch.fault_matrix", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table here, as Markdown")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("build/fault_matrix.jsonl"),
        help="keep what was measured here; a cell that it has is not run again, so remove it to measure anew"
        " (default: %(default)s)",
    )
    parser.add_argument("--selection", action="store_true", help="only a few cells, in which all pairs occur")
    parser.add_argument("--launcher", action="append", choices=LAUNCHERS, help="only this one; may be repeated")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="the same")
    parser.add_argument("--place", action="append", choices=PLACES, help="the same")
    parser.add_argument("--rank", action="append", choices=RANKS, type=int, help="the same")
    return parser.parse_args(arguments)


def _is_wanted(cell: Cell, options: argparse.Namespace) -> bool:
    def allows(wanted: Collection[str | int] | None, value: str | int) -> bool:
        return wanted is None or value in wanted

    return all(allows(getattr(options, name), value) for name, value in asdict(cell).items())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
