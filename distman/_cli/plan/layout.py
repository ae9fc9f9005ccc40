"""The groups that a job of some size would make: as a value, and as text."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from distman._cli.output import shorten_ranks
from distman.topology import (
    READY_MADE,
    Partition,
    Plan,
    ProcessGroupConfig,
    ProcessGroupNode,
    check_new_names,
    mesh_plan,
    resolve_mesh_shape,
    tree_plan,
)

_SHOWN_RUNS = 4  # runs of ranks in a line; a line of a terminal holds no more


@dataclasses.dataclass(frozen=True)
class Spread:
    """Over how many nodes the groups of a name extend."""

    num_groups: int
    num_on_one_node: int
    min_nodes: int  # of a group that extends over fewest
    max_nodes: int  # of a group that extends over most

    @classmethod
    def of(cls, partition: Partition, ranks_per_node: int) -> Spread:
        counts = Counter(len({rank // ranks_per_node for rank in block}) for block in partition.blocks())
        return cls(partition.num_blocks, counts[1], min(counts), max(counts))


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
        return {name: Spread.of(groups, self.ranks_per_node) for name, groups in self.plan.partitions.items()}

    def warnings(self) -> list[str]:
        """Return what is wrong with the plan although it fits: an innermost axis that crosses nodes."""
        outer, per_node = {name: size for name, size in self.axes.items() if size > 1}, self.ranks_per_node
        if per_node is None or len(outer) < 2:
            return []
        innermost, size = outer.popitem()
        if self.spreads[innermost].max_nodes == 1:
            return []
        fitting = [name for name, length in outer.items() if per_node % length == 0]
        if size < per_node:
            remedy = f"Start a multiple of {size} ranks on each node, or choose a length that divides {per_node}."
        elif fitting:
            remedy = f"Put {fitting[-1]!r} last, whose groups fit into a node."
        else:
            remedy = f"Choose a length that divides {per_node}, so that the axis with most messages stays within nodes."
        problem = f"the innermost axis {innermost!r} crosses nodes: its groups have {size} ranks, a node has {per_node}"
        return [f"{problem}. {remedy}"]


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


def shorten(ranks: Sequence[int]) -> str:
    return shorten_ranks(ranks, most=_SHOWN_RUNS)


def where(spread: Spread, group_size: int) -> str:
    """Return a phrase that says whether groups stay on one node."""
    each = "each " if spread.num_groups > 1 else ""
    if spread.max_nodes == 1:
        return f"{each}within one node"
    nodes = "-".join(map(str, sorted({max(spread.min_nodes, 2), spread.max_nodes})))
    if spread.num_on_one_node:
        others = spread.num_groups - spread.num_on_one_node
        return f"{spread.num_on_one_node} within one node, {others} across {nodes} nodes"
    return f"{each}across {nodes} nodes" + (", one rank on each" if spread.min_nodes == group_size else "")
