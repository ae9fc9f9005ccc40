"""Exchange large tensors, and say how many segments of shared memory this rank has written to for that."""

import sys

import torch

from distman import DistributedManager
from distman.collectives import all_gather_v, broadcast_data, fused_all_reduce, reduce_scatter_v
from distman.collectives._transport import HostTransport, transport_of
from distman.collectives._validation import resolve_group

NUMEL = 2**21 + 5

manager = DistributedManager.initialize()
rank, size = manager.rank, manager.world_size
assert all_gather_v(torch.full([NUMEL], float(rank)))[::NUMEL].tolist() == list(range(size))
assert reduce_scatter_v(torch.full([NUMEL * size], float(rank)), [NUMEL] * size).unique().item() == sum(range(size))
assert fused_all_reduce(torch.full([NUMEL], float(rank))).unique().item() == sum(range(size))
assert broadcast_data(torch.full([NUMEL], 7.0) if rank == size - 1 else None, src=size - 1).unique().item() == 7
transport = transport_of(resolve_group(None), torch.device("cpu"))
num_segments = len(transport.segments.made) if isinstance(transport, HostTransport) else 0
sys.stdout.write(f"rank {rank} of {size}: {'through memory' if num_segments else 'over sockets'}\n")
