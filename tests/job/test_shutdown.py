"""How a rank parts from the others, over a store in memory."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from distman._coordination import protocol
from distman._coordination.monitor.watcher import State
from distman._job import shutdown
from distman._job.start import reporter_of

from ..coordination.ranks import failure_on
from ..store.stores import MemoryStore


@pytest.fixture
def rendezvous():
    return SimpleNamespace(store=MemoryStore(), url="tcp://n1:5", close=lambda: None)


def watcher_of(learned, looked_for):
    return SimpleNamespace(
        state=State.WATCHING, knows_from_others=False, learn=learned.append, look_after_others=looked_for.append
    )


JOB = SimpleNamespace(
    peer=SimpleNamespace(rank=0), world_size=2, is_adopted=False, holds_store=False, end_after=lambda _: None
)


class OnWatch:
    """A watcher that finds, when it is asked a second time, that the other rank has left."""

    state, knows_from_others, record = State.WATCHING, False, None

    def __init__(self, store):
        self.store = store
        self.num_asked = 0

    @property
    def is_on_watch(self):
        self.num_asked += 1
        if self.num_asked == 2:
            self.store.add(protocol.GONE, 1)
        return True

    def leave(self): ...

    def stop(self): ...

    def close(self): ...


@pytest.mark.parametrize("holds_store", [True, False])
def test_who_holds_the_store_stays_until_the_others_have_left(rendezvous, holds_store):
    """The system may end what serves it with the last process of a job on a host."""
    store, watcher = rendezvous.store, OnWatch(rendezvous.store)
    store.add(protocol.STARTED, 2)
    store.add(protocol.GONE, 0)
    job = SimpleNamespace(**{**vars(JOB), "holds_store": holds_store, "rendezvous": rendezvous})
    shutdown.leave(job, watcher)
    assert watcher.num_asked == (2 if holds_store else 0)
    assert store.check([protocol.CLOSING]) == holds_store, "whoever came late must not miss it"


def test_its_end_is_announced_though_an_interrupt_comes_between(rendezvous):
    store, watcher = rendezvous.store, OnWatch(rendezvous.store)
    store.add(protocol.STARTED, 2)
    store.add(protocol.GONE, 1)

    def interrupted():
        raise KeyboardInterrupt

    watcher.stop = interrupted
    with pytest.raises(KeyboardInterrupt):
        shutdown.leave(SimpleNamespace(**{**vars(JOB), "holds_store": True, "rendezvous": rendezvous}), watcher)
    assert store.check([protocol.CLOSING])


@pytest.mark.parametrize("records", [[], [failure_on(1)]], ids=len)
def test_who_leaves_after_a_failure_looks_who_keeps_the_launcher_waiting(rendezvous, records):
    """A wait may have raised it before the watcher knew, and the program have handled it."""
    learned, looked_for = [], []
    for record in records:
        record.publish(rendezvous.store)
    rendezvous.store.add(protocol.STARTED, 2)
    shutdown._say_farewell(JOB, rendezvous.store, watcher_of(learned, looked_for), stays=False)
    assert learned == looked_for == records
    assert rendezvous.store.check([protocol.left(0)])


def test_so_does_who_fails_when_it_has_left(rendezvous):
    """It may be the only one that can: nobody watches for this process any more."""
    looked_for = []
    report = reporter_of(JOB, rendezvous, watcher=watcher_of([], looked_for))
    report(ValueError("boom"))()
    assert [record.error_text for record in looked_for] == ["boom"]


def test_a_thread_whose_name_is_no_text_delays_no_end():
    """The system cuts names at 15 bytes, in the middle of a letter perhaps."""
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        Path(f"/proc/self/task/{thread.native_id}/comm").write_bytes("simulation_aaaö".encode()[:15])
        shutdown.wait_for_gloo()
    finally:
        is_over.set()
        thread.join()
