"""What clients may ask of a store, request by request."""

from __future__ import annotations

from struct import error as StructError  # noqa: N812 - struct's own name for it says nothing
from time import monotonic

from distman._store import frames
from distman._store.frames import INVALID, LENGTH, LIMIT, NUMBER, OK, MalformedError, TooLongError
from distman._store.table import NotANumberError, Table, Will

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distman._store.peer import Peer

    Fields = list[bytes]

_YES, _NO = b"\1", b"\0"
_MILLISECONDS = 1000


class Operations:
    """Carries out the requests of clients on a table."""

    def __init__(self, table: Table, shut: Callable[[], None], failure: bytes = b"") -> None:
        self.failure = failure  # what all who come are told, or what a client that failed has left; empty for nothing
        self.num_unproved = 0  # how many began a handshake and did not end it: they may have another secret
        self._table = table
        self._shut = shut
        self._functions: dict[int, Callable[[Peer, int, Fields], bytes | None]] = {
            frames.SET: self._set,
            frames.GET: self._get,
            frames.ADD: self._add,
            frames.CHECK: self._check,
            frames.WAIT: self._wait,
            frames.COMPARE_SET: self._compare_set,
            frames.DELETE: self._delete,
            frames.NUM_KEYS: self._num_keys,
            frames.MULTI_GET: self._multi_get,
            frames.MULTI_SET: self._multi_set,
            frames.APPEND: self._append,
            frames.ARRIVE: self._arrive,
            frames.WILL: self._register_will,
            frames.FAIL: self._fail,
            frames.SHUT: self._close_door,
            frames.NUM_UNPROVED: self._num_unproved,
        }

    def carry_out(self, peer: Peer, number: int, operation: int, fields: Fields) -> None:
        """Do what a request asks for, and reply, now or when a wait is over."""
        # A client that asks for something else while it waits does not wait any more: it was interrupted.
        if peer.wait is not None:
            self._table.cancel(peer.wait)
            peer.wait = None
        function = self._functions.get(operation)
        if function is None:
            raise MalformedError(f"operation {operation}")
        try:
            value = function(peer, number, fields)
        except NotANumberError:
            peer.send(*frames.reply(number, INVALID, b"it is no number of 64 bits, or would not be one any more"))
        except (ValueError, StructError) as error:  # of taking fields apart
            raise MalformedError(f"operation {operation} with other fields") from error
        else:
            if value is not None:
                peer.send(*frames.reply(number, OK, value))

    def _set(self, _peer: Peer, _number: int, fields: Fields) -> None:
        key, value = fields
        self._table.set(key, value)

    def _get(self, peer: Peer, number: int, fields: Fields) -> None:
        key, limit = fields
        peer.wait = self._table.wait([key], None, _until(limit), _replier(peer, number, b"".join))

    def _multi_get(self, peer: Peer, number: int, fields: Fields) -> None:
        limit, *keys = fields
        peer.wait = self._table.wait(keys, None, _until(limit), _replier(peer, number, _packed))

    def _wait(self, peer: Peer, number: int, fields: Fields) -> None:
        limit, unless, *keys = fields
        peer.wait = self._table.wait(keys, unless or None, _until(limit), _replier(peer, number, _nothing))

    def _arrive(self, peer: Peer, number: int, fields: Fields) -> None:
        counter, size, key, value, limit = fields
        (all_of_them,) = NUMBER.unpack(size)
        replier = _replier(peer, number, b"".join)
        peer.wait = self._table.arrive(counter, all_of_them, (key, value), _until(limit), replier)

    def _add(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        key, amount = fields
        return NUMBER.pack(self._table.add(key, *NUMBER.unpack(amount)))

    def _check(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        return _YES if self._table.check(fields) else _NO

    def _compare_set(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        key, expected, desired = fields
        return self._table.compare_set(key, expected, desired)

    def _delete(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        were_there = [self._table.delete(key) for key in fields]
        return _YES if all(were_there) else _NO

    def _num_keys(self, _peer: Peer, _number: int, _fields: Fields) -> bytes:
        return NUMBER.pack(self._table.num_keys())

    def _multi_set(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        self._table.multi_set(list(zip(fields[::2], fields[1::2], strict=True)))
        return b""

    def _append(self, _peer: Peer, _number: int, fields: Fields) -> None:
        key, value = fields
        self._table.append(key, value)

    def _register_will(self, peer: Peer, _number: int, fields: Fields) -> None:
        """Take a will in place of an earlier one; no fields are no will."""
        peer.will = None
        if fields:
            key, counter, unless, if_closed, if_unreachable = fields
            peer.will = Will(key, counter, unless, if_closed, if_unreachable)

    def _fail(self, _peer: Peer, _number: int, fields: Fields) -> bytes:
        """Keep the first failure for all who come later, and return it."""
        (failure,) = fields
        if len(failure) > frames.MOST_FAILURE_BYTES:
            raise MalformedError("a failure that is too long")
        self.failure = self.failure or failure
        return self.failure

    def _close_door(self, _peer: Peer, _number: int, _fields: Fields) -> bytes:
        self._shut()
        return b""

    def _num_unproved(self, _peer: Peer, _number: int, _fields: Fields) -> bytes:
        return NUMBER.pack(self.num_unproved)


def _until(limit: bytes) -> float:
    (milliseconds,) = LIMIT.unpack(limit)
    return monotonic() + float(milliseconds) / _MILLISECONDS


def _nothing(_values: Sequence[bytes]) -> bytes:
    return b""


def _packed(values: Sequence[bytes]) -> bytes:
    frames.check_total(sum(map(len, values)) + LENGTH.size * (1 + len(values)))
    return frames.pack(values)


def _replier(
    peer: Peer, number: int, show: Callable[[Sequence[bytes]], bytes]
) -> Callable[[int, Sequence[bytes]], None]:
    """Return what replies at the end of a wait; values are shown if it was successful, else the one that ended it."""

    def reply(status: int, values: Sequence[bytes]) -> None:
        peer.wait = None
        try:
            value = show(values) if status == OK else b"".join(values)
        except TooLongError as error:
            status, value = INVALID, str(error).encode()
        peer.send(*frames.reply(number, status, value))

    return reply
