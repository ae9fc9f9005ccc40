"""The messages of a store: numbered requests, and a reply with the number of its request.

Numbers make an interrupted call harmless: the reply that nobody waited for is known by its number, and dropped.
A request is an operation and fields of bytes. Lengths come first, and are checked before anything is believed. All is
packed and unpacked in few steps of the interpreter: they are a good part of what a call costs.
"""

from __future__ import annotations

from struct import Struct

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 64 << 20
"""Bytes of a message, twice what ranks take from each other: larger ones would hold up all others, since the store is
one thread that copies them. A length that somebody made up is found by it, too."""

SET, GET, ADD, CHECK, WAIT, COMPARE_SET, DELETE, NUM_KEYS = range(1, 9)
MULTI_GET, MULTI_SET, APPEND, ARRIVE, WILL, SHUT, NUM_UNPROVED, MEMBERS = range(9, 17)
"""The operations; operations.py says what the fields of each are."""
UNANSWERED = (SET, APPEND, WILL)
"""Those that have no reply."""

OK, TIMED_OUT, GIVEN_UP, INVALID, MALFORMED = range(5)
"""How a request ended: done; not in time; the key that ends waits was set; nonsense, twice."""

LENGTH = Struct("<I")
NUMBER = Struct("<q")
MOST_NUMBER = (1 << 63) - 1
LIMIT = Struct("<Q")
"""Milliseconds of a wait."""
_HEAD = Struct("<IIB")  # length, number, and operation or status
_HEAD_REST = _HEAD.size - LENGTH.size  # the length does not count itself
MOST_VALUE_BYTES = MOST_BYTES - _HEAD_REST
_LONG = 1 << 16  # bytes: to copy less costs less than to send it as a piece of its own
_INSTEAD = "Send large data by a collective."
_FEW = 8  # fields: all operations on a single key have less
_FEW_LENGTHS = [Struct(f"<{1 + num_fields}I") for num_fields in range(_FEW)]
_FEW_HEADS = [Struct(f"<IIB{1 + num_fields}I") for num_fields in range(_FEW)]


class TooLongError(Exception):
    """Values that are asked for together are too long for a reply."""


class MalformedError(Exception):
    """What came is not a message of a store. Its text is the receiver's own, and short."""


def _lengths_of(num_fields: int) -> Struct:
    return _FEW_LENGTHS[num_fields] if num_fields < _FEW else Struct(f"<{1 + num_fields}I")


def pack(fields: Sequence[bytes]) -> bytes:
    """Return byte strings as one: how many they are, how long each is, and they themselves."""
    num_fields = len(fields)
    return b"".join((_lengths_of(num_fields).pack(num_fields, *map(len, fields)), *fields))


def unpack(packed: bytes | memoryview, at: int = 0, end: int | None = None) -> list[bytes]:
    """Return the byte strings in a packed one, or in a part of it."""
    end = len(packed) if end is None else end
    num_fields = LENGTH.unpack_from(packed, at)[0] if at + LENGTH.size <= end else end
    start = at + LENGTH.size * (1 + num_fields)
    if start > end:
        raise MalformedError("fields without their lengths")
    fields = []
    for length in _lengths_of(num_fields).unpack_from(packed, at)[1:]:
        fields.append(bytes(packed[start : start + length]))
        start += length
    if start != end:
        raise MalformedError("fields of other lengths than their message")
    return fields


def request(number: int, operation: int, fields: Sequence[bytes]) -> bytes:
    lengths = [*map(len, fields)]
    num_fields = len(lengths)
    length = _HEAD_REST + LENGTH.size * (1 + num_fields) + sum(lengths)
    if length > MOST_BYTES:
        raise ValueError(
            f"keys and values of a call must have less than {MOST_BYTES} bytes, got {sum(lengths)}. {_INSTEAD}"
        )
    head = _FEW_HEADS[num_fields] if num_fields < _FEW else Struct(f"<IIB{1 + num_fields}I")
    return b"".join((head.pack(length, number, operation, num_fields, *lengths), *fields))


def values(found: Sequence[bytes]) -> bytes:
    """Return values that were asked for together; raise TooLongError if they do not fit into a reply."""
    num_bytes = sum(map(len, found)) + LENGTH.size * (1 + len(found))
    if num_bytes > MOST_VALUE_BYTES:
        raise TooLongError(f"values of a reply must have less than {MOST_BYTES} bytes, got {num_bytes}. {_INSTEAD}")
    return pack(found)


def reply(number: int, status: int, value: bytes = b"") -> Sequence[bytes]:
    """Return the reply to a request, in pieces: a long value stays what it is, however many are told it."""
    head = _HEAD.pack(len(value) + _HEAD_REST, number, status)
    return (head + value,) if len(value) < _LONG else (head, value)


def next_request(received: bytes | memoryview, at: int) -> tuple[int, int, list[bytes], int] | None:
    """Return number, operation and fields of the request at a place, and the next place; None if it is incomplete."""
    start = at + _HEAD.size
    if len(received) < start:
        return None
    length, number, operation = _HEAD.unpack_from(received, at)
    _check_length(length)
    end = at + LENGTH.size + length
    return (number, operation, unpack(received, start, end), end) if len(received) >= end else None


def next_reply(received: bytes) -> tuple[int, int, bytes, int] | None:
    """Return number, status and value of the first reply, and where the next begins; None if it is incomplete."""
    if len(received) < _HEAD.size:
        return None
    length, number, status = _HEAD.unpack_from(received)
    _check_length(length)
    end = LENGTH.size + length
    return (number, status, received[_HEAD.size : end], end) if len(received) >= end else None


def num_missing(received: bytes | bytearray) -> int:
    """Return how many bytes of the first message are still to come at least."""
    if len(received) < LENGTH.size:
        return _HEAD.size - len(received)
    length: int = LENGTH.unpack_from(received)[0]
    _check_length(length)
    return LENGTH.size + length - len(received)


def _check_length(length: int) -> None:
    if not _HEAD_REST <= length <= MOST_BYTES:
        raise MalformedError(f"a message of {length} bytes")
