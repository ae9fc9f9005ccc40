"""Other libraries' names and calls over distman's: code that was written for them runs by changing its imports."""

from __future__ import annotations

from distman.compat import nnhandler, physicsnemo

__all__ = ["nnhandler", "physicsnemo"]
