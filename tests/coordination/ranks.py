"""Ranks that share a store in memory; each is a thread."""

import concurrent.futures
import dataclasses

from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.sync import StoreGroup
from distman._store.handshake import MEMBER
from distman._store.torch_store import TorchStore

from ..store.stores import MemoryStore


@dataclasses.dataclass(frozen=True)
class Place:
    rank: int
    host: str = "n1"

    @property
    def pid(self):
        return 100 + self.rank

    def __str__(self):
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


def places(num_ranks):
    return [Place(rank) for rank in range(num_ranks)]


def store_groups(num_ranks, *, leaving=0.0, opened=None):
    """The members of one group, over a store in memory or one that is opened; they look around all the time."""
    here, every = MemoryStore(), 0.0 if opened is None else 0.01
    stores = [here if opened is None else TorchStore(opened.client(MEMBER, rank)) for rank in range(num_ranks)]
    return [
        StoreGroup(store, store, rank, range(num_ranks), places(num_ranks), look_around_every=every, leaving=leaving)
        for rank, store in enumerate(stores)
    ]


def at_once(*calls):
    """Let each call run in a thread of its own; return what each returned or raised."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def failure_on(rank, text="boom"):
    return FailureRecord(rank, "n1", 100 + rank, "ValueError", text, f"Traceback ...\nValueError: {text}")


def leave(store, rank):
    store.set(protocol.left(rank), "yes")
    store.append(protocol.LEFT, f"{rank},")
