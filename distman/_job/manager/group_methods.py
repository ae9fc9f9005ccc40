"""How the manager makes groups and meshes, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distman._coordination.sections import ExclusiveSections
from distman._job.groups.registry import Group
from distman._job.manager.state import SharedState, instance_property
from distman.errors import UndefinedGroupError, _undefined_group
from distman.topology import Plan, ProcessGroupConfig, ProcessGroupNode, mesh_plan, resolve_mesh_shape, tree_plan


class GroupMethods(SharedState):
    """The part of :class:`distman.DistributedManager` that makes groups, and is asked about them."""

    @classmethod
    def create_process_subgroup(
        cls, name: str, size: int, group_name: str | None = None, verbose: bool = False
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

        Example on two ranks:
            >>> manager.create_process_subgroup("alone", 1)
            >>> all_gather_objects(manager.group_ranks("alone"))
            [(0,), (1,)]
        """
        groups = cls()._state.groups
        groups.create(lambda: Plan({name: groups.partition(group_name).split(size)}), verbose=verbose)

    @classmethod
    def create_orthogonal_process_group(
        cls, orthogonal_group_name: str, group_name: str, verbose: bool = False
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

        Example on two ranks:
            >>> manager.create_process_subgroup("model", 1)
            >>> manager.create_orthogonal_process_group("data", "model")
            >>> manager.group_ranks("data")
            (0, 1)
        """
        groups = cls()._state.groups
        groups.create(
            lambda: Plan({orthogonal_group_name: groups.partition(group_name).orthogonal()}),
            verbose=verbose,
            place_matters=False,
        )

    @classmethod
    def create_group_from_node(cls, node: ProcessGroupNode, parent: str | None = None, verbose: bool = False) -> str:
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

        Example on two ranks:
            >>> crossing = manager.create_group_from_node(ProcessGroupNode("model", size=1))
            >>> manager.group_size("model"), manager.group_size(crossing)
            (1, 2)
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
    def create_groups_from_config(cls, config: ProcessGroupConfig, verbose: bool = False) -> None:
        """Make the groups of all nodes of a tree; its root becomes a name of the world.

        Collective over all ranks of the job.

        Args:
            config: The tree, with its leaves' sizes.
            verbose: Log the ranks of each group on rank 0, at level INFO.

        Raises:
            ValueError: The tree does not fit the world, or a name is taken.
            DistmanError: See :meth:`create_process_subgroup`.

        Example on two ranks:
            >>> manager.create_groups_from_config(parse_tree("world(data=1, model(spatial=2, channel=1))"))
            >>> manager.group_ranks("model"), manager.group_size("channel")
            ((0, 1), 1)
        """
        if not isinstance(config, ProcessGroupConfig):
            raise TypeError(
                f"config must be a ProcessGroupConfig, got {config!r}. Make one, or call initialize_mesh()."
            )
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
            mesh_dim_names: Name of each axis, which is also the name of its group; a single one may be "world".

        Returns:
            The mesh, also found as :attr:`global_mesh`.

        Raises:
            ValueError: The mesh does not fit the world, there is one already, or a name is taken.
            DistmanError: See :meth:`create_process_subgroup`.

        Example on two ranks:
            >>> mesh = manager.initialize_mesh((-1, 1), ("data", "model"))
            >>> manager.mesh_dims
            {'data': 2, 'model': 1}
        """
        if self._state.mesh is not None:
            raise ValueError(f"a job must have one mesh, got {mesh_shape} beside {self._state.mesh}. Use global_mesh.")
        names = tuple(mesh_dim_names) if isinstance(mesh_dim_names, Iterable) else ()
        if names != ("world",):  # the group of that axis is there
            self._state.groups.create(lambda: mesh_plan(mesh_shape, mesh_dim_names, self._state.job.world_size))
        shape = resolve_mesh_shape(mesh_shape, names, self._state.job.world_size)
        self._state.mesh = self._state.groups.device_mesh(shape, names)
        self._state.mesh_dims = dict(zip(names, shape, strict=True))
        return self._state.mesh

    @instance_property
    def global_mesh(self) -> DeviceMesh | None:
        """The mesh that :meth:`initialize_mesh` made; None before."""
        return self._state.mesh

    @instance_property
    def mesh_dims(self) -> dict[str, int]:
        """Length of each axis of the mesh by its name; empty without a mesh."""
        return dict(self._state.mesh_dims)

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

        Example on two ranks:
            >>> whole = manager.initialize_mesh((2, 1), ("data", "model"))
            >>> manager.mesh("data").mesh.tolist()
            [0, 1]
        """
        names = [name] if isinstance(name, str) else list(() if name is None else name)
        for one in names:
            if one not in self.mesh_dims:
                raise _undefined_group(one, self.mesh_dims, "an axis of the mesh")
        if self._state.mesh is None:
            raise _undefined_group("the mesh", (), "there before it is used")
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

        Example on two ranks:
            >>> mesh = manager.initialize_mesh((2, 1), ("data", "model"))
            >>> manager.get_mesh_group(manager.mesh("data")).size()
            2
        """
        names = mesh.mesh_dim_names or ()
        for one in names:
            if one not in self.mesh_dims:
                raise _undefined_group(one, self.mesh_dims, "an axis of the mesh")
        if mesh == self._state.mesh:
            return self.group()
        several = len(names) > 1
        name = self._state.groups.over_axes(self.mesh_dims, names) if several else "".join(names)
        if not name or tuple(mesh.mesh.flatten().tolist()) != self.group_ranks(name):  # others name their axes alike
            raise UndefinedGroupError(
                f"mesh must be a part of this job's mesh, {self._state.mesh}, got {mesh} of ranks "
                f"{mesh.mesh.tolist()}. Pass global_mesh, or what mesh() returned; or take its own get_group()."
            )
        return self.group(name)

    @instance_property
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

        Example on two ranks:
            >>> total = torch.tensor(1.0)
            >>> torch.distributed.all_reduce(total, group=manager.group("node"))
            >>> total
            tensor(2.)
        """
        return self._group(name).process_group

    def group_size(self, name: str | None = None) -> int:
        """Return the number of ranks in this rank's group of that name.

        Local.

        Args:
            name: Name of the group; None or ``"world"`` is the world.

        Raises:
            UndefinedGroupError: There is no group of that name.

        Example on two ranks:
            >>> manager.group_size(), manager.group_size("node")
            (2, 2)
        """
        return len(self.group_ranks(name))

    def group_rank(self, name: str | None = None) -> int:
        """Return this rank's index in its group of that name.

        Local.

        Args:
            name: Name of the group; None or ``"world"`` is the world.

        Raises:
            UndefinedGroupError: There is no group of that name.
            ValueError: This rank is no member of it.

        Example on two ranks:
            >>> all_gather_objects(manager.group_rank("node"))
            [0, 1]
        """
        ranks = self.group_ranks(name)
        rank = self._state.job.peer.rank
        if rank not in ranks:
            raise ValueError(f"rank must be one of {list(ranks)} to be in group {name!r}, got {rank}. Ask only there.")
        return ranks.index(rank)

    def group_ranks(self, name: str | None = None) -> tuple[int, ...]:
        """Return the ranks in the world of this rank's group of that name, ascending.

        Local.

        Args:
            name: Name of the group; None or ``"world"`` is the world.

        Raises:
            UndefinedGroupError: There is no group of that name.

        Example on two ranks:
            >>> manager.group_ranks("node"), manager.group_ranks("leaders")
            ((0, 1), (0,))
        """
        return self._state.groups.ranks("world" if name is None else name)

    def group_name(self, group: dist.ProcessGroup | None = None) -> str:
        """Return the name of a process group.

        Local.

        Args:
            group: The group; None is the world.

        Raises:
            UndefinedGroupError: The manager did not make it.

        Example on two ranks:
            >>> manager.group_name(manager.group("node"))
            'node'
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

        Example on two ranks:
            >>> node = manager.resolve_group("node")
            >>> node.name, node.ranks, node.size
            ('node', (0, 1), 2)
        """
        return self._group(group) if group is None or isinstance(group, str) else self._state.groups.of(group)

    @instance_property
    def node_sections(self) -> ExclusiveSections | None:
        """What some ranks of this host do while its others wait; None where there is nobody to wait."""
        return self._state.groups.node_sections

    def ranks_with_local_rank(self, local_rank: int) -> list[int]:
        """Return the ranks that have this local rank, one of each host that has it.

        Local.

        Args:
            local_rank: Index of a rank on its host.

        Example on two ranks:
            >>> manager.ranks_with_local_rank(1)
            [1]
        """
        return self._state.groups.by_local_rank.get(local_rank, [])

    def destroy_group(self, name: str) -> None:
        """Destroy the groups of a name.

        Local. Every rank does it, when no collective of the group is under way. Without one of its axes the mesh is
        gone too; the groups of the other axes stay.

        Args:
            name: Name of the groups.

        Raises:
            UndefinedGroupError: There is no group of that name.

        Example on two ranks:
            >>> manager.create_process_subgroup("pair", 2)
            >>> manager.destroy_group("pair")
            >>> "pair" in manager.group_names
            False
        """
        self._state.groups.destroy(name)
        if name in self._state.mesh_dims:
            self._state.mesh, self._state.mesh_dims = None, {}

    def _group(self, name: str | None) -> Group:
        return self._state.groups.get("world" if name is None else name)
