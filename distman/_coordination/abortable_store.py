"""A store whose waits end when somebody says that there is nothing to wait for."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistStoreError, Store

from distman._store.torch_store import TorchStore


class AbortableStore(Store):
    """Hands everything on to another store, but waits only as long as a key is not set there.

    gloo waits in its store for the addresses of the members of a new group, for the whole timeout of collectives.
    """

    def __init__(self, store: TorchStore, failure_key: str, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._failure_key = failure_key
        self._timeout = timeout  # seconds, even where the caller would wait longer: the others are here already

    def wait(self, keys: list[str], timeout: timedelta = timedelta.max) -> None:
        """Wait until the keys are set; raises GaveUpError if the failure key is first, else TimeoutError."""
        limit = min(timeout.total_seconds(), self._timeout)
        try:
            self._store.wait(keys, timedelta(seconds=limit), unless=self._store.full_key(self._failure_key))
        except DistStoreError:
            raise TimeoutError(
                f"keys {keys} must be set within {limit:g} s, got none. See what the other ranks do."
            ) from None

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is set, or raise as :meth:`wait`."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys once all are set, or raise as :meth:`wait`."""
        self.wait(keys)
        return self._store.multi_get(keys)

    def has_extended_api(self) -> bool:
        """Return that there is :meth:`multi_get`: of what else torch could mean by it gloo asks for nothing."""
        return True

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)
