"""Fail on rank 1 at the first attempt; at the second, finish."""

import os
import sys

import torch
import torch.distributed as dist

from distman import DistributedManager

manager = DistributedManager.initialize()
total = torch.ones(1)
dist.all_reduce(total)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and manager.rank == 1:
    raise ValueError("boom at the first attempt")
if attempt == "0":
    dist.all_reduce(total)
sys.stdout.write(f"rank {manager.rank} finished attempt {attempt} with {total.item():.0f}\n")
