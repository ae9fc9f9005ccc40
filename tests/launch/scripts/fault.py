"""One of three ranks fails: ``FAULT PLACE RANK``; the folder ``TEST_DISTMAN_RECORDS`` keeps what happened.

Rank 1, say, leaves there ``1.identity`` (its host and pid), ``1.stderr`` (all that it says), ``1.arrived`` (it
is at the place), ``1.fault`` (the moment of the fault) and ``1.end`` (its exit code, unless a signal ends it).
The failing rank waits until the others are at the place, so that each of them is where the place says.
"""

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

WORLD_SIZE = 3
RENDEZVOUS_TIMEOUT = 8.0
SECONDS_OF_PYTHON_CODE = 20.0
PATIENCE = 40.0
SETTLING = 0.5  # from the announcement that a rank goes to wait until it surely waits


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArgumentsError(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} number {number}")


def throw(make: Callable[[], Exception]) -> None:
    raise make()


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], object]] = {
    "raise": partial(throw, lambda: ValueError("boom")),
    "SIGKILL": partial(signal_myself, signal.SIGKILL),
    "SIGSTOP": partial(signal_myself, signal.SIGSTOP),
    "sys.exit(0)": partial(sys.exit, 0),
    "sys.exit(3)": partial(sys.exit, 3),
    "unpicklable": partial(throw, lambda: UnpicklableError("boom")),
    "two arguments": partial(throw, lambda: TwoArgumentsError("boom", 2)),
}


class Records:
    """What this rank leaves in the folder, and what the others left there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank

    def write(self, name: str, **fields: Any) -> None:
        """Write a record, of which a reader sees all or nothing."""
        path = self.folder / f"{self.rank}.{name}"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(fields))
        unfinished.rename(path)

    def wait_for(self, name: str, ranks: Iterable[int]) -> None:
        until = time.monotonic() + PATIENCE
        for rank in ranks:
            while not (self.folder / f"{rank}.{name}").exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {rank} must leave the record {name!r} within {PATIENCE:g} s")
                time.sleep(0.01)

    def keep_standard_error(self) -> None:
        """Send standard error to the folder, where it can be told from that of other ranks."""
        with (self.folder / f"{self.rank}.stderr").open("ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())


@dataclass
class Course:
    """What this rank does, and how it ends."""

    fault: str
    failing_rank: int
    records: Records
    exit_code: Any = field(default=1, init=False)

    @property
    def fails(self) -> bool:
        return self.records.rank == self.failing_rank

    def arrive(self, *, settling: float = SETTLING) -> None:
        """Say that this rank is at the place; on the failing rank, wait for the others, and fail."""
        if self.fails:
            self.fail(settling)
        else:
            self.records.write("arrived")

    def fail(self, settling: float = SETTLING) -> None:
        self.records.wait_for("arrived", set(range(WORLD_SIZE)) - {self.failing_rank})
        time.sleep(settling)
        moment = time.time()
        self.records.write("fault", moment=moment)
        sys.stdout.write(f"rank {self.failing_rank} fails at {moment}\n")
        sys.stdout.flush()
        FAULTS[self.fault]()

    def run(self, place: Callable[["Course"], None]) -> None:
        try:
            place(self)
            self.exit_code = 0
        except SystemExit as leaving:
            self.exit_code = leaving.code or 0
            raise

    def record_end(self) -> None:
        self.records.write("end", code=self.exit_code)

    def record_hard_exits(self) -> None:
        """Record an exit that runs no exit handlers too."""
        leave = os._exit

        def record_and_leave(code: int) -> None:
            self.exit_code = code
            self.record_end()
            leave(code)

        os._exit = record_and_leave  # type: ignore[assignment]


def initialize() -> Any:
    from distman import DistributedManager

    return DistributedManager.initialize(rendezvous_timeout=RENDEZVOUS_TIMEOUT)


def all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))


def before_initialize(course: Course) -> None:
    course.arrive()
    initialize()


def in_on_rank(course: Course) -> None:
    from distman.decorators import on_rank

    @on_rank(course.failing_rank)
    def work() -> None:
        course.fail()

    initialize()
    if not course.fails:
        course.arrive()
    work()


def in_a_collective(course: Course) -> None:
    initialize()
    for step in range(10_000):
        if step == 20:
            course.arrive()
        all_reduce()
        time.sleep(0.01)


def in_a_barrier(course: Course) -> None:
    manager = initialize()
    course.arrive()
    manager.barrier("checkpoint")


def in_python_code(course: Course) -> None:
    manager = initialize()
    course.arrive()
    until = time.monotonic() + SECONDS_OF_PYTHON_CODE
    while time.monotonic() < until:
        time.sleep(0.05)
    manager.barrier("end")


def after_the_last_collective(course: Course) -> None:
    initialize()
    all_reduce()
    course.arrive(settling=0.0)


PLACES: dict[str, Callable[[Course], None]] = {
    "before initialize": before_initialize,
    "in on_rank": in_on_rank,
    "in a collective": in_a_collective,
    "in a barrier": in_a_barrier,
    "in Python code": in_python_code,
    "after the last collective": after_the_last_collective,
}


def main(fault: str, place: str, failing_rank: str) -> None:
    from distman import environments

    rank = environments.detect(os.environ).environment.rank
    records = Records(Path(os.environ["TEST_DISTMAN_RECORDS"]), rank)
    records.write("identity", host=socket.gethostname(), pid=os.getpid())
    records.keep_standard_error()
    import torch  # noqa: F401 - it takes its time, which is not the fault's

    from distman import DistributedManager  # noqa: F401 - the same

    course = Course(fault, int(failing_rank), records)
    course.record_hard_exits()
    atexit.register(course.record_end)
    course.run(PLACES[place])


if __name__ == "__main__":
    main(*sys.argv[1:])
