"""How the manager makes groups and meshes."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from distman._job.manager.state import SharedState
from distman.topology import Plan, ProcessGroupConfig, ProcessGroupNode, mesh_plan, resolve_mesh_shape, tree_plan


class GroupCreation(SharedState):
    """The part of :class:`distman.DistributedManager` that makes groups."""

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

        Example on two ranks:
            >>> manager.create_process_subgroup("alone", 1)
            >>> all_gather_objects(manager.group_ranks("alone"))
            [(0,), (1,)]
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
            raise ValueError(
                f"a job must have one mesh, got {tuple(mesh_shape)} beside {self._state.mesh}. Use global_mesh."
            )
        names = tuple(mesh_dim_names)
        if names != ("world",):  # the group of that axis is there
            self._state.groups.create(lambda: mesh_plan(mesh_shape, mesh_dim_names, self._state.job.world_size))
        shape = resolve_mesh_shape(mesh_shape, names, self._state.job.world_size)
        self._state.mesh = self._state.groups.device_mesh(shape, names)
        self._state.mesh_dims = dict(zip(names, shape, strict=True))
        return self._state.mesh
