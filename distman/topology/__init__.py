"""Who talks to whom, as arithmetic: no torch, no communication."""

from __future__ import annotations

from distman.topology.partition import GridPartition, ListedPartition, Partition, split_sizes
from distman.topology.plan import Plan, mesh_plan, tree_plan
from distman.topology.tree import ProcessGroupConfig, ProcessGroupNode

__all__ = [
    "GridPartition",
    "ListedPartition",
    "Partition",
    "Plan",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "mesh_plan",
    "split_sizes",
    "tree_plan",
]
