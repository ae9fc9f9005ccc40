"""Jobs of two ranks that save growing numbers without end, of which one rank or both are killed at random moments.

    OMP_NUM_THREADS=1 python tests/checkpoint/scripts/killed_ranks.py FOLDER KILLS [SEED]

What they leave is loaded by a process that is alone. The ranks are forked from it, so it has no other threads.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which the first DTensor imports: it takes each child a second
import torch.distributed.tensor as dtensors
from torch.distributed.device_mesh import init_device_mesh

from distman import DistributedManager
from distman.checkpoint import CheckpointFolder, load, load_sharded, save, save_sharded

NUMEL = 200_000
LIMIT = 30.0  # seconds for the ranks that are left to end


def tensor_of(number):
    return torch.full((NUMEL,), float(number))


class Whole:
    def __init__(self, folder):
        self.path = folder / "state.pt"

    def save(self, number):
        save({"number": number, "tensor": tensor_of(number)}, self.path, background=True).wait()

    def load(self):
        return load(self.path)


class Numbered(Whole):
    def __init__(self, folder):
        self.checkpoints = CheckpointFolder(folder / "run", keep=2)

    def save(self, number):
        self.checkpoints.save({"number": number, "tensor": tensor_of(number)}, number, is_best=number % 5 == 0)
        self.checkpoints.wait()

    def load(self):
        return self.checkpoints.load_latest()


class Sharded:
    def __init__(self, folder):
        self.path = folder / "sharded"

    def parts_of(self, number):
        """Return a state of which each rank has a part; the whole of it where there is no job."""
        if DistributedManager.find() is None:
            return {"number": number, "tensor": tensor_of(number)}
        mesh = init_device_mesh("cpu", (2,))
        tensor = dtensors.distribute_tensor(tensor_of(number), mesh, [dtensors.Shard(0)])
        return {"number": number, "tensor": tensor}

    def save(self, number):
        save_sharded(self.parts_of(number), self.path, background=True).wait()

    def load(self):
        state = {"number": 0, "tensor": tensor_of(0)}
        load_sharded(state, self.path)
        return state


class NumberedSharded(Sharded):
    def __init__(self, folder):
        self.checkpoints = CheckpointFolder(folder / "sharded run", keep=2, sharded=True)

    def save(self, number):
        self.checkpoints.save(self.parts_of(number), number, is_best=number % 5 == 0)
        self.checkpoints.wait()

    def load(self):
        return self.checkpoints.load_latest({"number": 0, "tensor": tensor_of(0)})


def wait_until_alone():
    """Wait until this process has one thread: one that was joined may need a moment to be gone."""
    until = time.monotonic() + LIMIT
    while len(list(Path("/proc/self/task").iterdir())) > 1:
        assert time.monotonic() < until, "a thread stays: set OMP_NUM_THREADS=1"
        os.sched_yield()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def save_without_end(kind, number, rank, port, pipe):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    DistributedManager.initialize()
    while True:
        os.write(pipe, b"begun\n")
        kind.save(number)
        os.write(pipe, f"{number}\n".encode())
        number += 1


def start(kind, number, rank, port, pipe):
    child = os.fork()
    if child == 0:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as it lives
        save_without_end(kind, number, rank, port, pipe)
    return child


def end_of(child):
    """Return the exit code of a child, which must end in time."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    raise AssertionError(f"{child} has not ended {LIMIT:g} s after the other rank was killed")


@contextlib.contextmanager
def job_of_two(kind, number):
    """Children that save, and a file with what they say."""
    reading, writing = os.pipe()
    port = free_port()
    children = [start(kind, number, rank, port, writing) for rank in (0, 1)]
    os.close(writing)
    with os.fdopen(reading) as said:
        yield children, said


def seconds_of_two_saves(kind):
    """Return how long the first save of a job and the next take."""
    with job_of_two(kind, 1) as (children, said):
        began = time.monotonic()
        while said.readline() != "2\n":
            pass
        seconds = time.monotonic() - began
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return seconds


def kill_some(kind, number, victims, delay):
    """Return the last number of which a rank had said that it was saved when some were killed, by their ranks."""
    with job_of_two(kind, number) as (children, said):
        lines = [said.readline(), said.readline()]
        time.sleep(delay)
        for victim in victims:
            os.kill(children[victim], signal.SIGKILL)
        codes = [end_of(child) for child in children]
        lines += said
    survived = [code for rank, code in enumerate(codes) if rank not in victims]
    assert all(code > 0 for code in survived), codes
    return max((int(line) for line in lines if line != "begun\n"), default=number - 1)


def whole(kind, announced):
    """Return the number that was saved last."""
    state = kind.load()
    assert torch.equal(state["tensor"], tensor_of(state["number"]))
    assert state["number"] >= announced, (state["number"], announced)
    return state["number"]


def main(folder, num_kills, seed=0):
    folder.mkdir()
    generator = random.Random(seed)  # noqa: S311 - no secret
    ways = Whole(folder), Numbered(folder), Sharded(folder), NumberedSharded(folder)
    for kind in ways:
        longest = seconds_of_two_saves(kind)
        number, num_torn = whole(kind, 2), 0
        for victims in itertools.islice(itertools.cycle(([0], [1], [0, 1])), num_kills // len(ways)):
            wait_until_alone()
            announced = kill_some(kind, number + 1, victims, generator.uniform(0, longest))
            num_torn += any(folder.rglob(".*.tmp"))
            number = whole(kind, announced)
        kind.save(number + 1)
        assert whole(kind, number + 1) == number + 1
        left = [path for path in folder.rglob(".*") if path.name != ".metadata"]
        assert left == [], left
        sys.stdout.write(f"{type(kind).__name__} saved {number}, {num_torn} of {num_kills // len(ways)} left traces\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(int, sys.argv[3:]))
