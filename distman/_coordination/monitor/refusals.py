"""Calls that a rank refuses to make its part of: the others hear of it, and the group stays usable.

Others may wait for that part by now, and what they have begun cannot be taken back. So the rank that refuses asks them
over the store what they exchange with it in that call, and their watchers answer while they wait. Then it exchanges as
many bytes with them, which mean nothing: the call ends there, and raises what the watcher was told.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

from distman._base.text import Line
from distman._coordination import protocol, tracking
from distman._coordination.messages import count, decode, decode_at_once, encode, read_numbers
from distman._coordination.tracking import Members
from distman._torch_internals import is_registered

if TYPE_CHECKING:
    from distman._coordination.sync import StoreGroup
    from distman._store.torch_store import TorchStore

_groups: weakref.WeakValueDictionary[str, Members] = weakref.WeakValueDictionary()
"""The groups in which this rank has made calls, by the name of their process group."""


def know(group: Members) -> None:
    """Let this rank be asked about its calls in a group from now on."""
    process_group = group.process_group
    if process_group is not None:
        _groups[process_group.group_name] = group


def progress() -> dict[str, int]:
    """Return the numbers of the last calls that this rank has begun, by the name of their process group."""
    groups = [(name, group, group.process_group) for name, group in list(_groups.items())]
    return {name: group.exchanges.last for name, group, pg in groups if pg is not None and is_registered(pg)}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A call that one rank does not make."""

    rank: int  # the one that refuses
    ranks: tuple[int, ...]  # the members of the group
    group: str  # the name of its process group
    call: int  # its number in the group
    text: Line  # what the others raise

    def ask(self, store_group: StoreGroup, timeout: float) -> dict[int, Posted]:
        """Return what the other members exchange with this rank, by rank in the world; of those that answer in time."""
        store = store_group.job_store
        number = count(store, protocol.REFUSAL_NUMBERS, 1)
        keys = {rank: protocol.refusal_answer(number, rank) for rank in self.ranks if rank != self.rank}
        store.set(protocol.refusal(number), encode(self))
        store.append(protocol.REFUSALS, f"{number},")
        count(store, protocol.NEWS, 1)

        def missing() -> list[int]:
            return [index for index, rank in enumerate(self.ranks) if rank in keys and not store.check([keys[rank]])]

        place = f"exchange {self.call}"
        store_group.wait_until(lambda: store.check([*keys.values()]), place=place, awaited=missing, timeout=timeout)
        answers = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
        store.delete_keys([protocol.refusal(number), *keys.values()])
        return {rank: decode(answer, Posted, f"what rank {rank} exchanges") for rank, answer in answers.items()}


@dataclasses.dataclass(frozen=True)
class Posted:
    """What a rank exchanges in a call with the one that refuses it."""

    call: str = ""  # what must be equal on all ranks of the call; empty if it exchanges nothing with that rank
    sent: int = 0  # bytes that go to that rank
    received: int = 0  # bytes that are to come from it
    is_closed: bool = False  # it has given up the group's connections: it waits for something else than messages


class RefusalWatch:
    """Answers ranks that refuse a call, once this rank has come to it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_seen = 0
        self._open: dict[int, Refusal] = {}

    def look(self, store: TorchStore, *, is_news: bool) -> None:
        if is_news:
            self._read(store)
        for number, refusal in list(self._open.items()):
            posted = _posted_with(refusal)
            if posted is not None:
                del self._open[number]
                store.set(protocol.refusal_answer(number, self._rank), encode(posted))

    def _read(self, store: TorchStore) -> None:
        numbers = read_numbers(store, protocol.REFUSALS)
        for number in numbers[self._num_seen :]:
            # The rank that asked may have given up.
            refusal = decode_at_once(store, protocol.refusal(number), Refusal, "a refusal")
            if refusal is not None and self._rank in refusal.ranks and self._rank != refusal.rank:
                self._open[number] = refusal
        self._num_seen = len(numbers)


def _posted_with(refusal: Refusal) -> Posted | None:
    """Return what this rank exchanges in a call with the one that refuses it; None if it has not come to it yet."""
    group = _groups.get(refusal.group)
    if group is None or group.process_group is None or group.exchanges.last < refusal.call:
        return None
    for wait in tracking.waits():
        call = wait.call
        if call is None or call.group is not group or call.number != refusal.call:
            continue
        wait.refusal = refusal.text
        if call.pieces is None:
            call.interrupt()
            return Posted(is_closed=True)
        sent, received = call.pieces
        index = group.ranks.index(refusal.rank)
        return Posted(call.text, sent[index], received[index])
    return Posted()
