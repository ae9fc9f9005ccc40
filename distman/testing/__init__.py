"""Test many ranks as one tests one: ``@ranks(2, 4)`` on a normal pytest function.

The pytest plugin comes with the package: nothing needs to be configured. Importing this package starts
nothing and imports neither torch nor pytest; its names are loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distman.testing._environments import fake_environment
    from distman.testing._faults import kill_rank
    from distman.testing._marks import ranks

__all__ = ["fake_environment", "kill_rank", "ranks"]

_HOMES = {"fake_environment": "_environments", "kill_rank": "_faults", "ranks": "_marks"}  # only the marks need pytest


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"distman.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
