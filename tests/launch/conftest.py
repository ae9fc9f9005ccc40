"""The real launchers, each as a fixture; one that the machine does not have is a skip with the reason."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from ..ports import find_free_port
from .hosts import NamespaceHosts
from .mpi import INTEL_MPI, MPICH, OPENMPI, MpiInstallation
from .preloaded import PYTHON
from .processes import assert_nothing_left
from .slurm import PROGRAMS, SlurmCluster
from .torchrun import Torchrun


@pytest.fixture(scope="session", autouse=True)
def no_core_files() -> Iterator[None]:
    """Keep processes that are made to show their stacks by SIGABRT from leaving core files."""
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test when a process that it launched outlives it by five seconds."""
    yield
    assert_nothing_left()


@pytest.fixture(scope="session")
def namespace_hosts() -> Iterator[NamespaceHosts]:
    """Two virtual hosts, n1 and n2."""
    require_namespaces()
    with NamespaceHosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def slurm_of_the_session() -> Iterator[SlurmCluster]:
    """The cluster behind `slurm_cluster`."""
    require_programs(*PROGRAMS)
    require_namespaces()
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm_cluster(slurm_of_the_session: SlurmCluster) -> Iterator[SlurmCluster]:
    """A Slurm cluster of four nodes, n1 to n4, with four CPUs and four fake GPUs each; its queue is empty."""
    yield slurm_of_the_session
    slurm_of_the_session.cancel_jobs()


@pytest.fixture(scope="session")
def openmpi() -> MpiInstallation:
    """Open MPI 5."""
    return MpiInstallation(OPENMPI).install()


@pytest.fixture(scope="session")
def mpich() -> MpiInstallation:
    """MPICH."""
    return MpiInstallation(MPICH).install()


@pytest.fixture(scope="session")
def intel_mpi() -> MpiInstallation:
    """Intel MPI."""
    return MpiInstallation(INTEL_MPI).install()


@pytest.fixture(scope="session")
def no_launcher() -> None:
    """What starts ranks in bare variables: nothing, so that each is started by the test."""


@pytest.fixture(params=["openmpi", "mpich", "intel_mpi"])
def any_mpi(request: pytest.FixtureRequest) -> MpiInstallation:
    """Each MPI in turn."""
    mpi: MpiInstallation = request.getfixturevalue(request.param)
    return mpi


@pytest.fixture(scope="session")
def torchrun() -> Torchrun:
    """The torchrun of this environment."""
    return Torchrun()


@pytest.fixture(scope="session")
def preloaded_torchrun() -> Torchrun:
    """The same, for tests that do not ask what torchrun does with processes: its own is preloaded, as are the ranks."""
    return Torchrun(PYTHON)


def require_programs(*programs: str) -> None:
    """Skip unless all the programs are installed."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def require_namespaces() -> None:
    """Skip unless this process may make namespaces."""
    require_programs("ip", "unshare", "nsenter", "setpriv")
    if os.geteuid() != 0:
        pytest.skip("virtual hosts need root")
    attempt = ["unshare", "--net", "--uts", "--mount", "true"]
    tried = subprocess.run(attempt, capture_output=True, text=True, check=False, timeout=10)
    if tried.returncode != 0:
        pytest.skip(f"virtual hosts need namespaces: {tried.stderr.strip()}")


@pytest.fixture
def free_port() -> int:
    return find_free_port()
