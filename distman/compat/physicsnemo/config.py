"""``physicsnemo.distributed.config``."""

from __future__ import annotations

from distman.topology import ProcessGroupConfig, ProcessGroupNode

__all__ = ["ProcessGroupConfig", "ProcessGroupNode"]
