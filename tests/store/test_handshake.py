"""Both sides of the handshake, and everybody who is neither of them."""

import itertools

import pytest

from distman._store import handshake
from distman._store.frames import LENGTH, MalformedError
from distman._store.handshake import (
    CHALLENGE_BYTES,
    MAC_BYTES,
    MAGIC,
    MEMBER,
    OPENING_BYTES,
    WATCHER,
    Answer,
    ClientSide,
    HandshakeError,
    Hello,
    ServerSide,
    door_key,
    job_key,
)

KEY = door_key(b"s" * 32, b"job 1")
WHERE = b"tcp 1234"
HEAD = MAC_BYTES + LENGTH.size
REFUSED = (HandshakeError, MalformedError)


def cut(message):
    """A message with a length, as who reads it by that length takes it apart; None where it would go on reading."""
    if len(message) < HEAD:
        return None
    (length,) = LENGTH.unpack(message[MAC_BYTES:HEAD])
    return (message[:MAC_BYTES], message[HEAD:]) if length == len(message) - HEAD else None


def shake_hands(change=lambda _name, message: message, *, client=(KEY, WHERE), server=(KEY, WHERE)):
    """Return what each side learned, with every message changed on its way."""
    caller = ClientSide(*client)
    serving = ServerSide(*server, change("opening", caller.opening()))
    proof = cut(change("proof", caller.proof(change("challenge", serving.challenge()), Hello(MEMBER, 3, 812))))
    if proof is None:
        raise HandshakeError
    hello = serving.hello(*proof)
    welcome = cut(change("welcome", serving.welcome(Answer(b"session", 77, b""))))
    if welcome is None:
        raise HandshakeError
    return hello, caller.answer(*welcome)


def test_both_sides_learn_who_the_other_is():
    hello, answer = shake_hands()
    assert (hello.role, hello.rank, hello.pid) == (MEMBER, 3, 812)
    assert (answer.session, answer.pid, answer.drawn_key) == (b"session", 77, b"")


def lengths():
    found = {}
    shake_hands(lambda name, message: found.setdefault(name, message))
    return {name: len(message) for name, message in found.items()}


def test_the_lengths_are_those_by_which_messages_are_read():
    assert lengths()["opening"] == OPENING_BYTES
    assert lengths()["challenge"] == CHALLENGE_BYTES
    assert lengths()["proof"] <= HEAD + handshake.MOST_HELLO_BYTES


@pytest.mark.parametrize("name", ["opening", "challenge", "proof", "welcome"])
def test_no_byte_of_a_message_can_be_changed(name):
    for place, bit in itertools.product(range(lengths()[name]), (0, 7)):

        def flip(which, message, place=place, bit=bit):
            if which != name:
                return message
            return message[:place] + bytes([message[place] ^ 1 << bit]) + message[place + 1 :]

        with pytest.raises(REFUSED):
            shake_hands(flip)


@pytest.mark.parametrize("name", ["opening", "challenge", "proof", "welcome"])
def test_a_message_of_an_earlier_handshake_is_refused(name):
    """All but the opening, which proves nothing: a store answers it, and refuses what comes next."""
    earlier = {}
    shake_hands(lambda which, message: earlier.setdefault(which, message))
    with pytest.raises(REFUSED):
        shake_hands(lambda which, message: earlier[which] if which == name else message)


def test_a_whole_client_recorded_earlier_is_refused():
    earlier = {}
    shake_hands(lambda which, message: earlier.setdefault(which, message))
    serving = ServerSide(KEY, WHERE, earlier["opening"])
    with pytest.raises(HandshakeError):
        serving.hello(*cut(earlier["proof"]))


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(["opening", "challenge", "proof", "welcome"], 2)])
def test_a_message_in_the_place_of_another_is_refused(one, other):
    seen = {}

    def swap(which, message):
        seen[which] = message
        return seen.get(other, b"x" * len(message)) if which == one else message

    with pytest.raises(REFUSED):
        shake_hands(swap)


def test_a_proof_that_is_said_back_is_refused():
    """Who does not know the key asks a store to prove itself, and shows that proof as its own."""
    serving = ServerSide(KEY, WHERE, MAGIC + bytes(16))
    proved = serving.challenge()[-MAC_BYTES:]
    for packed in (b"", Hello(MEMBER, 3, 812).pack()):
        with pytest.raises(HandshakeError):
            serving.hello(proved, packed)


def test_who_dials_a_stranger_gives_nothing_away():
    """Only random bytes come before the store's proof, and they differ each time."""
    first, second = ClientSide(KEY, WHERE), ClientSide(KEY, WHERE)
    assert first.opening()[: len(MAGIC)] == second.opening()[: len(MAGIC)] == MAGIC
    assert first.opening() != second.opening()
    with pytest.raises(HandshakeError, match="does not know this job, or the job's secret"):
        first.proof(b"\0" * CHALLENGE_BYTES, Hello(MEMBER, 0, 1))


@pytest.mark.parametrize(
    "other",
    [
        (door_key(b"s" * 32, b"job 2"), WHERE),
        (door_key(b"t" * 32, b"job 1"), WHERE),
        (door_key(None, b"job 1"), WHERE),
        (KEY, b"tcp 1235"),
        (KEY, b"unix 1234"),
    ],
    ids=["another job", "another secret", "no secret", "passed on from another port", "another kind of socket"],
)
def test_who_means_something_else_is_refused_by_both(other):
    with pytest.raises(HandshakeError):
        shake_hands(client=other)
    serving = ServerSide(KEY, WHERE, ClientSide(*other).opening())
    caller = ClientSide(*other)
    forged = caller.proof(ServerSide(*other, caller.opening()).challenge(), Hello(MEMBER, 0, 1))
    with pytest.raises(HandshakeError):
        serving.hello(*cut(forged))


def test_a_role_and_a_rank_are_part_of_the_proof():
    caller = ClientSide(KEY, WHERE)
    serving = ServerSide(KEY, WHERE, caller.opening())
    proof, _ = cut(caller.proof(serving.challenge(), Hello(MEMBER, 3, 812)))
    for other in (Hello(WATCHER, 3, 812), Hello(MEMBER, 0, 812), Hello(MEMBER, 3, 813)):
        with pytest.raises(HandshakeError):
            serving.hello(proof, other.pack())


def test_fields_of_a_proof_cannot_be_shifted_into_each_other():
    assert handshake.mac(KEY, b"ab", b"c") != handshake.mac(KEY, b"a", b"bc")


def test_keys_differ_by_job_session_and_purpose():
    keys = [door_key(b"s" * 32, b"1"), door_key(b"s" * 32, b"2"), job_key(b"s" * 32, b"1"), job_key(b"s" * 32, b"2")]
    assert len({*keys}) == 4
    assert door_key(b"long" * 100, b"1") != door_key(b"long" * 99, b"1")


@pytest.mark.parametrize("packed", [b"", b"\1", Hello(9, 0, 1).pack(), Hello(MEMBER, 0, 1).pack() + b"x"])
def test_a_hello_that_is_none_is_refused(packed):
    with pytest.raises(MalformedError):
        Hello.unpack(packed)


@pytest.mark.parametrize("packed", [b"", b"\0" * 16, Answer(b"", 1, b"").pack() + b"\0" * 4, b"\1"])
def test_an_answer_that_is_none_is_refused(packed):
    with pytest.raises(MalformedError):
        Answer.unpack(packed)
