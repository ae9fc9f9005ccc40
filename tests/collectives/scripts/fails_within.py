"""Rank 1 fails in the middle of an exchange within a host, in the method of this name; what the others hear."""

import sys

import torch

from distman import DistributedManager
from distman.collectives import all_gather_v
from distman.collectives._transport._host import HostBatch
from distman.collectives._transport._segments import THRESHOLD
from distman.errors import JobFailed

manager = DistributedManager.initialize()
full = torch.ones(THRESHOLD)
all_gather_v(full)


def fail(*_, **__):
    raise ValueError("in the middle")


if manager.rank == 1:
    setattr(HostBatch, sys.argv[1], fail)
try:
    all_gather_v(full)
    manager.barrier()  # where rank 1 fails last, the others have all pieces
except JobFailed as error:
    sys.stdout.write(f"rank {manager.rank}: rank {error.rank} raised {error.error_type}: {error.error_text}\n")
    raise
