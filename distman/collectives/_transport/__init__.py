"""How the pieces of a group's exchanges get from rank to rank: by its backend, or within a host."""

from __future__ import annotations

import torch

from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import collects_batches, gloo_timeout
from distman.collectives._transport._backend import (
    Transport,
    begin_all_reduce as begin_all_reduce,
    carried as carried,
    carrier_of as carrier_of,
)
from distman.collectives._transport._host import HostTransport
from distman.collectives._transport._segments import Segment as Segment, is_wanted


def transport_of(group: Group, device: torch.device) -> Transport:
    """Return what carries a group's tensors of a device, chosen once."""
    process_group = process_group_of(group)
    carrier = carrier_of(device, process_group)
    if carrier not in group.transports:
        made = Transport(group, carrier)
        if process_group is not None and carrier.type == "cpu" and not collects_batches(process_group, carrier):
            timeout = gloo_timeout(process_group)
            if timeout is not None and len(group.neighbours.intersection(group.ranks)) > 1:
                made = HostTransport(group, carrier, timeout)
        group.transports.setdefault(carrier, made)
    found: Transport = group.transports[carrier]
    return found


def reaches_all(group: Group, device: torch.device) -> bool:
    """Return whether all ranks of a group are of this host, and this one is to use its memory."""
    is_host = isinstance(transport_of(group, device), HostTransport)
    return is_host and is_wanted() and group.neighbours.issuperset(group.ranks)
