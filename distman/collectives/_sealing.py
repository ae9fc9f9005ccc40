"""What makes sure that a pickle comes from a rank of this job before it is opened: opening it may run any code."""

from __future__ import annotations

import hashlib
import hmac
import json

from distman._job.groups.registry import Group
from distman.errors import DistmanError
from distman.manager import DistributedManager

_SEAL_BYTES = 32


class ForeignPickleError(DistmanError):
    """What was received was not sent by the rank that should have."""


class Seal:
    """Seals the pickles of one call, under a key that only the ranks of the job know; all make one for each call.

    A pickle of an earlier call, or of another rank or group, does not pass for one of this. Where the job has no key,
    since nothing protects it or other code has made its group, nothing is sealed.
    """

    def __init__(self, group: Group) -> None:
        rendezvous = DistributedManager()._state.job.rendezvous
        self._key = rendezvous.job_store.key if rendezvous is not None else b""
        self._group = group
        self._call = next(group.seals)

    def put_on(self, text: bytes) -> bytes:
        return self._of(text, self._group.rank) + text if self._key else text

    def take_off(self, sealed: bytes, src: int) -> bytes:
        """Return the pickle of a rank of the group, if that rank has sealed it."""
        if not self._key:
            return sealed
        text = sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:_SEAL_BYTES], self._of(text, src)):
            rank = self._group.ranks[src]
            raise ForeignPickleError(
                f"what came from rank {rank} must be sealed by that rank in the same call, got something else. Let all "
                "ranks make the same calls; if they do, a stranger sends to this job: see who can reach its hosts."
            )
        return text

    def _of(self, text: bytes, src: int) -> bytes:
        what = json.dumps([self._group.name, self._group.ranks, self._call, src]).encode()
        digest = hashlib.blake2b(what, digest_size=_SEAL_BYTES, key=self._key, person=b"distman pickle")
        digest.update(text)
        return digest.digest()
