"""What rank 0 tells the others of the job's store, where no address is known beforehand."""

from __future__ import annotations

import dataclasses
import hmac
import json

from distman._coordination.messages import Addresses, Port, decode
from distman._job.meeting.sockets import means_loopback
from distman._store.handshake import door_key, mac


class UnprovedError(Exception):
    """Who wrote an answer does not know the secret of the job."""


@dataclasses.dataclass(frozen=True)
class Told:
    """Where the store is."""

    addresses: Addresses
    port: Port
    job: str  # the name that rank 0 has given to this start

    def seal(self, key: str, secret: bytes | None) -> str:
        """Return it as a message for a place where anybody can write."""
        # The handshake proves to which port a connection leads, and not to which host. So an answer that is not proved
        # could lead to a program on another host that passes everything on.
        return json.dumps({"told": dataclasses.asdict(self), "proof": self._proof(key, secret)})

    def _proof(self, key: str, secret: bytes | None) -> str:
        text = json.dumps(dataclasses.asdict(self)).encode()
        return mac(door_key(secret, key.encode(errors="surrogateescape")), b"told", text).hex()


def useful_elsewhere(addresses: list[str]) -> tuple[str, ...]:
    """Return the addresses of a host without those that mean every other host itself, unless there are no others."""
    # There, another user's program may listen, and pass on what it hears.
    return tuple(address for address in addresses if not means_loopback(address)) or tuple(addresses)


def unseal(message: bytes, key: str, secret: bytes | None, what: str) -> Told:
    """Return what rank 0 has told; raise UnprovedError if it was somebody else, MalformedMessageError if nobody."""
    sealed = decode(message, _Sealed, what)
    if not hmac.compare_digest(sealed.proof.encode(), sealed.told._proof(key, secret).encode()):
        raise UnprovedError
    return sealed.told


@dataclasses.dataclass(frozen=True)
class _Sealed:
    told: Told
    proof: str
