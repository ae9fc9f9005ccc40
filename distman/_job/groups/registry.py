"""The named groups of a job: planned as partitions, agreed by all ranks, made and ended by their members."""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distman._base.log import logger
from distman._coordination import protocol
from distman._coordination.consensus import Consensus
from distman._coordination.joint_blocks import JointBlocks
from distman._coordination.sections import ExclusiveSections
from distman._coordination.tracking import CallNumbers, call_site, check_all_run_here, check_speaks_for_rank
from distman._coordination.wait_scope import WaitScope
from distman._job.device import is_pure_gloo
from distman._job.job import Job
from distman._job.meeting.peers import grouped
from distman._job.shutdown import end_groups
from distman._store.connection import GaveUpError
from distman._store.torch_store import AbortableStore, TorchStore
from distman._torch_internals import (
    default_store,
    device_types,
    is_registered,
    make_gloo_default,
    make_group,
    mesh_without_groups,
)
from distman.errors import DistmanError, UndefinedGroupError, _undefined_group
from distman.topology import READY_MADE, GridPartition, ListedPartition, Partition, Plan, check_new_names


def partitions_by_host(job: Job) -> dict[str, Partition]:
    """Return the partitions of ``"node"`` and ``"leaders"``; none where not all ranks are known."""
    if len(job.roll_call) < job.world_size:
        return {}
    nodes = sorted(map(tuple, grouped((peer.node_rank, peer.rank) for peer in job.roll_call).values()))
    others = [(rank,) for ranks in nodes for rank in ranks[1:]]
    leaders = tuple(ranks[0] for ranks in nodes)
    return {"node": ListedPartition(tuple(nodes)), "leaders": ListedPartition((leaders, *others))}


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


@dataclass(frozen=True)
class Group:
    """A group that this rank is a member of."""

    name: str  # empty for a group that other code made
    ranks: tuple[int, ...]  # its members' ranks in the world, ascending
    rank: int  # this rank's index among them
    reference: Callable[[], dist.ProcessGroup | None]  # weak: torch owns it; its connections close when torch lets go
    neighbours: frozenset[int]  # the ranks of this host, this one included; none where not all ranks are known
    device_types: tuple[str, ...] = ()  # types of devices whose tensors it carries; empty without a process group
    consensus: Consensus | None = None  # of its members over the store; None, like the next two, where nobody else is
    sections: ExclusiveSections | None = None  # what some of its members do while the others wait
    joint_blocks: JointBlocks | None = None  # what its members do together, and fail in together
    calls: Iterator[int] = field(default_factory=itertools.count)  # of collectives, where ranks compare their calls
    exchanges: CallNumbers = field(default_factory=CallNumbers)  # numbers of the exchanges of messages
    seals: Iterator[int] = field(default_factory=itertools.count)  # numbers of the next calls that exchange pickles
    store: dist.Store | None = None  # under the process group: if it is written in Python, it must live as long
    transports: dict[torch.device, Any] = field(default_factory=dict, compare=False)  # by the device of the messages

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """What carries its collectives; None on one process without a process group."""
        return self.reference()

    @property
    def size(self) -> int:
        return len(self.ranks)


def process_group_of(group: Group) -> dist.ProcessGroup | None:
    """Return what carries the collectives of a group; None on one process without a process group."""
    # It raises if that was destroyed: torch would take None for the world.
    process_group = group.process_group
    if process_group is None and group.size > 1:
        raise DistmanError(
            f"group {group.name!r} of ranks {list(group.ranks)} must exist as long as it is used, backward passes "
            "included, got one that was destroyed. Run them first."
        )
    return process_group


