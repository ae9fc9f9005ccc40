"""Saves a sharded state in the background; then one rank raises while the others wait for it.

Arguments: the path, and the rank that raises.
"""

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distman import DistributedManager
from distman.checkpoint import save_sharded

manager = DistributedManager.initialize()
full = torch.arange(3_000_000.0)
mesh = init_device_mesh("cpu", (manager.world_size,))
save_sharded({"tensor": distribute_tensor(full, mesh, [Shard(0)])}, sys.argv[1], background=True)
if manager.rank == int(sys.argv[2]):
    raise ValueError("the program fails")
manager.barrier()
