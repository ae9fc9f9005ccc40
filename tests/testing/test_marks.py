import functools
import inspect
import os
import signal

import pytest

import distman.testing
from distman.testing import delay_rank, kill_rank, ranks


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


def test_only_functions_and_classes_can_be_decorated():
    for thing in (3, staticmethod(lambda: None), functools.partial(print)):
        with pytest.raises(TypeError, match="must decorate a test function or a class, got"):
            ranks(2)(thing)


def test_generators_are_refused():
    def generator():
        yield

    async def asynchronous():
        yield

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match=rf"without yield, got the generator '.*{function.__name__}'"):
            ranks(2)(function)


def test_a_class_marks_its_methods_but_not_those_of_its_base():
    class Base:
        def test_inherited(self, rank):
            return rank

    @ranks(2)
    class TestClass(Base):
        limit = 3

        def test_own(self, world_size):
            return world_size

        @ranks(3)
        def test_marked(self):
            pass

        def check(self, rank):
            pass

    def world_sizes(function):
        return [mark.args[0].world_sizes for mark in getattr(function, "pytestmark", [])]

    names = ["test_inherited", "test_own", "test_marked", "check"]
    assert [world_sizes(getattr(TestClass, name)) for name in names] == [[(2,)], [(2,)], [(3,)], []]
    assert list(inspect.signature(TestClass.test_inherited).parameters) == ["self"]
    assert TestClass().test_inherited(1) == 1
    assert not world_sizes(Base.test_inherited)
    assert list(inspect.signature(Base.test_inherited).parameters) == ["self", "rank"]


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


def test_faults_touch_only_the_rank_they_name(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr("time.sleep", sent.append)
    monkeypatch.setenv("RANK", "1")
    kill_rank(0)
    delay_rank(2, 5.0)
    assert not sent
    kill_rank(1, signal=signal.SIGTERM)
    delay_rank(1, 5.0)
    assert sent == [(os.getpid(), signal.SIGTERM), 5.0]
    monkeypatch.delenv("RANK")
    kill_rank(1)
    assert len(sent) == 2
