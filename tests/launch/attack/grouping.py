"""A rank of a job that makes a group; one rank is late, until strangers have come to the listeners of all others."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from distman import DistributedManager
from distman._job.groups import registry

FOLDER, COUNT, PLACE, LATE = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
PAUSE = 0.01  # seconds between two looks


def is_late(function):
    """Let strangers come first, as where the scheduler lets this process wait."""

    def late(*arguments, **options):
        num_ranks = int(os.environ["WORLD_SIZE"])
        while num_chased() < num_ranks - 1:
            time.sleep(PAUSE)
        return function(*arguments, **options)

    return late


def num_chased():
    """Return at how many listeners strangers have been."""
    return len(COUNT.read_text()) if COUNT.exists() else 0


if os.environ["RANK"] == LATE and PLACE == "start":
    dist.init_process_group = is_late(dist.init_process_group)
manager = DistributedManager.initialize(timeout=60)
(FOLDER / f"up {manager.rank}").touch()
while not COUNT.exists():
    time.sleep(PAUSE)
if os.environ["RANK"] == LATE and PLACE == "group":
    registry.Groups._make = is_late(registry.Groups._make)
manager.create_process_subgroup("g", manager.world_size)
total = torch.ones(1)
dist.all_reduce(total, group=manager.group("g"))
assert total.item() == manager.world_size
