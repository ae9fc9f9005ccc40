"""How each launcher starts the ranks of a case."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.launch.hosts import NamespaceHosts
from tests.launch.mpi import INTEL_MPI, MPICH, OPENMPI, MpiInstallation
from tests.launch.preloaded import PYTHON
from tests.launch.processes import Process, Running, kill_all, marked, start
from tests.launch.slurm import PROGRAMS, SlurmCluster
from tests.launch.torchrun import Torchrun
from tests.ports import find_free_port

from .cases import COLLECTIVE_LIMIT, GRACE, SILENCE_LIMIT, Case
from .faults import NETWORK_OF_LAUNCH

SCRIPT = Path(__file__).parent / "job.py"
VARIABLES = {
    "DISTMAN_TIMEOUT": str(COLLECTIVE_LIMIT),
    "DISTMAN_SILENCE_TIMEOUT": str(SILENCE_LIMIT),
    "DISTMAN_FAILURE_GRACE": str(GRACE),
    "OMP_NUM_THREADS": "1",
}


class Job:
    """The processes of a case, under a launcher, or without one each for itself."""

    def __init__(self, parts: Sequence[Running], *, has_launcher: bool) -> None:
        self.parts = parts
        self.has_launcher = has_launcher

    @property
    def code(self) -> int | None:
        """The exit code of the launcher; None while it runs, and where there is none."""
        return self.parts[0].returncode if self.has_launcher else None

    def code_of(self, rank: int) -> int | None:
        """Return the exit code of a rank as its parent sees it, which only a job without launcher tells us."""
        return None if self.has_launcher else self.parts[rank].returncode

    @property
    def said(self) -> str:
        """What the launcher said itself."""
        return "".join(part.stdout + part.stderr for part in self.parts)

    @property
    def alive(self) -> list[Process]:
        return [process for part in self.parts for process in marked(part.marker)]

    def ask_for_stacks(self) -> None:
        for part in self.parts:
            part.ask_for_stacks()

    def kill(self) -> None:
        kill_all(lambda: self.alive)


Words = Sequence[str | Path]
Start = Callable[[Any, Case, Words, Mapping[str, str], Path], AbstractContextManager[Job]]


@contextmanager
def _launched(starting: AbstractContextManager[Running]) -> Iterator[Job]:
    with starting as running:
        yield Job([running], has_launcher=True)


@contextmanager
def _start_env(
    hosts: NamespaceHosts | None, case: Case, script: Words, env: Mapping[str, str], cwd: Path
) -> Iterator[Job]:
    """Start each rank by itself, on this machine or on two virtual hosts that are made for the case."""
    with ExitStack() as stack:
        hosts = stack.enter_context(NamespaceHosts(2)) if case.hosts == 2 else None
        address = hosts.addresses["n1"] if hosts else "localhost"
        common = {**env, "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": address, "MASTER_PORT": str(find_free_port())}
        if hosts is not None:
            common[NETWORK_OF_LAUNCH] = str(hosts.pid_of("ctl"))
        parts = []
        for rank in range(case.ranks):
            enter = hosts.enter(f"n{case.host_of(rank) + 1}", cwd=cwd) if hosts else []
            variables = {**common, "RANK": str(rank)}
            parts.append(stack.enter_context(start([*enter, PYTHON, *script], env=variables, cwd=cwd)))
        yield Job(parts, has_launcher=False)


def _start_torchrun(
    torchrun: Torchrun, case: Case, script: Words, env: Mapping[str, str], cwd: Path
) -> AbstractContextManager[Job]:
    return _launched(torchrun.start(*script, ranks=case.ranks, env=env, cwd=cwd))


def _start_srun(
    cluster: SlurmCluster, case: Case, script: Words, env: Mapping[str, str], cwd: Path, *options: str
) -> AbstractContextManager[Job]:
    size = [f"-N{case.hosts}", f"-n{case.ranks}", "--overcommit", "--oversubscribe"]
    return _launched(cluster.start_srun(*size, *options, PYTHON, *script, env=env, cwd=cwd))


def _start_srun_kill(
    cluster: SlurmCluster, case: Case, script: Words, env: Mapping[str, str], cwd: Path
) -> AbstractContextManager[Job]:
    return _start_srun(cluster, case, script, env, cwd, "-K")


@contextmanager
def _start_mpi(mpi: MpiInstallation, case: Case, script: Words, env: Mapping[str, str], cwd: Path) -> Iterator[Job]:
    # Without a name of its own a job of MPICH is called after the process that started its ranks, here the server.
    env = {**env, "DISTMAN_JOB_ID": secrets.token_hex(8)}
    with ExitStack() as stack:
        hosts = stack.enter_context(NamespaceHosts(2)) if case.hosts == 2 else None
        if hosts is None:
            starting = mpi.preloaded.start(*script, ranks=case.ranks, env=env, cwd=cwd)
        else:
            starting = mpi.preloaded.start_on(hosts, *script, ranks_per_host=case.ranks // 2, env=env, cwd=cwd)
        yield stack.enter_context(_launched(starting))


@dataclass(frozen=True)
class Starter:
    """How a launcher starts a script on all ranks of a case.

    Attributes:
        fixture: The fixture that the tests give to ``start``.
        make: What makes the same for the command; it may be a context manager.
        start: What starts a case with it.
        missing: What the launcher needs and the machine does not have; empty if it has all.
    """

    fixture: str
    make: Callable[[], Any]
    start: Start
    missing: Callable[[], str]


def _nothing() -> str:
    return ""


def _no_slurm() -> str:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(missing)}" if missing else no_hosts()


def no_hosts() -> str:
    """Return why there cannot be virtual hosts here; empty if there can be."""
    attempt = ["unshare", "--net", "--uts", "--mount", "true"]
    if os.geteuid() != 0:
        return "virtual hosts need root"
    tried = subprocess.run(attempt, capture_output=True, text=True, check=False, timeout=10)
    return f"virtual hosts need namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _install(flavour: Any) -> MpiInstallation:
    return MpiInstallation(flavour).install()


STARTERS = {
    "env": Starter("no_launcher", lambda: None, _start_env, _nothing),
    "torchrun": Starter("preloaded_torchrun", lambda: Torchrun(PYTHON), _start_torchrun, _nothing),
    "srun": Starter("slurm_cluster", SlurmCluster, _start_srun, _no_slurm),
    "srun-K": Starter("slurm_cluster", SlurmCluster, _start_srun_kill, _no_slurm),
    "openmpi": Starter("openmpi", partial(_install, OPENMPI), _start_mpi, _nothing),
    "mpich": Starter("mpich", partial(_install, MPICH), _start_mpi, _nothing),
    "intel-mpi": Starter("intel_mpi", partial(_install, INTEL_MPI), _start_mpi, _nothing),
}


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
        starter = STARTERS[name]
        if starter.fixture not in self._made:
            made = starter.make()
            self._made[starter.fixture] = self._stack.enter_context(made) if hasattr(made, "__exit__") else made
        return self._made[starter.fixture]


def start_case(case: Case, launcher: Any, records: Path, cwd: Path) -> AbstractContextManager[Job]:
    """Start a case with what its launcher's fixture gives."""
    script: Words = [SCRIPT, str(case), str(records)]
    return STARTERS[case.launcher].start(launcher, case, script, VARIABLES, cwd)
