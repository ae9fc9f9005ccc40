import functools
import inspect
import os
import signal

import pytest

import distman.testing
from distman.testing import kill_rank, ranks


def test_exports_are_complete():
    for name in distman.testing.__all__:
        assert getattr(distman.testing, name).__name__ == name
    assert set(distman.testing.__all__) <= set(dir(distman.testing))
    with pytest.raises(AttributeError, match="nothing"):
        distman.testing.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((), {}, ValueError, "at least one world size"),
        ((0,), {}, ValueError, "at least 1, got 0"),
        (("2",), {}, TypeError, "must be integers, got '2'"),
        ((True,), {}, TypeError, "must be integers, got True"),
        ((2, 2), {}, ValueError, "must differ"),
        ((2,), {"timeout": 0}, ValueError, "timeout must be a positive number of seconds, got 0"),
        ((2,), {"timeout": "5m"}, TypeError, "timeout must be a number of seconds or a timedelta, got '5m'"),
        ((2, 4), {"dies": [3]}, ValueError, "got rank 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        ranks(*arguments, **options)


def test_only_functions_can_be_decorated():
    for thing in (3, staticmethod(lambda: None), functools.partial(print), int):
        with pytest.raises(TypeError, match="must decorate a test function, got"):
            ranks(2)(thing)


def test_generators_are_refused():
    def generator():
        yield

    async def asynchronous():
        yield

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match=rf"without yield, got the generator '.*{function.__name__}'"):
            ranks(2)(function)


def test_without_parentheses():
    def test_function():
        pass

    with pytest.raises(TypeError, match=r"Write @ranks\(2\)"):
        ranks(test_function)


def test_pytest_sees_no_rank_and_the_function_is_the_same():
    def test_function(rank, fixture, world_size):
        return rank, fixture, world_size

    marked = ranks(2)(test_function)
    assert marked is test_function
    assert marked(1, 2, 3) == (1, 2, 3)
    assert list(inspect.signature(marked).parameters) == ["fixture"]


def test_only_the_rank_that_is_named_is_killed(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setenv("RANK", "1")
    kill_rank(0)
    assert not sent
    kill_rank(1, signal=signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    monkeypatch.delenv("RANK")
    kill_rank(1)
    assert len(sent) == 1
