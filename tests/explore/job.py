"""One rank of a case: ``LINE FOLDER``.

The failing rank waits until the others are at the place, so that each of them is where the line says.
"""

import atexit
import ctypes
import gc
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # the repository, whatever starts this file

from tests.explore.cases import ACKNOWLEDGED, RENDEZVOUS_LIMIT, Case  # noqa: E402
from tests.explore.records import Records  # noqa: E402

FAULT_STEP = 5  # before it, all is well
PAUSE = 0.01  # seconds in each step
HARMLESS = 3.0  # seconds of work after a fault that harms nobody
MORE = 5.0  # seconds of work beyond those within which the job must have ended
SETTLING = 0.3  # seconds from the announcement that a rank goes to wait until it surely waits


class Rank:
    """What this rank does, and what it leaves in the folder."""

    def __init__(self, case: Case, rank: int, records: Records) -> None:
        self.case = case
        self.rank = rank
        self.records = records
        self.fault = case.fault_of(rank)
        self.exit_code: Any = 1
        self.pid = os.getpid()

    def play(self) -> None:
        try:
            SCENES.get(self.case.place, loop)(self)
            self.exit_code = 0
        except SystemExit as leaving:
            self.exit_code = leaving.code or 0
            raise

    def arrive(self, settling: float = SETTLING) -> None:
        """Say that this rank is at the place; on a failing rank, wait for the others, and fail."""
        if self.fault is None:
            self.records.write(self.rank, "arrived")
        else:
            self.fail(settling)

    def fail(self, settling: float = SETTLING) -> None:
        from tests.explore.faults import ACTIONS

        assert self.fault is not None
        self.records.wait_for("arrived", {*range(self.case.ranks)} - {fault.rank for fault in self.case.faults})
        time.sleep(settling)
        self.records.write(self.rank, "fault", moment=time.time())
        ACTIONS[self.fault.name]()

    def record_end(self) -> None:
        if os.getpid() == self.pid:
            self.records.write(self.rank, "end", code=self.exit_code)

    def record_other_exits(self) -> None:
        """Record an exit that runs no exit handlers too, and one that an exception hook makes of an error."""
        from distman._coordination.failure.hook import _Outermost

        leave, call = os._exit, _Outermost.__call__

        def record_and_call(hook: _Outermost, *error: Any) -> None:
            try:
                call(hook, *error)
            except SystemExit as leaving:
                self.exit_code = leaving.code
                raise

        def record_and_leave(code: int) -> None:
            if os.getpid() == self.pid:
                self.exit_code = code
                self.record_end()
            leave(code)

        os._exit = record_and_leave  # type: ignore[assignment]
        _Outermost.__call__ = record_and_call  # type: ignore[method-assign]


def initialize() -> Any:
    from distman import DistributedManager

    return DistributedManager.initialize(rendezvous_timeout=RENDEZVOUS_LIMIT)


def loop(rank: Rank) -> None:
    """Work in steps, in one of which it happens."""
    from tests.explore.around import AROUND, WITH_ALL_RANKS, plain

    around = rank.case.around
    if around == "acknowledge":
        acknowledge(rank)
    else:
        initialize()
        takes_part = rank.fault is None or around in WITH_ALL_RANKS
        (AROUND[around] if takes_part else plain)(steps(rank))


def steps(rank: Rank) -> Iterator[Callable[[], None]]:
    work = WORK[rank.case.place]
    seconds = HARMLESS if rank.case.is_harmless else rank.case.limit + MORE
    for index in range(FAULT_STEP + int(seconds / PAUSE)):
        yield partial(work, rank, rank.arrive if index == FAULT_STEP else nothing)


def acknowledge(rank: Rank) -> None:
    """Survive the failure, as a program may, and end the job in order; what is open then was left open.

    What the library under torch's store keeps for the whole process is not: a first store has opened it.
    """
    import torch.distributed as dist

    from distman import DistributedManager, surviving_failure
    from tests.explore.around import plain

    dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    before = descriptors()
    initialize()
    with surviving_failure() as failure:
        plain(steps(rank))
    DistributedManager.cleanup()
    gc.collect()
    rank.records.write(rank.rank, "clean", descriptors=sorted(descriptors() - before))
    if failure:
        sys.exit(ACKNOWLEDGED)