class Groups:
    """The groups of one job, by name."""

    # ``"node"`` (the ranks of this host) and ``"leaders"`` (the first rank of each host) are there from the start, and
    # made by their members at their first use.

    def __init__(self, job: Job) -> None:
        self._job = job
        self._partitions: dict[str, Partition] = {}
        self._made: dict[str, Group] = {}
        self._seen: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
        self._companions: dict[str, list[str]] = {}
        self._numbers = itertools.count()
        self._uses: Mapping[tuple[str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)
        self._world_names = {"world"}
        self._world_partition = GridPartition.whole(job.world_size)
        self._ready_made = partitions_by_host(job)  # not at the first use, which torch.compile may trace
        here = self._ready_made["node"].block_of(job.peer.rank) if self._ready_made else ()
        self._neighbours = frozenset(here)
        self.world = self._group("world", tuple(range(job.world_size)), dist.group.WORLD if job.backend else None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._made)

    def get(self, name: str) -> Group:
        """Return a group by its name; a ready-made group is made by its members at its first use."""
        if name in self._made:
            return self._alive(self._made[name])
        if name in self._world_names:
            return self._alive(self.world)
        ranks = self.ranks(name)
        if self._job.peer.rank not in ranks:
            raise ValueError(
                f"group {name!r} must be asked for by its members, ranks {list(ranks)}, got rank "
                f"{self._job.peer.rank}. Ask only there."
            )
        with WaitScope(f"group({name!r})"):
            check_all_run_here(ranks)
            use = next(self._uses[name, ranks])
            key = f"{name} {hashlib.sha256(str(ranks).encode()).hexdigest()[:16]} {use}"
            step = protocol.first_use(key)
            consensus = self._consensus(ranks, self._job.limits.rendezvous)
            if consensus is not None and len(ranks) > 1:
                consensus.require_success(step, None)
            self._made[name] = self._make(name, ranks, key, self._members_store(protocol.failure_of(step)))
            return self._made[name]

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks in the world of the group of that name that this rank belongs to."""
        # ``"leaders"`` gives the same ranks everywhere.
        if name == "leaders":
            return tuple(block[0] for block in self.partition("node").blocks())
        return self.partition(name).block_of(self._job.peer.rank)

    def partition(self, name: str | None) -> Partition:
        """Return the partition of the world behind a name; None is the world in one block."""
        if name is None or name in self._world_names:
            return self._world_partition
        if name in self._ready_made:
            return self._ready_made[name]
        if name in READY_MADE:
            raise DistmanError("all ranks must be known to say which of them share a host. Start without a fake group.")
        if not isinstance(name, str):
            raise TypeError(f"name must be that of a group, got {name!r}. Pass a string, such as 'world'.")
        if name not in self._partitions:
            known = {*self._partitions, *self._world_names, *READY_MADE}
            raise _undefined_group(name, known, "the name of a group")
        return self._partitions[name]

    def name_of(self, process_group: dist.ProcessGroup | None) -> str:
        """Return the name of a process group; the world's own name is ``"world"``."""
        if process_group is None or process_group is dist.group.WORLD:
            return "world"
        for name, group in self._made.items():
            if group.process_group is process_group:
                return name
        if not isinstance(process_group, dist.ProcessGroup):
            raise UndefinedGroupError(
                f"group must be a process group that the manager made, got {process_group!r}. Pass what "
                "group() returned."
            )
        raise _undefined_group(process_group.group_name, self._made, "a group that the manager made")

    def of(self, process_group: dist.ProcessGroup) -> Group:
        if process_group is self.world.process_group:
            return self._alive(self.world)
        for made in self._made.values():
            if made.process_group is process_group:
                return self._alive(made)
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"group must be a process group of which rank {self._job.peer.rank} is a member, a name or None, got "
                f"{process_group!r}. Call only on its members."
            )
        if not is_registered(process_group):
            raise _destroyed("the process group")
        if process_group not in self._seen:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            self._seen[process_group] = self._group("", ranks, process_group)
        return self._seen[process_group]

    def _alive(self, group: Group) -> Group:
        """Return a group that torch still has; other code may have destroyed it."""
        if self._job.backend is not None and not torch.compiler.is_compiling():
            process_group = group.process_group
            if process_group is None or not is_registered(process_group):
                raise _destroyed(f"group {group.name!r}")
        return group

    @functools.cached_property
    def node_sections(self) -> ExclusiveSections | None:
        """What some ranks of this host do while its others wait; None on a host of one rank."""
        ranks = self.ranks("node")
        if self._job.rendezvous is None or len(ranks) == 1:
            return None
        store = self._job.rendezvous.store.part(protocol.node(ranks[0]))
        store_group = self._job.store_group(ranks, store)
        return ExclusiveSections(store_group) if store_group is not None else None

    @functools.cached_property
    def by_local_rank(self) -> dict[int, list[int]]:
        """The ranks that have each local rank, one of each host that has it."""
        return grouped((peer.local_rank, peer.rank) for peer in self._job.roll_call)

    def plan_only(self, name: str, partition: Partition) -> None:
        """Give a partition a name; its groups are made by their members when they are first used."""
        # All ranks must do it alike.
        self._check_new([name])
        self._partitions[name] = partition

    def create(
        self,
        make_plan: Callable[[], Plan],
        *,
        world_name: str = "world",
        verbose: bool = False,
        place_matters: bool = True,
    ) -> None:
        # What ``make_plan`` raises is shown to the other ranks too, and raised on all ranks alike. ``place_matters``
        # warns where a group that would fit on a host crosses hosts.
        with WaitScope("group creation"):
            check_all_run_here(range(self._job.world_size))
            consensus = self._consensus(range(self._job.world_size), self._job.limits.rendezvous)
            number = next(self._numbers)
            plan = self._agree(make_plan, world_name, consensus, protocol.groups(number))
            made, error = self._make_all(plan, number)
            try:
                if consensus is not None:
                    consensus.require_success(protocol.groups_made(number), error)
                elif error is not None:
                    raise error
            except BaseException:  # Ctrl-C too: no group stays without the others
                self._end(made.values(), aborts=True)
                raise
        self._partitions |= plan.partitions | plan.later
        self._companions |= {name: list(plan.later) for name in plan.partitions if plan.later}
        self._made |= made
        self._world_names.add(world_name)
        if place_matters:
            warn_of_crossing(self._job, {name: group.ranks for name, group in made.items()})
        if verbose and self._job.peer.rank == 0:
            logger.info("process groups\n%s", plan)

    def _agree(self, make_plan: Callable[[], Plan], world_name: str, consensus: Consensus | None, key: str) -> Plan:
        """Return the plan that all ranks have; a rank that cannot make one tells the others why."""
        plan = Plan({})
        problem: Exception | None = None
        try:
            plan = make_plan()
            self._check_new([*plan.partitions, *plan.later, *({world_name} - self._world_names)])
        except Exception as error:  # noqa: BLE001 - it is shown to all ranks, and raised
            problem = error
        if consensus is not None:
            # Axes of length 1, and the name of a tree's root, show in no partition.
            axes = " x ".join(f"{name}={length}" for name, length in plan.axes.items())
            whole = [f"{world_name}: {axes}"] if axes or world_name != "world" else []
            digest, text = f"{plan.digest} {world_name}", "\n".join([*whole, str(plan)])
            if problem is not None:
                digest, text = str(problem), f"an error: {problem}"
            consensus.agree(key, digest, f"{text}\nat {call_site()}")
        if problem is not None:
            raise problem
        return plan

    def destroy(self, name: str) -> None:
        # Every member does it, when none of its collectives is under way.
        check_speaks_for_rank("destroy_group()")
        self.partition(name)
        if name in self._world_names:
            raise ValueError(f"the group to destroy must not be the world, got {name!r}. Call cleanup() for that.")
        if name in self._made:
            self._end([self._made.pop(name)], aborts=False)
        self._partitions.pop(name, None)
        for companion in self._companions.pop(name, []):
            if companion in self._partitions:
                self.destroy(companion)

    def close(self, *, aborts: bool = False) -> None:
        self._end(self._made.values(), aborts=aborts)
        self._made.clear()

    def _end(self, groups: Iterable[Group], *, aborts: bool) -> None:
        made = [group.process_group for group in groups]
        there = [one for one in made if one is not None and is_registered(one)]  # other code may have been faster
        end_groups(there, self._job.device, aborts=aborts)

    def device_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Return torch's mesh over groups that were created, one per axis."""
        ranks = torch.arange(self._job.world_size, dtype=torch.int).reshape(shape)
        groups = [self.get(name).process_group for name in names]
        members = [group for group in groups if group is not None]
        device_type = self._job.device.type
        if not members:
            return mesh_without_groups(device_type, ranks, names)
        return DeviceMesh.from_group(members, device_type, mesh=ranks, mesh_dim_names=names)

    def over_axes(self, dims: Mapping[str, int], names: Sequence[str]) -> str:
        """Return the name of the groups over several axes of a mesh; it is given at the first call."""
        axes = sorted(list(dims).index(name) for name in names)
        partition = GridPartition.of(list(dims.values()), axes)
        name = "*".join(list(dims)[axis] for axis in axes)
        if name not in self._partitions:
            self.plan_only(name, partition)
            for axis in axes:  # it goes with each of them: another mesh may have axes of these names
                self._companions.setdefault(list(dims)[axis], []).append(name)
        return name

    def _consensus(self, ranks: Sequence[int], timeout: float, store: TorchStore | None = None) -> Consensus | None:
        store_group = self._job.store_group(ranks, store)
        return Consensus(store_group, timeout) if store_group is not None else None

    def _check_new(self, names: Iterable[str]) -> None:
        check_new_names(names, {*self._partitions, *self._world_names, *READY_MADE})

    def _make_all(self, plan: Plan, number: int) -> tuple[dict[str, Group], Exception | None]:
        made: dict[str, Group] = {}
        store = self._members_store(protocol.failure_of(protocol.groups_made(number)))
        try:
            for name, partition in plan.partitions.items():
                ranks = partition.block_of(self._job.peer.rank)
                made[name] = self._make(name, ranks, f"{number} {name} {ranks[0]}", store)
        except GaveUpError:
            return made, None
        except Exception as error:  # noqa: BLE001 - it is told to all ranks, and raised there
            return made, error
        return made, None

    def _make(self, name: str, ranks: tuple[int, ...], key: str, store: dist.Store | None) -> Group:
        job = self._job
        if job.backend is None:
            return self._group(name, ranks, None)
        process_group = make_group(
            ranks,
            ranks.index(job.peer.rank),
            name=f"distman/{key}",
            description=name,
            store=store,
            timeout=timedelta(seconds=job.limits.collective),
        )
        if is_pure_gloo(dist.get_backend()):
            make_gloo_default(process_group)
        return replace(self._group(name, ranks, process_group), store=store)

    def _members_store(self, failure_key: str) -> dist.Store | None:
        """Return the store over which members of a new group find each other; None on one process."""
        # Over gloo alone they wait there no longer than the rendezvous may take, or until the key is set. Other
        # backends use the store from threads of their own, which must not call into Python.
        job = self._job
        if job.backend is None:
            return None
        if job.rendezvous is None:
            return default_store()
        store = job.rendezvous.store
        return AbortableStore(store, failure_key, job.limits.rendezvous) if is_pure_gloo(job.backend) else store

    def _group(self, name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None) -> Group:
        consensus = None
        if process_group is not None and len(ranks) > 1 and self._job.rendezvous is not None:
            store = self._job.rendezvous.store.part(protocol.group(process_group.group_name))
            consensus = self._consensus(ranks, self._job.limits.collective, store)
        types = device_types(process_group) if process_group is not None else ()
        reference = weakref.ref(process_group) if process_group is not None else lambda: None
        return Group(
            name,
            ranks,
            ranks.index(self._job.peer.rank),
            reference,
            self._neighbours,
            tuple(sorted(types)),
            consensus,
            ExclusiveSections(consensus.store_group) if consensus is not None else None,
            JointBlocks(consensus.store_group) if consensus is not None else None,
        )


def _destroyed(what: str) -> UndefinedGroupError:
    return UndefinedGroupError(f"{what} must be there to be used, got one that was destroyed. Make it again.")
