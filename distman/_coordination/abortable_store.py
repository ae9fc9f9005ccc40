"""A store whose waits end when another rank says that there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from distman._store.torch_store import TorchStore


class AbortableStore(TorchStore):
    """The same part of a store, over which gloo waits no longer than some seconds, or until a key is set.

    gloo waits in its store for the addresses of the members of a new group, for the whole timeout of collectives.
    """

    def __init__(self, store: TorchStore, failure_key: str, timeout: float) -> None:
        super().__init__(store.client, store.prefix)
        self._failure_key = self.full_key(failure_key)
        self._limit = timeout  # seconds, even where the caller would wait longer: the others are here already

    def wait(self, keys: Sequence[str], timeout: timedelta = timedelta.max) -> None:  # type: ignore[override]
        """Wait until the keys are set; raises GaveUpError if the failure key is first, else TimeoutError."""
        limit = min(timeout.total_seconds(), self._limit)
        try:
            super().wait(keys, timedelta(seconds=limit), unless=self._failure_key)
        except DistStoreError:
            raise TimeoutError(
                f"keys {keys} must be set within {limit:g} s, got none. See what the other ranks do."
            ) from None

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is set, or raise as :meth:`wait`."""
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys once all are set, or raise as :meth:`wait`."""
        self.wait(keys)
        return super().multi_get(keys)
