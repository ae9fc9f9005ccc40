"""Which ranks take part in a job, as values: what each says of itself when it comes, and what follows from that."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from distman._base.text import Line, listed
from distman._job.device import pick_index

_MAX_LISTED = 16  # entries of a list in a message: two lines of a terminal
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

OWN_PORT = "If these are two jobs, give each its own MASTER_PORT or DISTMAN_JOB_ID."
OWN_RANK = f"Give each process its own rank. {OWN_PORT}"

COMMON = {
    "world_size": f"Start all ranks with one command. {OWN_PORT}",
    "backend": "Let all ranks see the same kind of device, and ask for the same backend.",
    "distman": "Install one version of distman on all hosts.",
    "torch": "Install one version of torch on all hosts.",
}
"""What all ranks of a job must have in common, and what to do where they have not."""


@dataclasses.dataclass(frozen=True)
class JoinRecord:
    """What a rank says of itself when it arrives; ``None`` where its launcher is silent."""

    rank: int
    world_size: int  # the number of ranks it believes in
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    host: Line
    boot_id: Line  # what tells that host from others of the same name; empty where the system does not show it
    pid: int
    launcher: Line
    backend: Line  # of the process group that it is about to make
    device_type: Line  # type of device it computes on
    device: Line | None  # the device that the program asked for; None leaves the choice to the rank's place
    visible: tuple[Line, ...]  # UUIDs of the devices it sees, in the order of their indices; empty for the CPU
    has_own_devices: bool  # whether the launcher says that no other rank sees these devices
    is_sharing_allowed: bool  # whether it accepts to share its GPU with other ranks
    torch: Line
    distman: Line
    # Where two processes claim one rank, these tell them apart; the ranks of a job may differ in them.
    started: float  # in seconds of time.time
    command: Line  # the program and its arguments

    def __post_init__(self) -> None:
        """Refuse what no process can say of itself: it is of another process, perhaps of another program."""
        places = (self.rank, self.local_rank, self.node_rank)
        sizes = (self.world_size, self.local_world_size, self.num_nodes)
        if any((place or 0) < 0 for place in places) or any((1 if size is None else size) < 1 for size in sizes):
            raise ValueError(f"ranks must be 0 or more and their numbers 1 or more, got {places} of {sizes}")

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def machine(self) -> tuple[str, str]:
        """Its host: machines may all be called localhost, and containers of one machine have names of their own."""
        return self.host, self.boot_id

    @property
    def common(self) -> tuple[Hashable, ...]:
        """The values of what all ranks of a job must have in common, in the order of :data:`COMMON`."""
        return self.world_size, self.backend, self.distman, ".".join(self.torch.split(".")[:2])


def describe_claim(claim: JoinRecord) -> str:
    """Return which process claims a rank, such as ``pid 812 on n1 (train.py --lr 1, started 12:00:07)``."""
    started = time.strftime("%H:%M:%S", time.localtime(claim.started))
    return f"pid {claim.pid} on {claim.host} ({claim.command}, started {started})"


@dataclasses.dataclass(frozen=True)
class Peer:
    """One rank of the job, as all ranks know it.

    Attributes:
        rank: Its rank.
        local_rank: Its index on its host.
        local_world_size: Number of ranks on its host.
        node_rank: Index of its host.
        num_nodes: Number of hosts.
        host: Name of its host.
        boot_id: What tells that host from others of the same name; empty where the system does not show it.
        pid: Its process id there.
        device: The device it computes on, such as ``"cuda:0"``.
        device_uuid: That device's UUID; empty for the CPU.
        launcher: The launcher that started it.
        torch: Version of torch.
        distman: Version of distman.

    Example on two ranks:
        >>> [(peer.rank, peer.local_rank, peer.device) for peer in manager.roll_call]
        [(0, 0, 'cpu'), (1, 1, 'cpu')]
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    host: Line
    boot_id: Line
    pid: int
    device: Line
    device_uuid: Line
    launcher: Line
    torch: Line
    distman: Line

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def machine(self) -> tuple[str, str]:
        """Its host, as in its join record."""
        return self.host, self.boot_id


def find_faults(arrived: Sequence[JoinRecord], world_size: int) -> list[str]:
    """Return a sentence for each thing that keeps these ranks from being one job, but for missing ranks."""
    # ``arrived`` is in the order of arrival.
    by_rank = grouped((join_record.rank, join_record) for join_record in arrived)
    faults = [
        f"rank {rank} must be one process, got {len(claims)}: {_listed(map(describe_claim, claims))}. {OWN_RANK}"
        for rank, claims in sorted(by_rank.items())
        if len(claims) > 1
    ]
    for index, (name, remedy) in enumerate(COMMON.items()):
        faults += _unlike(name, [(join_record.common[index], join_record) for join_record in arrived], remedy)
    if not faults and len(by_rank) == world_size:
        faults += _device_faults(arrived)
    return faults


def describe_missing(arrived: Iterable[JoinRecord], world_size: int, expected: Mapping[int, str]) -> str:
    """Return which ranks are missing, such as ``rank 2 (expected on n2)``; an empty text if none are."""
    missing = sorted(set(range(world_size)) - {join_record.rank for join_record in arrived})
    places = (f"{rank} (expected on {expected[rank]})" if rank in expected else f"{rank}" for rank in missing)
    return f"rank{'s' * (len(missing) > 1)} {_listed(places)}" if missing else ""


