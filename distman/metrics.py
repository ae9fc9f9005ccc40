"""Numbers about a job as a whole."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distman.collectives import debug
from distman.collectives.border import GroupLike, check_member, resolve_group
from distman.collectives.exchange import control_device
from distman.control.collective import collective
from distman.manager import DistributedManager

__all__ = ["reduce_loss"]


@collective
def reduce_loss(
    loss: float | torch.Tensor, dst_rank: int = 0, mean: bool = True, *, group: GroupLike = None
) -> float | None:
    """Return the mean, or the sum, of all ranks' losses on one rank.

    Collective. Blocking. Not differentiable. In double precision.

    Args:
        loss: This rank's loss, a number or a tensor with one element.
        dst_rank: The rank in the group that gets the result.
        mean: Divide by the number of ranks.
        group: A process group, the name of one, or None for the world.

    Returns:
        The result on ``dst_rank``; None elsewhere.

    Raises:
        ValueError: The group has no rank ``dst_rank``.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    members = resolve_group(group)
    debug.compare("reduce_loss", members, dst_rank=dst_rank, mean=mean)
    check_member("dst_rank", dst_rank, members)
    if isinstance(loss, torch.Tensor) and loss.numel() != 1:
        raise ValueError(f"loss must be one number, got a tensor of shape {tuple(loss.shape)}. Take its mean.")
    device = control_device(members, DistributedManager().device)
    total = torch.tensor(float(loss), dtype=torch.float64, device=device)
    if members.size > 1:
        dist.reduce(total, group=members.process_group, group_dst=dst_rank)
    if members.rank != dst_rank:
        return None
    return total.item() / members.size if mean else total.item()
