"""The only module that touches mpi4py: the broadcast of an address, and the end of a failed job."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING, TypeVar

from distman._text import printable
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")

_REMEDY = (
    "Install mpi4py for this MPI in the environment of every rank, or set MASTER_ADDR to the name of rank "
    "0's node on all ranks (mpirun -x MASTER_ADDR=..., mpiexec -genv MASTER_ADDR ...)."
)


def is_installed() -> bool:
    """Return whether mpi4py is installed, without importing it: under some launchers the import ends the process."""
    return importlib.util.find_spec("mpi4py") is not None


def broadcast_from_rank_zero(environment: LaunchEnvironment, make: Callable[[], T], timeout: float) -> T:
    """Return what ``make`` gives on rank 0, on every rank, by a broadcast over MPI.

    Collective. MPI is initialized where it is not yet, and stays so: a program may go on to use it.

    Args:
        environment: What the launcher says; MPI itself must agree.
        make: Called on rank 0 only. If it raises, the error is raised there and a RendezvousError on the
            other ranks.
        timeout: Seconds. MPI itself waits forever, and nothing can interrupt it: a process that waits longer
            says so and aborts, which ends the job.

    Raises:
        RendezvousError: mpi4py is missing, finds no MPI, finds another MPI than the one that started the
            ranks, or ``make`` raised on rank 0.
    """
    with _exit_after(timeout, environment):
        return _broadcast(environment, make)


def _broadcast(environment: LaunchEnvironment, make: Callable[[], T]) -> T:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(
            f"importing mpi4py failed, through which the ranks of {environment.launcher} on several nodes learn where "
            f"to meet: {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (environment.rank, environment.world_size):
        raise RendezvousError(
            f"mpi4py must belong to the MPI that started the ranks, got rank {world.rank} of {world.size} "
            f"from mpi4py ({_library(MPI.Get_library_version())}) and rank {environment.rank} of "
            f"{environment.world_size} from {environment.launcher}. {_REMEDY}"
        )
    if world.rank != 0:
        failed, value = world.bcast(None)
        if failed:
            reason = printable(value)
            raise RendezvousError(f"opening the store of the job failed on rank 0: {reason}. See rank 0's error.")
        return value  # type: ignore[no-any-return]
    try:
        made = make()
    except Exception as error:  # any error: the others wait in the broadcast and must hear of it
        world.bcast((True, f"{type(error).__name__}: {error}"))
        raise
    world.bcast((False, made))
    return made


@contextlib.contextmanager
def _exit_after(timeout: float, environment: LaunchEnvironment) -> Iterator[None]:
    def give_up() -> None:
        sys.stderr.write(
            f"distman: rank {environment.rank} waited {timeout:g} s in MPI for the other ranks of "
            f"{environment.world_size}: one did not get to DistributedManager.initialize(). To be told "
            "which, set MASTER_ADDR to the name of rank 0's node on all ranks.\n"
        )
        sys.stderr.flush()
        os.abort()

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def abort_at_exit() -> bool:
    """Make the end of this process the end of the whole MPI job, and return whether it will be.

    Only where MPI is up: without this, a rank that raised would wait in ``MPI_Finalize`` for the
    others, which wait for it.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return False
    from mpi4py import run

    run.set_abort_status(1)
    return True


def _library(version: str) -> str:
    return version.splitlines()[0].strip("\0 ")
