"""How a process and the store of its job prove to each other that they know the same secret, without sockets.

The store proves first, so that a client gives nothing away but random bytes to whatever has opened the door::

    client -> store   MAGIC  nonce
    store  -> client  nonce  length  credential  MAC(server, ..., credential)
    client -> store   MAC(client, ..., hello)  length  hello
    store  -> client  MAC(welcome, ..., answer)  length  answer

The credential is public: what some clients need to find out the secret, or nothing. Each MAC covers both nonces, so a
recorded handshake is of no use; a label of its own, so what one side said cannot be said back to it; and where the
store is, as dialled and as bound, so nobody can pass it on from another port. Nothing is encrypted: one who can change
what is on the wire is not kept out.

Keyed BLAKE2b is a MAC by construction (RFC 7693); HMAC would load OpenSSL, which takes longer than all the rest.
"""

from __future__ import annotations

from _operator import _compare_digest  # hmac's, which would load OpenSSL
from posix import urandom
from struct import Struct

from distman._store.frames import LENGTH, MalformedError, pack, unpack

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from collections.abc import Callable

try:
    from _blake2 import blake2b
except ImportError:  # an interpreter that has OpenSSL's only
    from hashlib import blake2b

MAGIC = b"distman1"
NONCE_BYTES = 16  # drawn anew for each handshake: 128 bits do not come twice
MAC_BYTES = 32  # 256 bits: nobody hits them by trying
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
MOST_CREDENTIAL_BYTES = 4096  # munge's have some 300
CHALLENGE_HEAD_BYTES = NONCE_BYTES + LENGTH.size
CHALLENGE_BYTES = CHALLENGE_HEAD_BYTES + MAC_BYTES  # and the credential
MOST_HELLO_BYTES = 64  # nobody has proved anything when it is read
MOST_ANSWER_BYTES = 1024

MEMBER, WATCHER, VISITOR = range(1, 4)
"""What a client is: a rank, whose end is the end of the rank; another connection of it; one that only tells or asks."""

NO_SECRET = bytes(MAC_BYTES)
"""What is proved where nothing is secret: that both speak the same language, and mean the same job."""

_HELLO = Struct("<BqI")


class HandshakeError(Exception):
    """The other side is not what it should be. Its text is this side's own, and short."""


def mac(key: bytes, *fields: bytes) -> bytes:
    """Return what proves that somebody who has the key, of 64 bytes at most, meant these fields."""
    return blake2b(pack(fields), digest_size=MAC_BYTES, key=key).digest()


def door_key(secret: bytes | None, job: bytes) -> bytes:
    """Return what both sides of a handshake have to know."""
    return mac(blake2b(secret).digest() if secret else NO_SECRET, b"door", job)


def job_key(secret: bytes, session: bytes) -> bytes:
    """Return the key with which the ranks of a job prove things to each other, later."""
    return mac(blake2b(secret).digest(), b"job", session)


class Hello:
    """What a client says of itself."""

    def __init__(self, role: int, rank: int, pid: int) -> None:
        self.role = role  # MEMBER, WATCHER or VISITOR
        self.rank = rank  # -1 where it has none yet
        self.pid = pid

    def pack(self) -> bytes:
        return _HELLO.pack(self.role, self.rank, self.pid)

    @classmethod
    def unpack(cls, packed: bytes) -> Hello:
        if len(packed) != _HELLO.size or packed[0] not in (MEMBER, WATCHER, VISITOR):
            raise MalformedError("no hello")
        return cls(*_HELLO.unpack(packed))


class Answer:
    """What a client is told that has proved itself."""

    def __init__(self, session: bytes, pid: int, drawn_key: bytes) -> None:
        self.session = session  # name of this opening of the store
        self.pid = pid  # of the process that serves it
        # drawn for the job by the store, where nobody can read it on the way; empty elsewhere
        self.drawn_key = drawn_key

    def pack(self) -> bytes:
        return pack([self.session, LENGTH.pack(self.pid), self.drawn_key])

    @classmethod
    def unpack(cls, packed: bytes) -> Answer:
        fields = unpack(packed)
        if len(fields) != 3 or len(fields[1]) != LENGTH.size:
            raise MalformedError("no answer")
        return cls(fields[0], LENGTH.unpack(fields[1])[0], fields[2])


class ClientSide:
    """The side that dials."""

    def __init__(self, key: bytes, where: bytes, find_key: Callable[[bytes], bytes] | None = None) -> None:
        self._key = key
        self._where = where
        self._find_key = find_key  # returns the key from the store's credential; None where it is known
        self._nonces = urandom(NONCE_BYTES)

    def opening(self) -> bytes:
        return MAGIC + self._nonces

    def proof(self, challenge: bytes, hello: Hello) -> bytes:
        """Return the second message, in answer to the store's proof."""
        nonces = self._nonces + challenge[:NONCE_BYTES]
        credential = challenge[CHALLENGE_HEAD_BYTES:-MAC_BYTES]
        if self._find_key is not None:
            self._key = self._find_key(credential)
        expected = mac(self._key, b"server", nonces, self._where, credential)
        _check(challenge[NONCE_BYTES:], LENGTH.pack(len(credential)) + credential + expected)
        self._nonces = nonces
        packed = hello.pack()
        return mac(self._key, b"client", nonces, self._where, packed) + LENGTH.pack(len(packed)) + packed

    def answer(self, proof: bytes, packed: bytes) -> Answer:
        _check(proof, mac(self._key, b"welcome", self._nonces, self._where, packed))
        return Answer.unpack(packed)


class ServerSide:
    """The side that is dialled."""

    def __init__(self, key: bytes, where: bytes, opening: bytes, credential: bytes = b"") -> None:
        if len(opening) != OPENING_BYTES or not opening.startswith(MAGIC):
            raise MalformedError("no opening")
        self._key = key
        self._where = where
        self._credential = credential
        self._nonce = urandom(NONCE_BYTES)
        self._nonces = opening[len(MAGIC) :] + self._nonce

    def challenge(self) -> bytes:
        proof = mac(self._key, b"server", self._nonces, self._where, self._credential)
        return self._nonce + LENGTH.pack(len(self._credential)) + self._credential + proof

    def hello(self, proof: bytes, packed: bytes) -> Hello:
        _check(proof, mac(self._key, b"client", self._nonces, self._where, packed))
        return Hello.unpack(packed)

    def welcome(self, answer: Answer) -> bytes:
        packed = answer.pack()
        return mac(self._key, b"welcome", self._nonces, self._where, packed) + LENGTH.pack(len(packed)) + packed


def _check(proof: bytes, expected: bytes) -> None:
    if not _compare_digest(proof, expected):
        raise HandshakeError("it does not know this job, or the job's secret")
