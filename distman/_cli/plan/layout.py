"""The groups that a job of some size would make, as a value."""

from __future__ import annotations

import dataclasses
import functools

from distman.topology import (
    Plan,
    ProcessGroupConfig,
    ProcessGroupNode,
    Spread,
    mesh_plan,
    spread_over_nodes,
    tree_plan,
)
from distman.topology._plan import READY_MADE, check_new_names, resolve_mesh_shape


@dataclasses.dataclass(frozen=True)
class Layout:
    world_size: int
    config: ProcessGroupConfig  # with the sizes of all nodes; the axes of a mesh are the leaves below "world"
    plan: Plan
    ranks_per_node: int | None = None  # None where it does not matter

    @property
    def axes(self) -> dict[str, int]:
        """Lengths of the axes by name; the last one varies fastest with the rank."""
        return {name: self.group_size(name) for name in self.config.leaf_groups() if name in self.plan.partitions}

    @property
    def num_nodes(self) -> int | None:
        """Number of nodes; None where it is not known how many ranks are on each."""
        return None if self.ranks_per_node is None else -(-self.world_size // self.ranks_per_node)

    def group_size(self, name: str) -> int:
        return self.world_size // self.plan.partitions[name].num_blocks

    @functools.cached_property
    def spreads(self) -> dict[str, Spread]:
        """Over how many nodes the groups extend, by name; empty where that is not known."""
        if self.ranks_per_node is None:
            return {}
        return {name: spread_over_nodes(groups, self.ranks_per_node) for name, groups in self.plan.partitions.items()}

    def warnings(self) -> list[str]:
        """Return what is wrong with the plan although it fits: an innermost axis that crosses nodes."""
        axes, per_node = {name: size for name, size in self.axes.items() if size > 1}, self.ranks_per_node
        if per_node is None or len(axes) < 2:
            return []
        innermost, size = axes.popitem()
        if self.spreads[innermost].is_on_one_node:
            return []
        problem = f"the innermost axis {innermost!r} crosses nodes: its groups have {size} ranks, a node has {per_node}"
        return [f"{problem}. {_remedy(axes, size, per_node)}"]


def _remedy(outer_axes: dict[str, int], size: int, per_node: int) -> str:
    if size < per_node:
        return f"Start a multiple of {size} ranks on each node, or choose a length that divides {per_node}."
    fitting = [name for name, length in outer_axes.items() if per_node % length == 0]
    if fitting:
        return f"Put {fitting[-1]!r} last, whose groups fit into a node."
    return f"Choose a length that divides {per_node}, so that the axis with most messages stays within nodes."


def lay_out_tree(config: ProcessGroupConfig, world_size: int, ranks_per_node: int | None = None) -> Layout:
    """Return what ``create_groups_from_config`` makes of a tree, whose inner nodes get their sizes."""
    plan = tree_plan(config, world_size)
    check_new_names([config.root.name], READY_MADE)
    check_new_names(plan.partitions, (*READY_MADE, "world"))
    if not plan.partitions:
        config.root.size = world_size
    config.update_parent_sizes()
    return Layout(world_size, config, plan, ranks_per_node)


def lay_out_mesh(axes: dict[str, int], world_size: int, ranks_per_node: int | None = None) -> Layout:
    """Return what ``initialize_mesh`` makes of axes, one of which may be -1."""
    names, shape = tuple(axes), tuple(axes.values())
    plan = mesh_plan(shape, names, world_size)
    check_new_names(names, (*READY_MADE, "world"))
    config = ProcessGroupConfig(ProcessGroupNode("world", world_size))
    for name, length in zip(names, resolve_mesh_shape(shape, names, world_size), strict=True):
        config.add_node(ProcessGroupNode(name, length), "world")
    return Layout(world_size, config, plan, ranks_per_node)
