"""A test function and its arguments as bytes that a worker can read.

Test modules and conftests are pickled by value: a worker could not import them under ``--import-mode=importlib``.
Of their globals only those are sent that the function uses, directly or through what it calls.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import cloudpickle
import pytest

from distman._workers.pickling import ModulePickler

_OF_THE_PYTEST_PROCESS = """
    Cache CaptureFixture Config FixtureRequest LogCaptureFixture Pytester Subtests TempPathFactory TempdirFactory
    Testdir WarningsRecorder
"""
_RECORDS = "_pytest.junitxml"  # module of the functions that fixtures such as ``record_property`` are
_PROBLEMS = (pickle.PicklingError, TypeError, ValueError, AttributeError, RecursionError)
# The arguments of ``warnings.filterwarnings``.
_WarningFilter = tuple[str, str, type[Warning] | tuple[type[Warning], ...], str, int]


@dataclass(frozen=True)
class Call:
    function: Callable[..., object]
    arguments: dict[str, object]
    parameters: tuple[str, ...]  # those of ``rank`` and ``world_size`` that it takes
    filters: tuple[_WarningFilter, ...]  # of the pytest process, first one first


class UnpicklableError(TypeError):
    """The test, or an argument of it, cannot be pickled."""


def pack(
    function: Callable[..., object],
    arguments: Mapping[str, object],
    parameters: Sequence[str],
    modules: Iterable[ModuleType],
) -> bytes:
    """Return a ``Call`` as one pickle, so that what function and arguments share stays shared.

    Functions and classes of ``modules`` are pickled by value. What cannot be pickled is named by an UnpicklableError.
    """
    kinds = tuple(kind for name in _OF_THE_PYTEST_PROCESS.split() if (kind := getattr(pytest, name, None)))
    for name, value in arguments.items():
        if isinstance(value, kinds) or getattr(value, "__module__", "") == _RECORDS:
            raise UnpicklableError(
                f"The fixture {name!r} must stay in the pytest process, got it as an argument of @ranks. "
                "Use it in another fixture, or replace it by values."
            )
    with _by_value(modules):
        try:
            return _TestPickler.dumps(Call(function, dict(arguments), tuple(parameters), _current_filters()))
        except _PROBLEMS as error:
            raise UnpicklableError(_name_culprit(function, arguments, error)) from error


class _TestPickler(ModulePickler):
    """Leaves out what means nothing in a worker: marks, and patches made in the pytest process."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, pytest.Mark):
            return type(None), ()
        if isinstance(obj, pytest.MonkeyPatch):
            return pytest.MonkeyPatch, ()
        return super().reducer_override(obj)


def _current_filters() -> tuple[_WarningFilter, ...]:
    return tuple(
        (action, _as_pattern(message), category, _as_pattern(module), line)
        for action, message, category, module, line in warnings.filters
    )


def _as_pattern(part: str | re.Pattern[str] | None) -> str:
    """Return the regular expression of a filter's part: compiled, an exact text, or None for anything."""
    if part is None:
        return ""
    return rf"{re.escape(part)}\Z" if isinstance(part, str) else part.pattern


def _name_culprit(function: object, arguments: Mapping[str, object], error: Exception) -> str:
    for name, value in arguments.items():
        problem = _problem_of(value)
        if problem is not None:
            return (
                f"The argument {name!r} must be picklable to reach the workers of @ranks, "
                f"got {type(value).__name__} ({problem}). Make it in the test itself, or pass plain values."
            )
    problem = _problem_of(function) or error
    return (
        f"The test must be picklable with the globals it uses, got {type(problem).__name__}: {problem}. "
        "Make what cannot be pickled inside the test."
    )


def _problem_of(value: object) -> Exception | None:
    try:
        _TestPickler.dumps(value)
    except _PROBLEMS as error:
        return error
    return None


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    added = {module.__name__: module for module in modules}
    for name in cloudpickle.list_registry_pickle_by_value():
        added.pop(name, None)
    for module in added.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added.values():
            cloudpickle.unregister_pickle_by_value(module)
