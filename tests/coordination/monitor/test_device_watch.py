"""A main thread that waits for a GPU, which an event stands for."""

import threading

import pytest

from distman._coordination import tracking
from distman._coordination.monitor.context import WatchContext
from distman._coordination.monitor.hang import CallWatch, DeviceWatch, HangWatch

from ...store.stores import MemoryStore
from ..ranks import places

LIMIT = 0.02  # seconds


@pytest.fixture
def gpu():
    """Has done all that it was given where it is set."""
    gpu = threading.Event()
    yield gpu
    gpu.set()


@pytest.fixture
def place(monkeypatch):
    """Where the main thread is: a list of one place, since the test runs there itself."""
    place = ["train.py:7 in main"]
    monkeypatch.setattr(tracking, "line_of_main_thread", lambda: place[0])
    return place


def look_until(watch, found):
    while (watch.look() is not None) != found:
        pass


def test_a_stuck_gpu_is_reported_with_the_place_that_waits_for_it(monkeypatch, gpu, place):
    reports = []
    monkeypatch.setattr(
        "distman._coordination.monitor.hang.write_report", lambda reason, *_: reports.append((reason, place[0]))
    )
    store = MemoryStore()
    context = WatchContext(store, "tcp://n1:5", 0, places(1), opener=0, wait_for_device=gpu.wait)
    watch = HangWatch(context, LIMIT, patience=0)
    while not reports:
        watch.look(store)
    for _ in range(9):
        watch.look(store)
    ((reason, _),) = reports
    assert "waits in work of its GPU at train.py:7 in main for" in reason
    place[0] = "train.py:8 in main"
    while len(reports) < 2:  # the next one
        watch.look(store)


def test_a_gpu_that_works_is_not_stuck_however_often_the_program_waits_there(place):
    waits = []

    def work():
        waits.append(place[0])

    watch = DeviceWatch(LIMIT, work)
    while len(waits) < 3:
        wait = watch.look()
        assert wait is None or wait.place == place[0]
    look_until(watch, found=False)


def test_a_program_that_goes_on_does_not_ask_the_gpu(place):
    watch = DeviceWatch(LIMIT, pytest.fail)
    since = watch.look()
    for number in range(2000):
        place[0] = f"train.py:{number} in main"
        assert watch.look() is since is None


@pytest.mark.parametrize("watch", [CallWatch(3600), DeviceWatch(3600, pytest.fail)], ids=["calls", "device"])
def test_the_first_look_at_a_main_thread_without_a_frame_finds_no_wait(place, watch):
    place[0] = ""  # Python has left the program, and has not ended yet
    assert watch.look() is None
    assert watch.look() is None


@pytest.mark.usefixtures("place")
def test_a_kernel_that_failed_leaves_nothing_to_wait_for():
    asked = threading.Event()

    def fail():
        asked.set()
        raise RuntimeError("an illegal memory access was encountered")

    watch = DeviceWatch(LIMIT, fail)
    look_until(watch, found=True)
    assert asked.wait(60)
    look_until(watch, found=False)
