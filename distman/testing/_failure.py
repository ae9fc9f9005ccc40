"""What pytest gets to see of a test that failed on the ranks: the report, as an exception of the type they raised."""

from __future__ import annotations

import bdb
import functools
import sys
from collections.abc import Iterable
from typing import Any

import pytest


def failure(report: str, types: Iterable[str], *, was_debugged: bool) -> BaseException:
    """Return an exception that pytest shows as the report, and that a mark like ``xfail(raises=...)`` knows.

    ``types`` are what all ranks raised that did not fail because of others, as ``module:name``. Where a rank was
    debugged there is nothing to debug for pytest, which would stop in this plugin.
    """
    known = next((known for known in map(_find, types) if known is not None), None)
    return _failure_of(known, was_debugged)(report)  # type: ignore[arg-type] # a type is hashable


def _find(name: str) -> type[Exception] | None:
    """Return the type of that name; None if this process does not know it, or if it has a meaning to pytest."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


@functools.cache
def _failure_of(known: type[Exception] | None, was_debugged: bool) -> type[BaseException]:  # noqa: FBT001 - a key
    """Return the type of a failure; one and the same for the same arguments, since Hypothesis tells failures by it."""
    debugged = [bdb.BdbQuit] if was_debugged else []
    bases = [pytest.fail.Exception, *debugged, *([known] if known is not None else [])]
    # The name is what pytest shows. The constructors of the bases may want other arguments.
    members = {"__module__": "builtins", "__init__": _set_report, "__str__": _with_notes}
    try:
        return type("Failed", tuple(bases), members)
    except TypeError:  # some types cannot be combined with others
        return type("Failed", tuple(bases[:-1]), members) if known is not None else pytest.fail.Exception


def _set_report(self: Any, report: str) -> None:
    self.args = (report,)
    self.msg = report
    self.pytrace = False


def _with_notes(self: Any) -> str:
    """Return the report, and what Hypothesis says about the example."""
    return "\n".join([self.msg, *(f"\n{note}" for note in getattr(self, "__notes__", []))])
