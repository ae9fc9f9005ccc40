"""Reading what another rank may delete at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distman._coordination.messages import decode_text

if TYPE_CHECKING:
    from torch.distributed import Store


_NOTHING = "-"  # no value of the protocol


def read_at_once(store: Store, key: str) -> str | None:
    """Return what a key holds, or None where there is none now: another rank may delete it at any moment."""
    # ``check`` and then ``get`` would wait for the store's timeout if the key was deleted in between. Comparing with a
    # value that is never there leaves the store as it is, and a key that is not there gives back that value.
    found = decode_text(store.compare_set(key, _NOTHING, _NOTHING))
    return found if found != _NOTHING else None
