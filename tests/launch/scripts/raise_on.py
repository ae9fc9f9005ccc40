"""Raise on one rank, before or after the start of the job: ``WHEN RANK``. It says so first."""

import os
import sys

from distman import DistributedManager, environments


def fail(rank: int) -> None:
    sys.stdout.write(f"rank {rank} raises\n")
    sys.stdout.flush()
    raise ValueError(f"boom on rank {rank}")


when, failing_rank = sys.argv[1], int(sys.argv[2])
rank = environments.detect(os.environ).environment.rank

import torch  # noqa: E402 - it takes its time, which is not the failure's
import torch.distributed as dist  # noqa: E402

if when == "before" and rank == failing_rank:
    fail(rank)
manager = DistributedManager.initialize(rendezvous_timeout=120)  # longer than the test waits
value = torch.ones(4)
for step in range(100_000):
    dist.all_reduce(value.fill_(1))
    if step == 20 and manager.rank == failing_rank:
        fail(rank)
