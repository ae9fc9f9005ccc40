"""Which ranks form which groups, as arithmetic: no torch, no communication."""

from __future__ import annotations

from distman.topology._partition import (
    READY_MADE as READY_MADE,
    GridPartition as GridPartition,
    ListedPartition as ListedPartition,
    Partition,
    Plan,
    check_new_names as check_new_names,
    is_whole_number as is_whole_number,
    mesh_plan,
    resolve_mesh_shape as resolve_mesh_shape,
    split_sizes,
    tree_plan,
)

# What is imported as itself is for other parts of the package.
from distman.topology._tree import NotationError, ProcessGroupConfig, ProcessGroupNode, parse_mesh, parse_tree

__all__ = [
    "NotationError",
    "Partition",
    "Plan",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "mesh_plan",
    "parse_mesh",
    "parse_tree",
    "split_sizes",
    "tree_plan",
]
