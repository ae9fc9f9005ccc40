"""How a rank parts from the others, over a store in memory."""

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from distman._coordination import protocol
from distman._job import shutdown
from distman._job.start import reporter_of

from ..coordination.ranks import failure_on


@pytest.fixture
def rendezvous():
    return SimpleNamespace(store=HashStore(), job_store=SimpleNamespace(url="tcp://n1:5", is_host=False))


def watcher_of(learned, looked_for):
    return SimpleNamespace(
        is_counted=True, knows_from_others=False, learn=learned.append, look_after_others=looked_for.append
    )


JOB = SimpleNamespace(peer=SimpleNamespace(rank=0), world_size=2, is_adopted=False, end_after=lambda _: None)


@pytest.mark.parametrize("records", [[], [failure_on(1)]], ids=len)
def test_who_leaves_after_a_failure_looks_who_keeps_the_launcher_waiting(rendezvous, records):
    """A wait may have raised it before the watcher knew, and the program have handled it."""
    learned, looked_for = [], []
    for record in records:
        record.publish(rendezvous.store)
    rendezvous.store.add(protocol.STARTED, 2)
    shutdown._say_farewell(JOB, rendezvous, watcher_of(learned, looked_for), is_host=False)
    assert learned == looked_for == records
    assert rendezvous.store.check([protocol.left(0)])


def test_so_does_who_fails_when_it_has_left(rendezvous):
    """It may be the only one that can: nobody watches for this process any more."""
    looked_for = []
    report = reporter_of(JOB, rendezvous, watcher=watcher_of([], looked_for))
    report(ValueError("boom"))()
    assert [record.error_text for record in looked_for] == ["boom"]