def describe_present(arrived: Iterable[JoinRecord]) -> str:
    """Return which ranks have arrived, such as ``0 (n1, pid 812), 1 (n1, pid 813)``."""
    ranked = sorted(arrived, key=lambda join_record: join_record.rank)
    return _listed(f"{one.rank} ({one.host}, pid {one.pid})" for one in ranked)


def complete(arrived: Sequence[JoinRecord]) -> tuple[Peer, ...]:
    """Return the ranks of a job without faults, in rank order, with what the launcher did not say derived."""
    # Hosts are counted in the order of their first rank; so are ranks within a host.
    ranked = sorted(arrived, key=lambda join_record: join_record.rank)
    by_machine = grouped((join_record.machine, join_record) for join_record in ranked)
    node_ranks = {machine: index for index, machine in enumerate(by_machine)}
    places = _places_on_hosts(ranked)
    peers = []
    for join_record in ranked:
        neighbours = by_machine[join_record.machine]
        local_rank, local_world_size = places[join_record.rank]
        device, device_uuid = _device_of(
            join_record, *_place_at_devices(join_record, neighbours, local_rank, local_world_size)
        )
        peers.append(
            Peer(
                rank=join_record.rank,
                local_rank=local_rank,
                local_world_size=local_world_size,
                node_rank=_either(join_record.node_rank, node_ranks[join_record.machine]),
                num_nodes=_either(join_record.num_nodes, len(by_machine)),
                host=join_record.host,
                boot_id=join_record.boot_id,
                pid=join_record.pid,
                device=device,
                device_uuid=device_uuid,
                launcher=join_record.launcher,
                torch=join_record.torch,
                distman=join_record.distman,
            )
        )
    return tuple(peers)


def _places_on_hosts(ranked: Sequence[JoinRecord]) -> dict[int, tuple[int, int]]:
    """Return each rank's local rank and local world size: as it says, or, where two of a host say the same, counted."""
    # What starts the ranks of a host one by one, with a GPU for each, may tell every one that it is the first. Several
    # nodes of a launcher may be on one machine.
    places = {}
    for node in grouped(((one.machine, one.node_rank), one) for one in ranked).values():
        said = [_either(one.local_rank, place) for place, one in enumerate(node)]
        is_sound = len(set(said)) == len(node)
        for place, one in enumerate(node):
            size = _either(one.local_world_size, max(len(node), said[place] + 1))
            places[one.rank] = (said[place], size) if is_sound else (place, len(node))
    return places


def describe_recounted(arrived: Iterable[JoinRecord], peers: Sequence[Peer]) -> str:
    """Return whose local rank is not the one it says, such as ``0 for rank 1 (n1, pid 813)``; empty if nobody's is."""
    return _listed(
        f"{one.local_rank} for {one}"
        for one in sorted(arrived, key=lambda one: one.rank)
        if one.local_rank not in (None, peers[one.rank].local_rank)
    )


def _place_at_devices(
    me: JoinRecord, neighbours: Sequence[JoinRecord], local_rank: int, local_world_size: int
) -> tuple[int, int]:
    """Return the index of a rank among those of its host that see the same devices, and their number."""
    # They are all ranks of the host, unless the launcher has given each task, or some of them, devices of its own.
    if me.has_own_devices:
        return 0, 1
    mine = set(me.visible)
    if not mine:
        return local_rank, local_world_size
    sharers = [one.rank for one in neighbours if mine == set(one.visible)]
    is_apart = all(mine == set(one.visible) or mine.isdisjoint(one.visible) for one in neighbours)
    if not is_apart or len(sharers) == len(neighbours):
        return local_rank, local_world_size
    return sharers.index(me.rank), len(sharers)


def _device_of(join_record: JoinRecord, local_rank: int, local_world_size: int) -> tuple[str, str]:
    if join_record.device is not None:
        place = int(join_record.device.partition(":")[2] or 0)
        return join_record.device, join_record.visible[place] if 0 <= place < len(join_record.visible) else ""
    if not join_record.visible:
        return join_record.device_type, ""
    shared = join_record.is_sharing_allowed
    index = pick_index(len(join_record.visible), local_rank, local_world_size, shared=shared)
    return f"{join_record.device_type}:{index}", join_record.visible[index]


def _device_faults(arrived: Sequence[JoinRecord]) -> list[str]:
    try:
        peers = complete(arrived)
    except ValueError as error:
        return [str(error)]
    strict = {join_record.rank for join_record in arrived if not join_record.is_sharing_allowed}
    machines = {join_record.rank: join_record.machine for join_record in arrived}
    users = grouped(((machines[peer.rank], peer.device_uuid), peer) for peer in peers if peer.device_uuid)
    return [
        f"a GPU must serve one rank, got {uuid} on {host} for "
        f"{_listed(f'rank {peer.rank} (pid {peer.pid})' for peer in sharing)}. Give each rank its own GPU "
        "(srun --gpus-per-task=1), or set DISTMAN_ALLOW_SHARED_GPU=1."
        for ((host, _), uuid), sharing in users.items()
        if len(sharing) > 1 and any(peer.rank in strict for peer in sharing)
    ]


def _unlike(name: str, values: Iterable[tuple[Hashable, JoinRecord]], remedy: str) -> list[str]:
    holders = grouped(values)
    if len(holders) <= 1:
        return []
    found = "; ".join(f"{value} on {_listed(map(str, ranks))}" for value, ranks in holders.items())
    return [f"{name} must be the same on all ranks, got {found}. {remedy}"]


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return dict(groups)


def _listed(texts: Iterable[str]) -> str:
    return listed(texts, _MAX_LISTED)


def _either(given: int | None, derived: int) -> int:
    return derived if given is None else given
