"""Where the time of a step goes, on a clock that the test sets."""

import threading

import pytest

from distman._coordination import step_times
from distman._coordination.step_times import APART, BACKWARD, COMPARED, COMPUTING, FORWARD, LOADING, StepTimes
from distman._coordination.tracking import Restricted, TrackedWait

NAMES = (*COMPARED, "waiting", "apart")


class Clock:
    now = 100.0

    def do(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(step_times.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def times(monkeypatch):
    times = StepTimes()
    monkeypatch.setattr(step_times, "_times", times)
    return times


def loader(clock, num_batches, seconds=1.0):
    for number in range(num_batches):
        clock.do(seconds)
        yield number


def phases(times):
    """Return those of all steps."""
    return phases_of(times.read(len(times._steps), 0.0))


def phases_of(found):
    return None if found is None else {name: value for name, value in zip(NAMES, found, strict=True) if value}


def test_a_step_lasts_from_one_batch_to_the_next(clock, times):
    for number in times.batches(loader(clock, 5)):
        clock.do(10.0 + number)
    assert phases(times) == {"loading": 1.0, "computing": 11.0}  # by the lower quartile


def test_a_wait_for_others_is_taken_from_what_the_rank_does(clock, times):
    for _ in times.batches(loader(clock, 3)):
        times.enter(FORWARD)
        clock.do(2.0)
        times.enter(BACKWARD)
        clock.do(3.0)
        with TrackedWait("all_reduce"):
            clock.do(4.0)
            with TrackedWait("a part of it"):
                clock.do(1.0)
        with TrackedWait("backward of the model", computes=True):
            clock.do(0.5)
        times.enter(COMPUTING)
        with Restricted("on_rank(0)", frozenset([0])):
            clock.do(7.0)
    assert phases(times) == {"loading": 1.0, "forward": 2.0, "backward": 3.5, "waiting": 5.0, "apart": 7.0}


def test_a_wait_of_another_thread_is_not_counted(clock, times):
    def wait():
        times.enter(APART)
        with TrackedWait("barrier"):
            clock.do(4.0)

    for _ in times.batches(loader(clock, 2)):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert phases(times) == {"loading": 1.0, "computing": 4.0}


def test_a_step_of_several_batches_is_one_once_it_was_told_that_it_ends(clock, times):
    batches = times.batches(loader(clock, 9))
    for _ in range(3):
        for _ in range(3):
            next(batches)
        times.enter(FORWARD)
        clock.do(6.0)
        times.end_step()
    assert list(batches) == []
    (loading, forward, *_) = times.read(5, 0.0)  # the first step's batches count each
    assert (loading, forward) == (9 / 5, 0.0)
    for _ in times.batches(loader(clock, 9)):
        times.end_step()
    assert phases(times) == {"loading": 1.0}


def test_a_second_loader_within_a_step_is_a_part_of_it(clock, times):
    for _ in times.batches(loader(clock, 3)):
        times.enter(FORWARD)
        for _ in times.batches(loader(clock, 2, seconds=5.0)):
            clock.do(1.0)
        clock.do(1.0)
    assert phases(times) == {"loading": 11.0, "forward": 3.0}


def test_two_loaders_in_turn_make_one_step(clock, times):
    for _ in zip(times.batches(loader(clock, 3)), times.batches(loader(clock, 3, seconds=2.0)), strict=True):
        clock.do(1.0)
    assert phases(times) == {"loading": 3.0, "computing": 1.0}


def test_between_loops_nothing_is_counted(clock, times):
    for _ in times.batches(loader(clock, 5)):
        break
    clock.do(50.0)
    times.enter(LOADING)
    assert phases(times) is None
    for _ in times.batches(loader(clock, 1)):
        clock.do(2.0)
    assert phases(times) == {"loading": 1.0, "computing": 2.0}


def test_few_steps_and_short_times_are_not_read(clock, times):
    for _ in times.batches(loader(clock, 4)):
        assert times.read(4, 0.0) is None
    assert times.read(4, 4.5) is None
    assert times.read(5, 0.0) is None
    assert times.read(4, 4.0) is not None
    assert times.read(1, 0.0) is None


def test_no_more_steps_are_read_at_once_than_are_enough_unless_many_wait(clock, times):
    for number in times.batches(loader(clock, 7)):
        clock.do(float(number))
    assert phases_of(times.read(4, 0.0)) == {"loading": 1.0, "computing": 1.0}  # of 0, 1, 2, 3
    assert phases_of(times.read(3, 0.0)) == {"loading": 1.0, "computing": 4.0}  # of 4, 5, 6
    for number in times.batches(loader(clock, 8)):
        clock.do(float(number))
    assert phases_of(times.read(4, 0.0)) == {"loading": 1.0, "computing": 2.0}  # of all


def test_workers_that_bring_several_batches_at_once_do_not_hide_how_long_they_take(clock, times):
    for number in times.batches(iter(range(9))):
        clock.do(1.0)
        times.enter(LOADING)
        clock.do(0.0 if number % 3 else 6.0)  # as the next batch
    assert phases(times) == {"loading": 2.0, "computing": 1.0}
