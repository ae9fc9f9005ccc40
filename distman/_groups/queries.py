"""What the manager says of groups and meshes, and how they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distman._coordination.monitor.watcher import Watcher
from distman._coordination.preemption import StopAgreement
from distman._coordination.sections import ExclusiveSections
from distman._groups.registry import Group, Groups
from distman._job.job import Job
from distman.errors import undefined_group
from distman.topology import Plan, ProcessGroupConfig, ProcessGroupNode, mesh_plan, tree_plan
from distman.topology._plan import resolve_mesh_shape


@dataclasses.dataclass
class ManagerState:
    """All that :class:`distman.DistributedManager` keeps, from ``initialize()`` to ``cleanup()``.

    Attributes:
        job: The job.
        groups: Its groups.
        watcher: Watches the other ranks; None where there are none, or they are not watched.
        stop: Lets all ranks stop at the same step.
        find_unused_parameters: Whether DDP looks for unused parameters.
        broadcast_buffers: Whether DDP broadcasts rank 0's buffers before each forward.
        mesh: The mesh of all ranks; None before there is one.
    """

    job: Job
    groups: Groups
    watcher: Watcher | None
    stop: StopAgreement
    find_unused_parameters: bool
    broadcast_buffers: bool = False
    mesh: DeviceMesh | None = None


class GroupQueries:
    """The part of :class:`distman.DistributedManager` that is about groups.

    It is a base class since its methods are the manager's own for users: behind an object that the manager asks, each
    of the twenty would stand, with its docstring, in two places.
    """

    _state: ManagerState

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
            verbose: Log the ranks of each group on rank 0, at level INFO.

        Raises:
            ValueError: The name is taken, or the size does not divide the parent's.
            UndefinedGroupError: There is no such parent.
            PlanMismatchError: On every rank: the ranks ask for different groups.
            RankFailedError: On every other rank: a rank could not make its group.
            BarrierTimeoutError: On every rank that came: some did not come in time.
        """
        groups = cls()._state.groups
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
            verbose: Log the ranks of each group on rank 0, at level INFO.

        Raises:
            ValueError: The name is taken, or the groups to cross differ in size.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        groups = cls()._state.groups
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
            verbose: Log the ranks of each group on rank 0, at level INFO.

        Returns:
            The name of the groups orthogonal to it inside the parent, themselves the parent for a sibling; they are
            made when first used.

        Raises:
            ValueError: The node has no size, or see :meth:`create_process_subgroup`.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        groups = cls()._state.groups
        orthogonal = f"__orthogonal_to_{node.name}"

        def make_plan() -> Plan:
            if node.size is None:
                raise ValueError(
                    f"node {node.name!r} must have a size, got None. Call set_leaf_group_sizes() on its tree."
                )
            outer = groups.partition(parent)
            inner = outer.split(node.size)
            return Plan({node.name: inner}, {orthogonal: inner.orthogonal(outer)})

        groups.create(make_plan, verbose=verbose)
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
            verbose: Log the ranks of each group on rank 0, at level INFO.

        Raises:
            ValueError: The tree does not fit the world, or a name is taken.
            DistmanError: See :meth:`create_process_subgroup`.
        """
        manager = cls()
        manager._state.groups.create(
            lambda: tree_plan(config, manager._state.job.world_size), world_name=config.root.name, verbose=verbose
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
        if self._state.mesh is not None:
            raise ValueError(
                f"a job must have one mesh, got {tuple(mesh_shape)} beside {self._state.mesh}. Use global_mesh."
            )
        names = tuple(mesh_dim_names)
        self._state.groups.create(lambda: mesh_plan(mesh_shape, names, self._state.job.world_size))
        shape = resolve_mesh_shape(mesh_shape, names, self._state.job.world_size)
        self._state.mesh = self._state.groups.device_mesh(shape, names)
        return self._state.mesh

    @property
    def global_mesh(self) -> DeviceMesh | None:
        """The mesh that :meth:`initialize_mesh` made; None before."""
        return self._state.mesh

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Length of each axis of the mesh by its name; empty without a mesh."""
        if self._state.mesh is None:
            return {}
        return dict(zip(self._state.mesh.mesh_dim_names or (), self._state.mesh.mesh.shape, strict=True))

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
        if self._state.mesh is None:
            raise undefined_group("the mesh", (), "there before it is used")
        if names != [axis for axis in self.mesh_dims if axis in names]:
            raise ValueError(
                f"name must list axes in the order of the mesh, {self.mesh_names()}, got {names}. Reorder them."
            )
        if not names:
            return self._state.mesh
        if self._state.job.backend is None:  # torch cannot slice a mesh without a process group
            return self._state.groups.device_mesh((1,) * len(names), tuple(names))
        return self._state.mesh[tuple(names)]

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
        if mesh == self._state.mesh:
            return self.group()
        return self.group(names[0] if len(names) == 1 else self._state.groups.over_axes(self.mesh_dims, names))

    @property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups that this rank has made or used, in that order."""
        return self._state.groups.names

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
        rank = self._state.job.peer.rank
        if rank not in ranks:
            raise ValueError(f"rank must be one of {list(ranks)} to be in group {name!r}, got {rank}. Ask only there.")
        return ranks.index(rank)

    def group_ranks(self, name: str | None = None) -> tuple[int, ...]:
        """Return the ranks in the world of this rank's group of that name, ascending.

        Local.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        return self._state.groups.ranks(name or "world")

    def group_name(self, group: dist.ProcessGroup | None = None) -> str:
        """Return the name of a process group.

        Local.

        Raises:
            UndefinedGroupError: The manager did not make it.
        """
        return self._state.groups.name_of(group)

    def resolve_group(self, group: dist.ProcessGroup | str | None = None) -> Group:
        """Return what is known of a group: its ranks, this rank's place in it, and what carries its messages.

        Local, with the exception of :meth:`group`.

        Args:
            group: A process group, the name of one, or None for the world.

        Raises:
            UndefinedGroupError: There is no group of that name.
            ValueError: This rank is no member of it.
        """
        return self._group(group) if group is None or isinstance(group, str) else self._state.groups.of(group)

    @property
    def node_sections(self) -> ExclusiveSections | None:
        """What some ranks of this host do while its others wait; None where there is nobody to wait."""
        return self._state.groups.node_sections

    def ranks_with_local_rank(self, local_rank: int) -> list[int]:
        """Return the ranks that have this local rank, one of each host that has it.

        Local.
        """
        return self._state.groups.by_local_rank.get(local_rank, [])

    def destroy_group(self, name: str) -> None:
        """Destroy the groups of a name.

        Local. Every rank does it, when no collective of the group is under way.

        Raises:
            UndefinedGroupError: There is no group of that name.
        """
        self._state.groups.destroy(name)

    def _group(self, name: str | None) -> Group:
        return self._state.groups.world if name is None else self._state.groups.get(name)