def descriptors() -> set[str]:
    """Return what is open, each with its number."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{path.name}: {path.readlink()}")
        except FileNotFoundError:  # what listed the folder
            continue
    return found


def nothing() -> None:
    """Let a step without a fault be like one with it."""


def in_python(_rank: Rank, arrive: Callable[[], None]) -> None:
    arrive()
    time.sleep(PAUSE)


def in_a_collective(_rank: Rank, arrive: Callable[[], None]) -> None:
    import torch
    import torch.distributed as dist

    arrive()
    dist.all_reduce(torch.ones(4))
    time.sleep(PAUSE)


def in_a_barrier(_rank: Rank, arrive: Callable[[], None]) -> None:
    from distman import DistributedManager

    arrive()
    DistributedManager().barrier("step")
    time.sleep(PAUSE)


def in_on_rank(rank: Rank, arrive: Callable[[], None]) -> None:
    """The first fault is in the function that one rank runs."""
    from distman import on_rank

    main = rank.case.faults[0].rank
    if rank.rank != main:
        arrive()
    on_rank(main)(arrive)()
    time.sleep(PAUSE)


def in_a_save(rank: Rank, arrive: Callable[[], None]) -> None:
    """A fault of rank 0, which writes, is in the middle of the file."""
    import torch

    from distman.checkpoint import _location, save
    from distman.checkpoint._local_storage import LocalStorage

    class Storage(LocalStorage):
        def resolve(self, path: str) -> str:
            return super().resolve(path.removeprefix("explore://"))

        @contextmanager
        def create(self, place: str) -> Iterator[Any]:
            with super().create(place) as file:
                if rank.fault is not None and rank.fault.name != "full-disk":
                    arrive()
                yield file

    storage = Storage()
    _location._from_fsspec = lambda _: storage  # type: ignore[assignment]  # as for any scheme that is not local
    if rank.rank != 0 or rank.fault is None or rank.fault.name == "full-disk":
        arrive()
    save({"weights": torch.zeros(4)}, "explore://state.pt")
    time.sleep(PAUSE)


def in_native_code(_rank: Rank, arrive: Callable[[], None]) -> None:
    """Wait for a lock of C that this thread holds itself, where no signal reaches Python."""
    if arrive is nothing:
        return
    arrive()
    take = ctypes.CDLL(None).pthread_mutex_lock
    lock = ctypes.create_string_buffer(64)
    take(lock)
    take(lock)


WORK: dict[str, Callable[[Rank, Callable[[], None]], None]] = {
    "python": in_python,
    "collective": in_a_collective,
    "barrier": in_a_barrier,
    "on_rank": in_on_rank,
    "save": in_a_save,
    "native": in_native_code,
}


def at_the_start(rank: Rank) -> None:
    rank.arrive()
    initialize()


def at_the_end(rank: Rank) -> None:
    initialize()
    in_a_collective(rank, nothing)
    rank.arrive(settling=0.0)


SCENES: dict[str, Callable[[Rank], None]] = {"start": at_the_start, "end": at_the_end}


def main(line: str, folder: str) -> None:
    ranks: list[Rank] = []
    atexit.register(lambda: [rank.record_end() for rank in ranks])  # before the package's, so that it runs after them

    from distman import environments

    number = environments.detect(os.environ).environment.rank
    records = Records(Path(folder))
    keep_outputs(records, number)
    records.write(number, "identity", host=socket.gethostname(), pid=os.getpid())
    import torch  # noqa: F401 - it takes its time, which is not the fault's

    import distman.checkpoint  # noqa: F401 - the same

    case = Case.parse(line)
    logging.basicConfig(level=logging.INFO)
    rank = Rank(case, number, records)
    rank.record_other_exits()
    ranks.append(rank)
    rank.play()


def keep_outputs(records: Records, number: int) -> None:
    """Send all that this rank says to the folder, where it can be told from what others say; so for files it makes."""
    with (records.folder / f"{number}.said").open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["TMPDIR"] = str(records.folder / f"{number}.tmp")
    (records.folder / f"{number}.tmp").mkdir()
    tempfile.tempdir = None


if __name__ == "__main__":
    main(*sys.argv[1:])
