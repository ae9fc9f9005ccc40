"""The channels between members of a group on one host, about which they agree once: small messages go through them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._groups.registry import Group
from distman._host_channels import CAN_BE_USED, Channels, Introduction, keep_for
from distman._torch_internals import batch_isend_irecv, gloo_timeout
from distman.collectives._shared_memory import is_wanted, pool_of

_TAG = 2**31 - 2  # of the messages by which the members agree; those of collectives are drawn from as many numbers


@dataclasses.dataclass
class Agreement:
    """What the members of a process group have agreed on, once they have.

    Attributes:
        channels: Those to other members on this host; None where there are none.
        is_made: Whether they have.
        making: Held by the thread that does so for this rank.
    """

    channels: Channels | None = None
    is_made: bool = False
    making: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_in(process_group: dist.ProcessGroup) -> Agreement | None:
    """Return what the members of a group have agreed on; None where they have not yet."""
    agreement = _agreements.get(process_group)
    return agreement if agreement is not None and agreement.is_made else None


def agree(group: Group, process_group: dist.ProcessGroup) -> Agreement:
    """Agree with the other members of a group where each other's memory is: ranks of one host tell so over gloo.

    Collective. Blocking.
    """
    agreement = _agreements.setdefault(process_group, Agreement())
    with agreement.making:
        if not agreement.is_made:
            agreement.channels = _make_channels(group, process_group)
            agreement.is_made = True
    return agreement


def _make_channels(group: Group, process_group: dist.ProcessGroup) -> Channels | None:
    here = [rank for rank in range(group.size) if group.ranks[rank] in group.neighbours.ranks]
    others = [rank for rank in here if rank != group.rank]
    timeout = gloo_timeout(process_group)
    if not others or timeout is None:
        return None
    channels = _make(here, group, timeout)
    if channels is not None:
        keep_for(process_group, channels)  # what cuts this short closes them for those who have opened them already
    own = channels.introduction() if channels is not None else Introduction()
    found = _swap([own] * len(others), others, group, process_group)
    opened = [
        channels is not None and there[0] != 0 and channels.open(rank, Introduction(*there))
        for rank, there in zip(others, found, strict=True)
    ]
    answers = _swap([[int(one)] for one in opened], others, group, process_group)
    known = {rank for rank, mine, (its,) in zip(others, opened, answers, strict=True) if mine and its}
    has_all = len(known) == group.size - 1
    if len(here) == group.size:  # else nobody has all
        flags = _swap([[int(has_all)] for _ in others], others, group, process_group)
        has_all = has_all and all(flag for (flag,) in flags)
    if channels is not None:
        channels.seal(known, is_complete=has_all)
    return channels


def _make(here: Sequence[int], group: Group, timeout: float) -> Channels | None:
    """Return channels to open; None where this rank does without.

    Args:
        here: The members on this host, by rank in the group.
        group: The group.
        timeout: Seconds that a wait may take.
    """
    pool = pool_of(group)
    if not CAN_BE_USED or not is_wanted() or not pool.can_grow:
        return None
    try:
        return Channels(here, group.rank, timeout)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's for a mapping that fails
        pool.give_up(error)
        return None


def _swap(
    mine: Sequence[Sequence[int]], others: Sequence[int], group: Group, process_group: dist.ProcessGroup
) -> list[list[int]]:
    """Send a row of numbers to each of some members, and return what they send."""
    rows = torch.tensor(mine, dtype=torch.int64, device="cpu")
    received = torch.empty_like(rows)
    operations = [
        dist.P2POp(operation, row, group.ranks[rank], process_group, _TAG)
        for operation, full in ((dist.irecv, received), (dist.isend, rows))
        for rank, row in zip(others, full.unbind(), strict=True)
    ]
    for work in batch_isend_irecv(operations):
        work.wait()
    found: list[list[int]] = received.tolist()
    return found
