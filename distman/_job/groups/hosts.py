"""Which ranks share a host: the groups that every job has, and a warning for those that cross hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distman._base.log import logger
from distman._job.job import Job
from distman.topology import ListedPartition, Partition


def partitions_by_host(job: Job) -> dict[str, Partition]:
    """Return the partitions of ``"node"`` and ``"leaders"``; none where not all ranks are known."""
    if len(job.roll_call) < job.world_size:
        return {}
    ranks_of: dict[int, list[int]] = {}
    for peer in job.roll_call:
        ranks_of.setdefault(peer.node_rank, []).append(peer.rank)
    nodes = sorted(tuple(ranks) for ranks in ranks_of.values())
    others = [(rank,) for ranks in nodes for rank in ranks[1:]]
    leaders = tuple(ranks[0] for ranks in nodes)
    return {"node": ListedPartition(tuple(nodes)), "leaders": ListedPartition((leaders, *others))}


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks of this host, this one included; none where not all ranks are known. One object for each job."""

    ranks: frozenset[int]


def warn_of_crossing(job: Job, ranks_of: Mapping[str, tuple[int, ...]]) -> None:
    """Warn where a group crosses hosts though it would fit on one, and no group as large stays on one."""
    peers = job.roll_call
    if job.peer.num_nodes < 2:
        return
    crossing = {name: ranks for name, ranks in ranks_of.items() if len({peers[rank].node_rank for rank in ranks}) > 1}
    largest = max((len(ranks) for name, ranks in ranks_of.items() if name not in crossing), default=1)
    for name, ranks in crossing.items():
        room = max(peers[rank].local_world_size for rank in ranks)
        if largest < len(ranks) <= room and ranks[0] == job.peer.rank:
            logger.warning(
                "group %r would fit on one host, but its ranks %s are on several. Make it the last axis of the "
                "mesh, and start a multiple of %d ranks on each host.",
                name,
                list(ranks),
                len(ranks),
            )
