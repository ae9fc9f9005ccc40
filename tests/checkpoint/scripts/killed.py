"""Children that save growing numbers without end are killed at random moments; what they leave is looked at.

They are forked from this process, which has imported torch and has no other threads.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from distman.checkpoint import CheckpointFolder, load, load_sharded, save, save_sharded

NUMEL = 20_000


def state_of(number):
    return {"number": number, "tensor": torch.full((NUMEL,), float(number))}


class Whole:
    def __init__(self, folder):
        self.path = folder / "state.pt"

    def save(self, number):
        save(state_of(number), self.path)

    def load(self):
        return load(self.path)


class Numbered:
    def __init__(self, folder):
        self.checkpoints = CheckpointFolder(folder / "run", keep=2)

    def save(self, number):
        self.checkpoints.save(state_of(number), number, is_best=number % 5 == 0)
        self.checkpoints.wait()

    def load(self):
        state = self.checkpoints.load_latest()
        found = sorted(self.checkpoints.path.glob("checkpoint-*.pt"))
        numbers = [whole(load(path)) for path in found]
        assert numbers == [int(path.stem.partition("-")[2]) for path in found]
        assert numbers[-1] == state["number"]
        best = whole(self.checkpoints.load_best())  # an older one, after a kill between the checkpoint and its link
        assert best % 5 == 0
        assert best <= state["number"]
        return state


class Sharded:
    def __init__(self, folder):
        self.path = folder / "sharded"

    def save(self, number):
        save_sharded(state_of(number), self.path)

    def load(self):
        state = state_of(0)
        load_sharded(state, self.path)
        return state


def whole(state):
    assert torch.equal(state["tensor"], state_of(state["number"])["tensor"])
    return state["number"]


def save_without_end(kind, number, pipe):
    while True:
        os.write(pipe, f"begun {number}\n".encode())
        kind.save(number)
        os.write(pipe, f"saved {number}\n".encode())
        number += 1


def kill_one(kind, number, delay):
    """Return the number that a child had said to be saved when it was killed, so many seconds after it had begun."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_without_end(kind, number, writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        first = said.readline()
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = [first, *said]
    return max((int(line.split()[1]) for line in lines if line.startswith("saved")), default=number - 1)


def seconds_of(kind):
    """Return how long a save takes; the first one also imports."""
    kind.save(0)
    began = time.monotonic()
    kind.save(0)
    return time.monotonic() - began


def main(folder, count):
    """Print for each way of saving how many were killed, and how many of them while they wrote."""
    folder.mkdir()
    generator = random.Random(0)  # noqa: S311 - no secret
    for kind in (Whole(folder), Numbered(folder), Sharded(folder)):
        longest = 3 * seconds_of(kind)
        number, num_torn, num_kills = 0, 0, count if not isinstance(kind, Sharded) else count // 2
        while len(list(Path("/proc/self/task").iterdir())) > 1:
            os.sched_yield()  # a thread that was joined may need a moment to be gone
        for _ in range(num_kills):
            announced = kill_one(kind, number + 1, generator.uniform(0, longest))
            num_torn += any(folder.rglob(".*.tmp"))
            number = whole(kind.load())
            assert number >= announced, (number, announced)
        kind.save(number + 1)
        assert len(list(folder.rglob("checkpoint-*.pt"))) <= 3  # two kept, and the best
        left = [path for path in folder.rglob(".*") if path.name != ".metadata"]
        assert left == [], left
        sys.stdout.write(f"{type(kind).__name__} saved {number}, {num_torn} of {num_kills} killed while writing\n")
        sys.stdout.flush()
