"""What clients may ask of a store, request by request."""

from __future__ import annotations

from struct import error as StructError  # noqa: N812 - struct's own name for it says nothing
from time import monotonic

from distman._store import frames
from distman._store.frames import INVALID, LIMIT, NUMBER, OK, MalformedError, TooLongError
from distman._store.table import NotANumberError, Table, Will

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distman._store.server import Peer

    Fields = Sequence[bytes]


_YES, _NO = b"\1", b"\0"
_MILLISECONDS = 1000


class Operations:
    """Carries out the requests of clients on a table."""

    def __init__(self, table: Table, shut: Callable[[], None]) -> None:
        self.num_unproved = 0  # how many began a handshake and did not end it: they may have another secret
        self.members: list[int] = []  # the ranks whose end has not been seen
        self._table = table
        self._shut = shut

    def carry_out(self, peer: Peer, number: int, operation: int, fields: Fields) -> None:
        """Do what a request asks for, and reply, now or when a wait is over."""
        # A client that asks for something else while it waits does not wait any more: it was interrupted.
        if peer.wait is not None:
            self._table.cancel(peer.wait)
            peer.wait = None
        try:
            value = self._value_of(peer, number, operation, fields)
        except NotANumberError:
            peer.send(*frames.reply(number, INVALID, b"it is no number of 64 bits, or would not be one any more"))
        except (ValueError, StructError) as error:  # of taking fields apart
            raise MalformedError(f"operation {operation} with other fields") from error
        else:
            if value is not None:
                peer.send(*frames.reply(number, OK, value))

    def _value_of(self, peer: Peer, number: int, operation: int, fields: Fields) -> bytes | None:
        """Return the value of a reply; None where there is none, or it is sent at the end of a wait."""
        table = self._table
        match operation:
            case frames.SET:
                key, value = fields
                table.set(key, value)
                return None
            case frames.GET:
                limit, key = fields
                peer.wait = table.wait([key], None, _until(limit), _replier(peer, number, b"".join))
                return None
            case frames.CHECK:
                return _YES if table.check(fields) else _NO
            case frames.ADD:
                key, amount = fields
                return NUMBER.pack(table.add(key, *NUMBER.unpack(amount)))
            case frames.WAIT:
                limit, unless, *keys = fields
                peer.wait = table.wait(keys, unless or None, _until(limit), _replier(peer, number, lambda _: b""))
                return None
            case frames.ARRIVE:
                limit, counter, size, key, value = fields
                (all_of_them,) = NUMBER.unpack(size)
                replier = _replier(peer, number, b"".join)
                peer.wait = table.arrive(counter, all_of_them, (key, value), _until(limit), replier)
                return None
            case frames.COMPARE_SET:
                key, expected, desired = fields
                return table.compare_set(key, expected, desired)
            case frames.APPEND:
                key, value = fields
                table.append(key, value)
                return None
            case frames.MULTI_GET:
                limit, *keys = fields
                peer.wait = table.wait(keys, None, _until(limit), _replier(peer, number, frames.values))
                return None
            case frames.MULTI_SET:
                table.multi_set(list(zip(fields[::2], fields[1::2], strict=True)))
                return b""
            case frames.DELETE:
                were_there = [table.delete(key) for key in fields]
                return _YES if all(were_there) else _NO
            case frames.NUM_KEYS:
                return NUMBER.pack(table.num_keys())
            case frames.NUM_UNPROVED:
                return NUMBER.pack(self.num_unproved)
            case frames.MEMBERS:
                return frames.pack([*map(NUMBER.pack, self.members)])
            case frames.WILL:  # in place of an earlier one; no fields are no will
                peer.will = None
                if fields:
                    key, counter, unless, if_closed, if_unreachable = fields
                    peer.will = Will(key, counter, unless, if_closed, if_unreachable)
                return None
            case frames.SHUT:
                self._shut()
                return b""
        raise MalformedError(f"operation {operation}")


def _until(limit: bytes) -> float:
    (milliseconds,) = LIMIT.unpack(limit)
    return monotonic() + float(milliseconds) / _MILLISECONDS


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
