"""Test many ranks as one tests one: ``@ranks(2, 4)`` on a normal pytest function.

The pytest plugin comes with the package: nothing needs to be configured. Importing this package starts
nothing and imports neither torch nor pytest; its names are loaded when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distman.testing._environments import fake_environment
    from distman.testing._marks import kill_rank, ranks

__all__ = ["fake_environment", "kill_rank", "ranks"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "_environments" if name == "fake_environment" else "_marks"
    return getattr(import_module(f"distman.testing.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
