"""Fail on rank 1 while rank 0 waits for it: in a kernel of its GPU, if it has one of its own."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from distman import DistributedManager

manager = DistributedManager.initialize(backend="gloo" if os.environ.get("DISTMAN_ALLOW_SHARED_GPU") else None)
tensor = torch.ones(1000, device=manager.device)
dist.all_reduce(tensor)  # connects
tensor.sum().item()
sys.stdout.write(f"on {manager.device} over {dist.get_backend_config()}\n")
sys.stdout.flush()
manager.barrier()
if manager.rank != 1:
    dist.all_reduce(tensor)
    sys.exit(f"rank {manager.rank} went on with {tensor.sum().item()}")
time.sleep(1)  # in which the others enter the kernel
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("no more data")
