"""The keys of a store and the waits for them, as arithmetic: no sockets, no clock.

Values are bytes; a counter is a number in decimal digits, as in torch's stores.
"""

from __future__ import annotations

from _heapq import heapify, heappop, heappush

from distman._store.frames import GIVEN_UP, MOST_NUMBER, MOST_VALUE_BYTES, OK, TIMED_OUT, MalformedError

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Answer = Callable[[int, Sequence[bytes]], object]

_MOST_DIGITS = 20  # of a number of 64 bits, with its sign; Python refuses thousands only
_FEW = 64  # deadlines: a list of so many is not worth clearing


class NotANumberError(Exception):
    """A counter holds no number of 64 bits, or would not."""


class Wait:
    """A wait that is not over."""

    __slots__ = ("answer", "is_over", "keys", "missing", "unless")

    def __init__(self, keys: Sequence[bytes], unless: bytes | None, answer: Answer) -> None:
        self.keys = keys  # have to be set, all at the same time
        self.unless = unless  # ends the wait when it is set first
        self.answer = answer  # takes how it ended, and the values of the keys, or of the one that ended it, or none
        self.missing: set[bytes] = set()
        self.is_over = False


class Will:
    """What is to be done when a client is gone: a key, if it is not set, is set to some last words."""

    __slots__ = ("counter", "if_closed", "if_unreachable", "key", "unless")

    def __init__(self, key: bytes, counter: bytes, unless: bytes, if_closed: bytes, if_unreachable: bytes) -> None:
        self.key = key
        self.counter = counter  # is raised then
        self.unless = unless  # prevents it: the client has left
        self.if_closed = if_closed  # where its connection was closed, as the end of a process does, or broke
        self.if_unreachable = if_unreachable  # where its host did not answer any more


class Table:
    """Keys, their values, and waits for them."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[bytes, set[Wait]] = {}
        self._deadlines: list[tuple[float, int, Wait]] = []
        self._num_waits = 0
        self._num_made = 0

    def set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if key in self._waits:
            self._wake(key)

    def multi_set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self._values.update(pairs)
        for key, _ in pairs:
            if key in self._waits:
                self._wake(key)

    def append(self, key: bytes, value: bytes) -> None:
        before = self._values.get(key, b"")
        if len(before) + len(value) > MOST_VALUE_BYTES:
            raise MalformedError(f"an addition to a value, which would have {len(before) + len(value)} bytes")
        self.set(key, before + value)

    def add(self, key: bytes, amount: int) -> int:
        """Add to the number at a key, which begins at 0, and return the sum."""
        value = self._values.get(key)
        total = amount if value is None else _number(value) + amount
        if not -MOST_NUMBER <= total <= MOST_NUMBER:
            raise NotANumberError
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Replace a value that is the expected one, or nothing where nothing is expected; return what holds then."""
        # Where nothing does, that is the expected one.
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self.set(key, desired)
            return desired
        return expected if value is None else value

    def delete(self, key: bytes) -> bool:
        return self._values.pop(key, None) is not None

    def check(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        return len(self._values)

    def wait(self, keys: Sequence[bytes], unless: bytes | None, until: float, answer: Answer) -> Wait | None:
        """Answer when all keys are set, or the other one, or in time; return the wait, None if it was over at once."""
        wait = Wait(keys, unless, answer)
        if self._is_answered(wait):
            return None
        self._num_waits += 1
        self._num_made += 1
        self._clear_deadlines()
        heappush(self._deadlines, (until, self._num_made, wait))
        return wait

    def arrive(
        self, counter: bytes, size: int, outcome: tuple[bytes, bytes], until: float, answer: Answer
    ) -> Wait | None:
        """Count one more that has come, and wait for the outcome: a key, and what the last one to come sets it to."""
        # A client that gives up sets that key to something else, if it is not set yet, and all hear that.
        key, value = outcome
        if self.add(counter, 1) == size:
            self.compare_set(key, b"", value)
        return self.wait([key], None, until, answer)

    def next_deadline(self) -> float | None:
        """Return the time before which no wait is too long; None if there is no wait."""
        while self._deadlines and self._deadlines[0][2].is_over:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> None:
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, _, wait = heappop(self._deadlines)
            self.cancel(wait)
            wait.answer(TIMED_OUT, ())

    def carry_out(self, will: Will, *, is_unreachable: bool) -> None:
        """Do what is to be done at the end of a client."""
        if will.unless in self._values or self._values.get(will.key):
            return
        self.set(will.key, will.if_unreachable if is_unreachable else will.if_closed)
        try:  # noqa: SIM105 - contextlib takes longer to load than the process to start
            self.add(will.counter, 1)
        except NotANumberError:
            pass  # then nobody can count on it

    def _wake(self, key: bytes) -> None:
        """Look again at the waits for a key that was set."""
        for wait in self._waits.pop(key):
            if wait.is_over:
                continue
            wait.missing.discard(key)
            if key == wait.unless or not wait.missing:
                self._forget(wait)
                if self._is_answered(wait):
                    self._num_waits -= 1

    def _is_answered(self, wait: Wait) -> bool:
        """Answer a wait that has come to its end, or note what it still waits for."""
        values = self._values
        wait.missing = {key for key in wait.keys if key not in values}
        if not wait.missing:
            wait.is_over = True
            wait.answer(OK, [values[key] for key in wait.keys])
        elif wait.unless in values:
            wait.is_over = True
            wait.answer(GIVEN_UP, [values[wait.unless]])
        else:
            for key in _awaited(wait):
                self._waits.setdefault(key, set()).add(wait)
        return wait.is_over

    def cancel(self, wait: Wait) -> None:
        """End a wait without an answer."""
        if not wait.is_over:
            wait.is_over = True
            self._num_waits -= 1
            self._forget(wait)

    def _forget(self, wait: Wait) -> None:
        for key in _awaited(wait):
            waits = self._waits.get(key, set())
            waits.discard(wait)
            if not waits:
                self._waits.pop(key, None)

    def _clear_deadlines(self) -> None:
        """Drop those of waits that ended early, which would otherwise stay for as long as they might have taken."""
        if len(self._deadlines) > 2 * self._num_waits + _FEW:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_over]
            heapify(self._deadlines)


def _awaited(wait: Wait) -> Sequence[bytes]:
    return [*wait.missing] if wait.unless is None else [*wait.missing, wait.unless]


def _number(value: bytes) -> int:
    if value.isdigit() and len(value) < _MOST_DIGITS:
        return int(value)
    digits = value[1:] if value[:1] == b"-" else value
    if len(value) > _MOST_DIGITS or not digits.isdigit():
        raise NotANumberError
    return int(value)
