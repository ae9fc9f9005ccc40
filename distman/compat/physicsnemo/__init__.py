"""What ``physicsnemo.distributed`` is to its users: the same modules, names, orders of arguments and defaults.

Change ``physicsnemo.distributed`` to ``distman.compat.physicsnemo`` in an import, or call :func:`install` first and
leave the import as it is. What a name does is said where distman has it, see the page on moving; what differs from that
is said here, beside the name.
"""

from __future__ import annotations

from distman.compat.physicsnemo._install import install
from distman.compat.physicsnemo.autograd import all_gather_v, gather_v, indexed_all_to_all_v, scatter_v
from distman.compat.physicsnemo.config import ProcessGroupConfig, ProcessGroupNode
from distman.compat.physicsnemo.fused_all_reduce import fused_all_reduce
from distman.compat.physicsnemo.manager import (
    DistributedManager,
    PhysicsNeMoUndefinedGroupError,
    PhysicsNeMoUninitializedDistributedManagerWarning,
)
from distman.compat.physicsnemo.utils import mark_module_as_shared, reduce_loss, unmark_module_as_shared

__all__ = [
    "DistributedManager",
    "PhysicsNeMoUndefinedGroupError",
    "PhysicsNeMoUninitializedDistributedManagerWarning",
    "ProcessGroupConfig",
    "ProcessGroupNode",
    "all_gather_v",
    "fused_all_reduce",
    "gather_v",
    "indexed_all_to_all_v",
    "install",
    "mark_module_as_shared",
    "reduce_loss",
    "scatter_v",
    "unmark_module_as_shared",
]
