"""Who talks to whom, as arithmetic: no torch, no communication."""

from __future__ import annotations

from distman.topology._notation import NotationError, parse_mesh, parse_tree
from distman.topology._partition import GridPartition, ListedPartition, Partition, split_sizes
from distman.topology._plan import Plan, mesh_plan, tree_plan
from distman.topology._spread import Spread, spread_over_nodes
from distman.topology._tree import ProcessGroupConfig, ProcessGroupNode

__all__ = [
    "GridPartition",
    "ListedPartition",
    "NotationError",
    "Partition",
    "Plan",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "Spread",
    "mesh_plan",
    "parse_mesh",
    "parse_tree",
    "split_sizes",
    "spread_over_nodes",
    "tree_plan",
]
