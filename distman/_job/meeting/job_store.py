"""This process's connection to the store of its job. It needs no torch until torch asks for the store."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Place
from distman._coordination.messages import encode
from distman._store.client import Client
from distman._store.connection import StoreLostError

if TYPE_CHECKING:
    from distman._store.torch_store import TorchStore

_left: set[str] = set()
"""Sessions of stores that this process has left; a new start must find a new one."""


def has_left(session: str) -> bool:
    """Return whether this process has taken part in a session before: its store is about to close."""
    return session in _left


@dataclasses.dataclass
class JobStore:
    """This process's connection to the store of its job, where the ranks met."""

    client: Client
    url: str  # where the ranks met, such as ``tcp://n1:23145``
    timeout: float  # seconds that torch waits for a key
    is_opened_here: bool = False  # then it stays for others where the start fails
    opener: int | None = None  # the rank that opened it, once the verdict has told; None where none did

    @classmethod
    def entered(cls, client: Client, url: str, timeout: float) -> JobStore:
        """Return the connection to a store that another process has opened; raise the failure that was left there."""
        key = protocol.in_job(protocol.EARLY_FAILURE).encode()
        failure = b""
        with contextlib.suppress(StoreLostError):  # then nobody counts any more
            if client.check([key]):
                failure = client.get(key, timeout)
                client.add(protocol.in_job(protocol.TURNED_AWAY).encode(), 1)
        if failure:
            client.close()
            raise FailureRecord.decoded(failure, "the failure of a process that had not joined").to_failure()
        return cls(client, url, timeout)

    @functools.cached_property
    def store(self) -> TorchStore:
        """The part of the store that belongs to the job, for torch."""
        from distman._store.torch_store import TorchStore

        store = TorchStore(self.client, protocol.in_job(""))
        store.set_timeout(timedelta(seconds=self.timeout))
        return store

    @property
    def secret(self) -> bytes | None:
        """What a process that enters it has to prove; None where there is nothing."""
        return self.client.door.secret

    @property
    def key(self) -> bytes:
        """What the ranks of the job share with nobody; empty where there is nothing that could be the source of it."""
        return self.client.job_key

    def leave_will(
        self,
        me: Place,
        key: str = protocol.FAILURE,
        counter: str = protocol.NEWS,
        pack: Callable[[FailureRecord], str | bytes] = encode,
        *,
        unless: str,
    ) -> None:
        """Let the process that serves the store tell of the end of this one, at once, as a :class:`Will` does."""
        died = FailureRecord.died(me)
        unreachable = FailureRecord.unreachable(me, self.client.door.unreachable_after)
        self.store.register_will(key, counter, unless=unless, if_closed=pack(died), if_unreachable=pack(unreachable))

    def close(self) -> None:
        """Leave the store and never use it again; it goes with its last user."""
        _left.add(self.client.session)
        self.store.close()
