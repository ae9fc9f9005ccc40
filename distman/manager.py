"""The one object that knows where this process stands in its job."""

from __future__ import annotations

import atexit
import datetime
import math
import os
import random
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from distman import log
from distman.control import failure
from distman.control.barrier import wait_for_all
from distman.device import backend_for, pick_device
from distman.environments import LaunchEnvironment, detect
from distman.environments.base import read_flag
from distman.errors import NotInitializedError, undefined_group
from distman.groups import Group, Groups
from distman.job import DeviceWish, Job, Limits, adopt, leave, let_gloo_rest, start
from distman.rendezvous.peers import Peers
from distman.topology import Plan, ProcessGroupConfig, ProcessGroupNode, mesh_plan, tree_plan
from distman.topology.plan import resolve_mesh_shape

__all__ = ["DistributedManager", "initialize_ddp"]

_TIMEOUT = ("DISTMAN_TIMEOUT", 3600.0)
_RENDEZVOUS_TIMEOUT = ("DISTMAN_RENDEZVOUS_TIMEOUT", 300.0)
_FIND_UNUSED = "DDP_FIND_UNUSED_PARAMETERS"
_SINGLE = LaunchEnvironment("single", rank=0, world_size=1)


class DistributedManager:
    """Where this process stands in its job: the same state in every instance (Borg).

    Call :meth:`initialize` once, at the start of the script; make an instance wherever the answer is needed.

    Raises:
        NotInitializedError: Made before :meth:`initialize`, or after :meth:`cleanup`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    _job: Job
    _groups: Groups
    _mesh: DeviceMesh | None
    _broadcast_buffers: bool
    _find_unused_parameters: bool

    def __init__(self) -> None:
        self.__dict__ = type(self)._shared_state
        if "_job" not in self.__dict__:
            raise _not_initialized()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name in type(self).__annotations__:
            raise _not_initialized()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def initialize(
        cls,
        *,
        method: str | None = None,
        backend: str | None = None,
        device: str | torch.device | None = None,
        timeout: float | datetime.timedelta | None = None,
        rendezvous_timeout: float | datetime.timedelta | None = None,
        use_distributed: bool | None = None,
        seed: int | None = None,
    ) -> DistributedManager:
        """Find out who this process is, bring the job together, and return the manager.

        Collective. Writes nothing into ``os.environ`` and prints nothing. A second call warns and changes
        nothing; a call that failed leaves no trace and can be repeated. A default process group that other
        code made is adopted, and left in place by :meth:`cleanup`.

        Args:
            method: Name of the launcher to believe, any case; None asks
                ``DISTMAN_INITIALIZATION_METHOD``, then all launchers in turn (see :func:`distman.explain`).
            backend: Backend of the process group; None takes gloo for CPU tensors and the accelerator's own.
            device: Device of this rank; None picks one by the rank's place on its host.
            timeout: Seconds that a collective may take; None asks ``DISTMAN_TIMEOUT``, then takes 3,600.
            rendezvous_timeout: Seconds to wait for the other ranks; None asks
                ``DISTMAN_RENDEZVOUS_TIMEOUT``, then takes 300.
            use_distributed: True fails where no launcher speaks; False is one process whatever they say; None
                believes them.
            seed: Seeds Python, NumPy and torch with ``seed + rank``; None seeds nothing.

        Raises:
            LaunchEnvironmentError: Variables of the launcher are missing or contradict each other.
            RendezvousError: On every rank that arrived: ranks are missing, double, unlike or share a GPU, or
                the address is not reachable.
            RankFailedError: On every rank that arrived: another rank raised before it got here.
            ValueError: An argument, or the variable that stands for it, has no meaning.
        """
        if cls.is_initialized():
            log.logger.warning("DistributedManager is already initialized: this call changes nothing")
            return cls()
        limits = Limits(_seconds(timeout, *_TIMEOUT), _seconds(rendezvous_timeout, *_RENDEZVOUS_TIMEOUT))
        wish = DeviceWish.of(device)
        find_unused = read_flag(os.environ, _FIND_UNUSED)
        if dist.is_initialized():
            job = adopt(detect(os.environ, method).environment, wish, limits)
        else:
            job = start(_environment(method, use_distributed=use_distributed), backend, wish, limits)
        cls._shared_state.update(
            _job=job,
            _groups=Groups(job),
            _mesh=None,
            _broadcast_buffers=False,
            _find_unused_parameters=find_unused,
        )
        log.set_rank(job.peer.rank if job.backend else None, job.world_size)
        atexit.register(cls._cleanup_at_exit, os.getpid())
        if seed is not None:
            _seed_everything(seed + job.peer.rank)
        return cls()

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether :meth:`initialize` has succeeded and :meth:`cleanup` was not called since.

        Local.
        """
        return "_job" in cls._shared_state

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leave the job: destroy the process group that :meth:`initialize` made, and forget everything.

        Local; collective with ``barrier=True``. Done at the end of the program by itself; harmless where
        nothing is initialized.

        Args:
            barrier: Wait for the other ranks first.
        """
        if not cls.is_initialized():
            return
        job, groups = cls()._job, cls()._groups
        if barrier and job.backend:
            cls().barrier("cleanup")
        cls._shared_state.clear()
        atexit.unregister(cls._cleanup_at_exit)
        failure.set_reporter(None)
        log.set_rank(None)
        groups.close()
        leave(job)

    @classmethod
    def _cleanup_at_exit(cls, pid: int) -> None:
        """Clean up at the end of the program; after an uncaught exception, wait for nobody."""
        if os.getpid() != pid or not cls.is_initialized():
            return
        if failure.has_failed():
            let_gloo_rest()
        else:
            cls.cleanup()

    @property
    def rank(self) -> int:
        """Index of this process in the job."""
        return self._job.peer.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self._job.world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self._job.peer.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the job's processes on this host."""
        return self._job.peer.local_world_size

    @property
    def node_rank(self) -> int:
        """Index of this host among the job's hosts."""
        return self._job.peer.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of hosts in the job."""
        return self._job.peer.num_nodes

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._job.device

    @property
    def cuda(self) -> bool:
        """Whether this rank computes on a CUDA or ROCm device."""
        return self._job.device.type == "cuda"

    @property
    def distributed(self) -> bool:
        """Whether a process group is up, be it of one rank."""
        return self._job.backend is not None

    @property
    def backend(self) -> str | None:
        """Backend of the process group, such as ``"cpu:gloo"``; None where there is none."""
        return self._job.backend

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._job.peer.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0 of its host."""
        return self._job.peer.local_rank == 0

    @property
    def initialization_method(self) -> str:
        """Name of the launcher that was believed, such as ``"slurm"``."""
        return self._job.peer.launcher

    @property
    def roll_call(self) -> Peers:
        """Every rank of the job with its host, pid, device and versions, in rank order; the same on all ranks."""
        return self._job.roll_call

    @property
    def broadcast_buffers(self) -> bool:
        """Whether DDP broadcasts rank 0's buffers before each forward, not only once; False unless set."""
        return self._broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._broadcast_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """Whether DDP looks for unused parameters; first from ``DDP_FIND_UNUSED_PARAMETERS``."""
        return self._find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._find_unused_parameters = value

    @staticmethod
    def get_available_backend() -> str:
        """Return the backend that carries tensors of the accelerator that is here, ``"gloo"`` without one.

        Local.
        """
        return backend_for(pick_device()).rpartition(":")[2]

    def barrier(self, name: str | None = None, timeout: float | datetime.timedelta | None = None) -> None:
        """Wait until all ranks have come here.

        Collective. Blocking. It goes over the store, so it takes no part in the order of collectives; work
        already queued on a GPU is not waited for.

        Args:
            name: Name of the barrier for messages; ranks that wait at different names do not meet.
            timeout: Seconds to wait; None takes the timeout of collectives.

        Raises:
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them.
        """
        job = self._job
        if job.rendezvous is None:
            return
        key = f"barrier {next(job.barriers)}" + (f" {name!r}" if name else "")
        wait_for_all(
            job.rendezvous.store,
            key,
            rank=job.peer.rank,
            world_size=job.world_size,
            timeout=_seconds(timeout, "", job.limits.collective),
            describe=lambda rank: str(job.roll_call[rank]),
        )

    @classmethod
    def create_process_subgroup(
        cls,
        name: str,
        size: int,
        group_name: str | None = None,
        verbose: bool = False,
    ) -> None:
        """Make groups of consecutive ranks of a parent group.

        Collective over all ranks of the job, whatever the parent.

        Args:
            name: Name of the new groups; on each rank it stands for the one that holds it.
            size: Number of ranks in each; it divides the parent's size.
            group_name: Name of the parent; None is the world.
            verbose: Log the ranks of each group on rank 0.

        Raises:
            ValueError: The name is taken, or the size does not divide the parent's.
            UndefinedGroupError: There is no such parent.
            PlanMismatchError: On every rank: the ranks ask for different groups.
            RankFailedError: On every other rank: a rank could not make its group.
            BarrierTimeoutError: On every rank that came: some did not come in time.
        """
        groups = cls()._groups
        groups.create(lambda: Plan({name: groups.partition(group_name).split(size)}), verbose=verbose)

    @classmethod
    def create_orthogonal_process_group(
        cls,
        orthogonal_group_name: str,
        group_name: str,
        verbose: bool = False,
    ) -> None:
        """Make groups of the i-th members of all groups of a name.

        Collective over all ranks of the job.

        Args:
            orthogonal_group_name: Name of the new groups.
            group_name: Name of the groups that they cross.
            verbose: Log the ranks of each group on rank 0.

        Raises:
            ValueError: The name is taken, or the groups to cross differ in size.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        groups = cls()._groups
        groups.create(
            lambda: Plan({orthogonal_group_name: groups.partition(group_name).orthogonal()}),
            verbose=verbose,
            place_matters=False,
        )

    @classmethod
    def create_group_from_node(
        cls,
        node: ProcessGroupNode,
        parent: str | None = None,
        verbose: bool = False,
    ) -> str:
        """Make the groups of one node of a tree, and name those that are orthogonal to them.

        Collective over all ranks of the job.

        Args:
            node: The node, with its size.
            parent: Name of the parent group; None is the world.
            verbose: Log the ranks of each group on rank 0.

        Returns:
            The name of the orthogonal groups, the parent for a sibling; they are made when first used.

        Raises:
            ValueError: The node has no size, or see :meth:`create_process_subgroup`.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        if node.size is None:
            raise ValueError(
                f"node {node.name!r} must have a size. Set it, or call set_leaf_group_sizes() on its tree."
            )
        cls.create_process_subgroup(node.name, node.size, parent, verbose)
        orthogonal = f"__orthogonal_to_{node.name}"
        groups = cls()._groups
        groups.plan_only(orthogonal, groups.partition(node.name).orthogonal())
        return orthogonal

    @classmethod
    def create_groups_from_config(
        cls,
        config: ProcessGroupConfig,
        verbose: bool = False,
    ) -> None:
        """Make the groups of all nodes of a tree; its root becomes a name of the world.

        Collective over all ranks of the job.

        Args:
            config: The tree, with its leaves' sizes.
            verbose: Log the ranks of each group on rank 0.

        Raises:
            ValueError: The tree does not fit the world, or a name is taken.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        manager = cls()
        manager._groups.create(
            lambda: tree_plan(config, manager.world_size), world_name=config.root.name, verbose=verbose
        )

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Make a mesh of all ranks and a group for each of its axes.

        Collective over all ranks of the job.

        Args:
            mesh_shape: Length of each axis; one may be -1 and takes what the others leave. Ranks lie row by row:
                the last axis varies fastest.
            mesh_dim_names: Name of each axis, which is also the name of its group.

        Returns:
            The mesh, also found as :attr:`global_mesh`.

        Raises:
            ValueError: The mesh does not fit the world, there is one already, or a name is taken.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        if self._mesh is not None:
            raise ValueError(f"a job must have one mesh, got {tuple(mesh_shape)} beside {self._mesh}. Use global_mesh.")
        names = tuple(mesh_dim_names)
        self._groups.create(lambda: mesh_plan(mesh_shape, names, self.world_size))
        shape = resolve_mesh_shape(mesh_shape, names, self.world_size)
        self._mesh = self._groups.device_mesh(shape, names)
        return self._mesh

    @property
    def global_mesh(self) -> DeviceMesh | None:
        """The mesh that :meth:`initialize_mesh` made; None before."""
        return self._mesh

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Length of each axis of the mesh by its name; empty without a mesh."""
        if self._mesh is None:
            return {}
        return dict(zip(self._mesh.mesh_dim_names or (), self._mesh.mesh.shape, strict=True))

    def mesh_names(self) -> tuple[str, ...]:
        """Return the names of the mesh's axes.

        Local.
        """
        return tuple(self.mesh_dims)

    def mesh_sizes(self) -> tuple[int, ...]:
        """Return the lengths of the mesh's axes.

        Local.
        """
        return tuple(self.mesh_dims.values())

    def mesh(self, name: str | Sequence[str] | None = None) -> DeviceMesh:
        """Return the part of the mesh along one axis, or several, that holds this rank.

        Local.

        Args:
            name: Name of an axis, or names of several; None is the whole mesh.

        Raises:
            UndefinedGroupError: There is no mesh, or no axis of that name.
            ValueError: The axes are not in the order of the mesh.
        """
        names = [name] if isinstance(name, str) else list(name or ())
        for one in names:
            if one not in self.mesh_dims:
                raise undefined_group(one, self.mesh_dims, "an axis of the mesh")
        if self._mesh is None:
            raise undefined_group("the mesh", (), "there before it is used")
        if names != [axis for axis in self.mesh_dims if axis in names]:
            raise ValueError(
                f"name must list axes in the order of the mesh, {self.mesh_names()}, got {names}. Reorder them."
            )
        if not names:
            return self._mesh
        if not self.distributed:  # torch cannot slice a mesh without a process group
            return self._groups.device_mesh((1,) * len(names), tuple(names))
        return self._mesh[tuple(names)]

    def get_mesh_group(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """Return the process group of all ranks of a mesh.

        Local for the whole mesh and one axis; for a part along several axes collective over the ranks of that
        part, at the first use.

        Args:
            mesh: :attr:`global_mesh`, or a part that :meth:`mesh` returned.

        Returns:
            The group; None on one process without a process group.

        Raises:
            UndefinedGroupError: The mesh is no part of this job's mesh.
        """
        names = mesh.mesh_dim_names or ()
        for one in names:
            if one not in self.mesh_dims:
                raise undefined_group(one, self.mesh_dims, "an axis of the mesh")
        if mesh == self._mesh:
            return self.group()
        return self.group(names[0] if len(names) == 1 else self._groups.over_axes(self.mesh_dims, names))

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups that this rank has made or used, in that order."""
        return self._groups.names

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """Return this rank's process group of that name.

        Local; ``"node"`` (the ranks of this host) and ``"leaders"`` (the first rank of each host) are made by
        their members at their first use.

        Args:
            name: The name; None or ``"world"`` is the world.

        Returns:
            The group; None on one process without a process group.

        Raises:
            UndefinedGroupError: There is no group of that name.
            ValueError: This rank is no member of it.
        """
        return self._group(name).process_group

    def group_size(self, name: str | None = None) -> int:
        """Return the number of ranks in this rank's group of that name.

        Local.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        return len(self.group_ranks(name))

    def group_rank(self, name: str | None = None) -> int:
        """Return this rank's index in its group of that name.

        Local.

        Raises:
            UndefinedGroupError: There is no group of that name.
            ValueError: This rank is no member of it.
        """
        ranks = self.group_ranks(name)
        if self.rank not in ranks:
            raise ValueError(
                f"rank must be one of {list(ranks)} to have a place in {name!r}, got {self.rank}. Ask only there."
            )
        return ranks.index(self.rank)

    def group_ranks(self, name: str | None = None) -> tuple[int, ...]:
        """Return the ranks in the world of this rank's group of that name, ascending.

        Local.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        return self._groups.ranks(name or "world")

    def group_name(self, group: dist.ProcessGroup | None = None) -> str:
        """Return the name of a process group.

        Local.

        Raises:
            UndefinedGroupError: The manager did not make it.
        """
        return self._groups.name_of(group)

    def resolve_group(self, group: dist.ProcessGroup | str | None = None) -> Group:
        """Return what is known of a group: its ranks, this rank's place in it, and what carries its messages.

        Local, with the exception of :meth:`group`.

        Args:
            group: A process group, the name of one, or None for the world.

        Raises:
            UndefinedGroupError: There is no group of that name.
            ValueError: This rank is no member of it.
        """
        return self._group(group) if group is None or isinstance(group, str) else self._groups.of(group)

    def destroy_group(self, name: str) -> None:
        """Destroy the groups of a name.

        Local. Every rank does it, when no collective of the group is under way.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        self._groups.destroy(name)

    def _group(self, name: str | None) -> Group:
        return self._groups.world if name is None else self._groups.get(name)

    def wrap_ddp(self, module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """Return the module as a DistributedDataParallel on this rank's device, or unchanged on one process.

        Collective. The module must already be on :attr:`device`.

        Args:
            module: The model.
            kwargs: Options of DistributedDataParallel; they go before the manager's own.
        """
        if self.world_size == 1:
            return module
        options: dict[str, Any] = {"find_unused_parameters": self.find_unused_parameters}
        if "broadcast_buffers" not in kwargs:
            options["forward_sync_buffers"] = self.broadcast_buffers
        if not self.cuda:
            return DistributedDataParallel(module, **{**options, **kwargs})
        options |= {"device_ids": [self.device.index], "output_device": self.device}
        side_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side_stream):
            wrapped = DistributedDataParallel(module, **{**options, **kwargs})
        torch.cuda.current_stream(self.device).wait_stream(side_stream)
        return wrapped

    def __str__(self) -> str:
        peer = self._job.peer
        return (
            f"DistributedManager(rank {peer.rank} of {self.world_size}, local rank {peer.local_rank} of "
            f"{peer.local_world_size} on {peer.host}, node {peer.node_rank} of {peer.num_nodes}, "
            f"{self.device}, {self.backend or 'no process group'}, {peer.launcher})"
        )

    __repr__ = __str__


def initialize_ddp(
    timeout: datetime.timedelta | None = None,
) -> tuple[bool, int, int, int, torch.device] | None:
    """Initialize the manager, and return what it found; None where it is initialized already.

    Collective.

    Args:
        timeout: Limit of a collective; None takes 60 minutes.

    Returns:
        ``(distributed, rank, local_rank, world_size, device)``, or None.

    Raises:
        DistmanError: See :meth:`DistributedManager.initialize`.
    """
    if DistributedManager.is_initialized():
        return None
    manager = DistributedManager.initialize(timeout=timeout)
    return manager.distributed, manager.rank, manager.local_rank, manager.world_size, manager.device


def _environment(method: str | None, *, use_distributed: bool | None) -> LaunchEnvironment:
    if use_distributed is False:
        return _SINGLE
    detection = detect(os.environ, method)
    for sentence in detection.warnings:
        log.logger.warning(sentence)
    if use_distributed:
        detection.require_launcher()
    return detection.environment


def _seconds(value: float | datetime.timedelta | None, variable: str, default: float) -> float:
    """Return a limit in seconds: the argument, else the variable, else the default."""
    source = "the call"
    if value is None and os.environ.get(variable):
        value, source = _number(os.environ[variable]), variable
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if seconds is None:
        return default
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"a timeout must be a positive number of seconds, got {value} from {source}. Correct it.")
    return float(seconds)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        "DistributedManager must be initialized before it is asked. Call DistributedManager.initialize() "
        "once at the start of the script."
    )
