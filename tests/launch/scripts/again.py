"""Start and leave the job three times in the same processes."""

import sys

import torch
import torch.distributed as dist

from distman import DistributedManager

for _ in range(3):
    manager = DistributedManager.initialize(rendezvous_timeout=20)
    total = torch.ones(1)
    dist.all_reduce(total)
    manager.barrier("round")
    DistributedManager.cleanup(barrier=True)
    sys.stdout.write(f"{total.item():.0f}\n")
