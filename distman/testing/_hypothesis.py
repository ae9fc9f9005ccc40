"""Examples that Hypothesis draws once, for all ranks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import pytest

from distman.testing._marks import GIVEN_IN_THE_WORKER, runnable

if TYPE_CHECKING:
    from distman.testing._marks import RanksSpec


class _OfEachRank:
    def __repr__(self) -> str:
        return "<each rank's own>"


def is_given(test: object) -> bool:
    return "hypothesis" in sys.modules and getattr(test, "is_hypothesis_test", False)


def draw(
    item: pytest.Function,
    arguments: Mapping[str, object],
    spec: RanksSpec,
    run: Callable[[Callable[..., object], dict[str, object]], None],
) -> None:
    """Let Hypothesis draw examples and shrink what fails, while each of them runs on the ranks."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.errors import UnsatisfiedAssumption

    wrapper = cast("Any", getattr(item.obj, "__func__", item.obj))
    test: FunctionType = wrapper.hypothesis.inner_test
    function = runnable(test)
    seen, own = inspect.signature(wrapper), inspect.signature(test)
    instance = next(iter(own.parameters)) if inspect.ismethod(item.obj) else None

    @functools.wraps(test)
    def example(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        values = own.bind(*args, **kwargs).arguments
        bound = function if instance is None else MethodType(function, values[instance])
        try:
            run(bound, {name: values[name] for name in values if name not in (*GIVEN_IN_THE_WORKER, instance)})
        except UnsatisfiedAssumption as error:
            raise UnsatisfiedAssumption(str(error)) from None  # with the attributes that Hypothesis reads

    of_each_rank = {name: _OfEachRank() for name in spec.parameters if name in own.parameters}
    before = wrapper._hypothesis_internal_use_settings
    checks = {*before.suppress_health_check, HealthCheck.differing_executors}  # each world size has its own instance
    # How long an example takes says more about the ranks than about the test, which has a timeout; which lines ran
    # here explains nothing.
    phases = [phase for phase in before.phases if phase is not Phase.explain]
    wrapper._hypothesis_internal_use_settings = settings(
        before, deadline=None, suppress_health_check=checks, phases=phases
    )
    wrapper.hypothesis.inner_test = example
    if of_each_rank:
        wrapper.__signature__ = spec.signature
    try:
        item.obj(**arguments, **of_each_rank)
    finally:
        wrapper.hypothesis.inner_test = test
        wrapper._hypothesis_internal_use_settings = before
        wrapper.__signature__ = seen
