"""Messages arrive whole or not at all, however the stream is cut, and nonsense is known before it costs anything."""

import pytest
from hypothesis import given, strategies

from distman._store import frames
from distman._store.frames import MalformedError

FIELDS = strategies.lists(strategies.binary(max_size=40), max_size=5)
NUMBERS = strategies.integers(0, 2**32 - 1)


@given(FIELDS)
def test_fields_are_what_was_packed(fields):
    assert frames.unpack(frames.pack(fields)) == fields


@given(NUMBERS, strategies.integers(0, 255), FIELDS)
def test_a_request_cut_at_any_length_is_not_complete(number, operation, fields):
    whole = frames.request(number, operation, fields)
    assert frames.next_request(b"...." + whole + b"next", 4) == (number, operation, fields, 4 + len(whole))
    assert {frames.next_request(whole[:length], 0) for length in range(len(whole))} == {None}


@given(NUMBERS, strategies.integers(0, 255), strategies.binary(max_size=40))
def test_a_reply_cut_at_any_length_says_what_is_missing(number, status, value):
    whole = b"".join(frames.reply(number, status, value))
    assert frames.next_reply(whole + b"next") == (number, status, value, len(whole))
    for length in range(len(whole)):
        assert frames.next_reply(whole[:length]) is None
        assert 0 < frames.num_missing(whole[:length]) <= len(whole) - length


@pytest.mark.parametrize("length", [0, 4, frames.MOST_BYTES + 1, 2**32 - 1])
def test_a_length_that_no_message_has_is_refused_before_the_message_comes(length):
    with pytest.raises(MalformedError, match=f"a message of {length} bytes"):
        frames.num_missing(frames.LENGTH.pack(length))
    with pytest.raises(MalformedError, match=f"a message of {length} bytes"):
        frames.next_request(frames.LENGTH.pack(length) + bytes(5), 0)
    with pytest.raises(MalformedError, match=f"a message of {length} bytes"):
        frames.next_reply(frames.LENGTH.pack(length) + bytes(5))


@pytest.mark.parametrize("packed", [b"", b"\1", b"\1\0\0\0", b"\1\0\0\0\3\0\0\0ab", b"\0\0\0\0x", b"\xff\xff\xff\xff"])
def test_fields_that_lead_beyond_their_message_are_refused(packed):
    length = frames.LENGTH.pack(5 + len(packed))
    with pytest.raises(MalformedError, match="fields"):
        frames.next_request(length + b"\1\0\0\0\1" + packed + b"what comes next", 0)


@given(strategies.binary(max_size=60))
def test_any_bytes_are_a_request_or_the_beginning_of_one_or_refused(noise):
    try:
        found = frames.next_request(noise, 0)
    except MalformedError:
        return
    assert found is None or 0 < found[-1] <= len(noise)


def test_a_value_beyond_the_limit_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr(frames, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="must have less than 100 bytes, got 96"):
        frames.request(1, frames.SET, [b"k" * 46, b"v" * 50])
