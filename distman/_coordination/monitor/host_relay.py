"""What the watchers of one host tell each other through memory, so that one look into the store serves all of them.

Each writes to a slot of its own, so none waits for another, and one that stops or ends holds up nobody: whoever finds
that the last look was too long ago looks itself. A rank that cannot open the memory does all by itself.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distman._coordination import protocol
from distman._coordination.messages import decode, unless_malformed
from distman._coordination.monitor.reading import read_at_once
from distman._host_memory import CAN_BE_MADE, make_memory, opened_memory
from distman._log import logger

if TYPE_CHECKING:
    from torch.distributed import Store


_NAME = "distman-watchers"
_NUM_WORDS = 64  # in a slot, of 8 bytes: most of them for a sign of life, with the path of a program and a line in it
_WORD_BYTES = 8
_PRESENT_AT, _ASKED_AT, _NUM_NEWS, _FOUND_FOR, _SIGNED_AT, _READS, _LENGTH, _SIGN = range(8)
"""The words of a slot: when its rank was here last, when it last asked the store, the number of news that the store
told, when it was asked for that, when the rank last gave a sign of life, one more than the rank whose signs it reads
here, and the length of its own in bytes, which begins at the last of these words. Moments are in nanoseconds; nothing
is 0."""
_MOST_BYTES = (_NUM_WORDS - _SIGN) * _WORD_BYTES
_ABSENT_AFTER = 2.0  # seconds: a watcher comes by many times in them
_MOST_TRIES = 10  # to learn where the memory is, whose maker may not watch
_NONCE_BITS = 62
_NANOSECONDS = 10**9


class HostRelay:
    """What one watcher says to the others of its host, and hears from them.

    Args:
        rank: This process's rank.
        neighbours: The ranks of this host, this one among them, in rank order.
        clock: Tells the seconds, from a moment on that is the same for all processes of the host.
    """

    def __init__(self, rank: int, neighbours: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = rank
        self._places = {neighbour: place for place, neighbour in enumerate(neighbours, 1)}  # before them is the nonce
        self._clock = clock
        self._size = (len(neighbours) + 1) * _NUM_WORDS * _WORD_BYTES
        self._num_tries = 0
        self._is_given_up = len(neighbours) == 1
        self._words: memoryview | None = None
        self._descriptor: int | None = None

    def join(self, store: Store) -> None:
        """Make the memory, on the first rank of the host, or open it as soon as that rank has told where it is."""
        if self._words is not None or self._is_given_up:
            return
        first = min(self._places)
        try:
            self._words = self._make(store, first) if self._rank == first else self._open(store, first)
        except OSError as error:
            self._is_given_up = True
            logger.debug("rank %d shares no looks into the store with others of its host: %s", self._rank, error)

    @property
    def is_up(self) -> bool:
        """Whether this rank has the memory."""
        return self._words is not None

    @property
    def num_present(self) -> int:
        """How many watchers share their looks, this one included."""
        since = self._now() - int(_ABSENT_AFTER * _NANOSECONDS)
        return max(1, sum(moment > since for moment in self._column(_PRESENT_AT)))

    def count_news(self, ask: Callable[[], int], longest: float) -> int:
        """Return the number of news: what was found here last if one has asked in so many seconds, else the store's.

        A store that is slow is asked no more often: who comes while another one waits for its answer goes on with what
        was known before.

        Args:
            ask: Looks into the store.
            longest: Seconds.
        """
        if self._words is None:
            return ask()
        now = self._now()
        self._write(_PRESENT_AT, now)
        if 0 <= now - max(self._column(_ASKED_AT)) < longest * _NANOSECONDS:
            # Not the largest number: a counter may have begun again.
            _, found = max(zip(self._column(_FOUND_FOR), self._column(_NUM_NEWS), strict=True))
            return found
        self._write(_ASKED_AT, now)
        found = ask()
        self._write(_NUM_NEWS, found)
        self._write(_FOUND_FOR, now)
        return found

    def give_sign(self, sign: bytes, longest: float) -> bool:
        """Give a sign of life here, and return whether a rank reads it here, and not in the store.

        Args:
            sign: The sign.
            longest: Seconds since a reader's own sign, after which it is not counted on.
        """
        if self._words is None:
            return False
        sign, start = sign[:_MOST_BYTES], self._places[self._rank] * _NUM_WORDS
        self._words.cast("B")[(start + _SIGN) * _WORD_BYTES :][: len(sign)] = sign
        self._write(_LENGTH, len(sign))
        now = self._now()
        self._write(_SIGNED_AT, now)
        signs = zip(self._column(_READS), self._column(_SIGNED_AT), strict=True)
        return any(rank == self._rank + 1 and moment > now - longest * _NANOSECONDS for rank, moment in signs)

    def sign_of(self, rank: int) -> str:
        """Return the last sign of life of a rank, and let it know that it is read here; empty where it gives none."""
        if self._words is None:
            return ""
        start = self._places.get(rank, 0) * _NUM_WORDS
        length = self._words[start + _LENGTH] if start else 0
        self._write(_READS, rank + 1 if length else 0)
        sign = self._words.cast("B")[(start + _SIGN) * _WORD_BYTES :][:length]
        return sign.tobytes().decode(errors="replace")

    def leave(self) -> None:
        """Give no sign of life any more, and read none; what was found in the store is there for the others."""
        self._write(_READS, 0)
        self._write(_LENGTH, 0)

    def close(self) -> None:
        """Leave, and let go of the memory."""
        self.leave()
        self._words, self._is_given_up = None, True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _make(self, store: Store, first: int) -> memoryview:
        where = ""
        with contextlib.ExitStack() as undo:
            try:
                if not CAN_BE_MADE:
                    raise OSError("this system has no memory without a file")
                descriptor = make_memory(_NAME, self._size)
                undo.callback(os.close, descriptor)
                words = memoryview(mmap.mmap(descriptor, self._size)).cast("q")
                words[0] = secrets.randbits(_NONCE_BITS)
                where = json.dumps([os.getpid(), descriptor, words[0]])
            finally:
                store.set(protocol.host_relay(first), where)  # nobody waits where there is none
            undo.pop_all()
        self._descriptor = descriptor
        return words

    def _open(self, store: Store, first: int) -> memoryview | None:
        found = read_at_once(store, protocol.host_relay(first))
        if found is None:
            self._num_tries += 1
            self._is_given_up = self._num_tries == _MOST_TRIES
            return None
        if not found:
            raise FileNotFoundError(f"rank {first} has none")
        what = f"where the memory of rank {first} is"
        pid, descriptor, nonce = unless_malformed(lambda: decode(found, tuple[int, int, int], what)) or (0, 0, 0)
        with opened_memory(_NAME, self._size, pid, descriptor) as here:
            words = memoryview(mmap.mmap(here, self._size)).cast("q")
        if words[0] != nonce:
            raise FileNotFoundError(f"process {pid} is another one here")
        return words

    def _now(self) -> int:
        return int(self._clock() * _NANOSECONDS)

    def _column(self, word: int) -> list[int]:
        """Return one word of each slot."""
        return self._words[_NUM_WORDS + word :: _NUM_WORDS].tolist() if self._words is not None else []

    def _write(self, word: int, value: int) -> None:
        if self._words is not None:
            self._words[self._places[self._rank] * _NUM_WORDS + word] = value
