"""Numbered keys of a store that are deleted after use: a week of training must not grow the store."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


_PER_PAGE = 64


class KeySequence:
    """A new key for each act that some ranks do together, the same on all of them.

    A rank that asks for a key is done with all keys before. So whoever is the last to begin a new page of keys
    deletes the page before it. At most two pages lie in the store, more only while ranks are further apart.

    Args:
        store: The part of the job's store that belongs to these ranks.
        name: Beginning of the keys.
        size: Number of ranks.
        suffixes: What follows a key where an act writes more than one.
    """

    def __init__(self, store: Store, name: str, size: int, suffixes: tuple[str, ...] = ("",)) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._suffixes = suffixes
        self._numbers = itertools.count()

    def next(self) -> str:
        """Return the key of the next act.

        All ranks must ask in the same order.
        """
        number = next(self._numbers)
        page, place = divmod(number, _PER_PAGE)
        if place == 0 and page > 0:
            self._turn(page)
        return f"{self._name} {number}"

    def _turn(self, page: int) -> None:
        """Begin a page; the last rank that does so deletes the one before."""
        counter = f"{self._name} page {page}"
        if self._store.add(counter, 1) < self._size:
            return
        self._store.delete_key(counter)
        for number in range((page - 1) * _PER_PAGE, page * _PER_PAGE):
            for suffix in self._suffixes:
                self._store.delete_key(f"{self._name} {number}{suffix}")
