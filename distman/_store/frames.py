"""The messages of a store: numbered requests, and a reply with the number of its request.

Numbers make an interrupted call harmless: the reply that nobody waited for is known by its number, and dropped.
A request is an operation and fields of bytes. Lengths come first, and are checked before anything is believed.
"""

from __future__ import annotations

from struct import Struct

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_BYTES = 1 << 30
"""Bytes of a message: what exceeds a gigabyte is no value of a store, but a length that somebody made up."""
MOST_FAILURE_BYTES = 1 << 20
"""Bytes of the failure that a store keeps for those who come later: one with a long traceback fits."""

SET, GET, ADD, CHECK, WAIT, COMPARE_SET, DELETE, NUM_KEYS = range(1, 9)
MULTI_GET, MULTI_SET, APPEND, ARRIVE, WILL, LEAVE, FAIL, SHUT = range(9, 17)
"""The operations; each function of operations.py says what its fields are."""

WITHOUT_REPLY = frozenset({SET, LEAVE})

OK, TIMED_OUT, GIVEN_UP, INVALID, MALFORMED = range(5)
"""How a request ended: done; not in time; the key that ends waits was set; nonsense, twice."""

LENGTH = Struct("<I")
NUMBER = Struct("<q")
MOST_NUMBER = (1 << 63) - 1
LIMIT = Struct("<Q")
"""Milliseconds of a wait."""
_REQUEST = Struct("<IIB")
_REPLY = Struct("<IIB")
_REQUEST_REST = _REQUEST.size - LENGTH.size  # the length does not count itself
_REPLY_REST = _REPLY.size - LENGTH.size


class MalformedError(Exception):
    """What came is not a message of a store. Its text is the receiver's own, and short."""


def pack(fields: Iterable[bytes]) -> bytes:
    """Return byte strings as one, each after its length."""
    return b"".join([part for field in fields for part in (LENGTH.pack(len(field)), field)])


def unpack(packed: bytes, at: int = 0, end: int | None = None) -> list[bytes]:
    """Return the byte strings in a packed one, or in a part of it.

    Raises:
        MalformedError: A length leads beyond the end.
    """
    end = len(packed) if end is None else end
    fields = []
    while at < end:
        start = at + LENGTH.size
        if start > end:
            raise MalformedError("a field without its length")
        at = start + LENGTH.unpack_from(packed, at)[0]
        if at > end:
            raise MalformedError("a field that is longer than its message")
        fields.append(packed[start:at])
    return fields


def request(number: int, operation: int, fields: Sequence[bytes]) -> bytes:
    """Return a request.

    Raises:
        ValueError: It is too long.
    """
    packed = pack(fields)
    if len(packed) > MOST_BYTES - _REQUEST.size:
        raise ValueError(
            f"a value and its key must have less than {MOST_BYTES} bytes, got {len(packed)}. "
            "Send large data by a collective."
        )
    return _REQUEST.pack(len(packed) + _REQUEST_REST, number, operation) + packed


def reply(number: int, status: int, value: bytes = b"") -> bytes:
    """Return the reply to a request."""
    return _REPLY.pack(len(value) + _REPLY_REST, number, status) + value


def next_request(received: bytes, at: int) -> tuple[int, int, list[bytes], int] | None:
    """Return the request that begins at a place in what was received, and where the next one begins.

    Returns:
        Number, operation, fields and the next place; None while the request is not complete.

    Raises:
        MalformedError: It is no request.
    """
    if len(received) - at < LENGTH.size:
        return None
    end = at + LENGTH.size + _checked_length(received, at, _REQUEST_REST)
    if len(received) < end:
        return None
    _, number, operation = _REQUEST.unpack_from(received, at)
    return number, operation, unpack(received, at + _REQUEST.size, end), end


def next_reply(received: bytes) -> tuple[int, int, bytes, int] | None:
    """Return the reply that what was received begins with: number, status, value, and where the next one begins.

    Raises:
        MalformedError: It is no reply.
    """
    if num_missing(received) > 0:
        return None
    length, number, status = _REPLY.unpack_from(received)
    end = LENGTH.size + length
    return number, status, received[_REPLY.size : end], end


def num_missing(received: bytes | bytearray) -> int:
    """Return how many bytes of the first message are still to come at least.

    Raises:
        MalformedError: It has no length of a message.
    """
    if len(received) < LENGTH.size:
        return _REPLY.size - len(received)
    return LENGTH.size + _checked_length(received, 0, _REPLY_REST) - len(received)


def _checked_length(received: bytes | bytearray, at: int, least: int) -> int:
    length: int = LENGTH.unpack_from(received, at)[0]
    if not least <= length <= MOST_BYTES:
        raise MalformedError(f"a message of {length} bytes")
    return length
