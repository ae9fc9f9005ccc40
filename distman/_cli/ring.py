"""The ring of all ranks, in which each one has a rank before it and one behind it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distman.manager import DistributedManager


def pass_on(sent: torch.Tensor, received: torch.Tensor, manager: DistributedManager) -> None:
    """Send a tensor to the next rank, and receive that of the one before, of the same shape and type. Collective."""
    following, preceding = ((manager.rank + step) % manager.world_size for step in (1, -1))
    send, receive = dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, preceding)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
