"""Saves what each rank has, in the background; then one rank raises while the others wait for it.

Arguments: the path, and the rank that raises.
"""

import sys

import torch

from distman import DistributedManager
from distman.checkpoint import save_sharded

manager = DistributedManager.initialize()
own = torch.arange(1_500_000.0) + manager.rank
save_sharded({f"tensor of rank {manager.rank}": own}, sys.argv[1], background=True)
if manager.rank == int(sys.argv[2]):
    raise ValueError("the program fails")
manager.barrier()
