"""The only module that touches mpi4py: the broadcast of an address, and the end of a failed job."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING, TypeVar, cast

from distman._base import timing
from distman._base.text import printable
from distman._coordination.timeouts import run_with_timeout
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

T = TypeVar("T")


_REMEDY = (
    "Install mpi4py for this MPI in the environment of every rank, or set MASTER_ADDR to the name of rank "
    "0's node on all ranks (mpirun -x MASTER_ADDR=..., mpiexec -genv MASTER_ADDR ...)."
)


def is_installed() -> bool:
    """Return whether mpi4py is installed, without importing it: under some launchers the import ends the process."""
    return importlib.util.find_spec("mpi4py") is not None


def broadcast_from_rank_zero(environment: LaunchEnvironment, make: Callable[[], T], timeout: float) -> T:
    """Return what ``make`` gives on rank 0, on every rank, by a broadcast over MPI."""
    # MPI is initialized where it is not yet, and stays so: a program may go on to use it. It waits forever, and nothing
    # can interrupt it: a process that waits longer than ``timeout`` says so and aborts, which ends the job. If ``make``
    # raises, the error is raised on rank 0 and a RendezvousError on the other ranks.
    with _exit_after(timeout, environment):
        return _broadcast(environment, make)


def _broadcast(environment: LaunchEnvironment, make: Callable[[], T]) -> T:
    try:
        MPI = _initialized()  # noqa: N806 - it is the module
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(
            f"importing mpi4py failed, through which the ranks of {environment.launcher} on several nodes learn where "
            f"to meet: {type(error).__name__}: {error}. {_REMEDY}"
        ) from error
    world, library = MPI.COMM_WORLD, MPI.Get_library_version().splitlines()[0].strip("\0 ")
    if (world.rank, world.size) != (environment.rank, environment.world_size):
        raise RendezvousError(
            f"mpi4py must belong to the MPI that started the ranks, got rank {world.rank} of {world.size} "
            f"from mpi4py ({library}) and rank {environment.rank} of "
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


def _initialized() -> ModuleType:
    """Return mpi4py's module, with MPI initialized as mpi4py does at its import, but without the GIL."""
    # MPI waits there for all ranks, and a thread of this process must be able to give up meanwhile.
    import mpi4py

    wants, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    if wants and mpi4py.rc.finalize is None:
        mpi4py.rc.finalize = True
    from mpi4py import MPI

    mpi4py.rc.initialize = wants
    if not MPI.Is_initialized():
        level = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}") if mpi4py.rc.threads else MPI.THREAD_SINGLE
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    return cast("ModuleType", MPI)


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


def is_up() -> bool:
    """Return whether MPI is up in this process: then every rank's end waits for all others, in ``MPI_Finalize``."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized() and not module.Is_finalized()


def abort() -> None:
    """End the whole MPI job, where MPI is up, and this process with it."""
    # It takes some seconds where MPI itself is stuck; then this process has to end in another way.
    if is_up():
        run_with_timeout(functools.partial(sys.modules["mpi4py.MPI"].COMM_WORLD.Abort, 1), timing.MPI_ABORT)
