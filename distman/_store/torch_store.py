"""The store of a job for torch, whose groups and meshes meet over it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from distman._store.client import Client
from distman._store.connection import StoreLostError, StoreTimeoutError
from distman._store.handshake import WATCHER

P = ParamSpec("P")
T = TypeVar("T")


def _with_errors_of_torch(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method raise what torch's stores raise: torch's code and its users' know no other errors."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except StoreLostError as error:
            raise dist.DistNetworkError(str(error)) from error
        except StoreTimeoutError as error:
            raise dist.DistStoreError(f"wait timeout, {method.__name__}{args[1:]}: not set in time") from error

    return call


class TorchStore(dist.Store):
    """A part of the store of a job, or all of it."""

    # torch holds the half of a store that is written in C++; when the other half, this object, is collected, calls
    # fail. So the code that opens the store keeps it, and it keeps its parts and clones.

    def __init__(self, client: Client, prefix: str = "") -> None:
        super().__init__()
        self.client = client
        self.prefix = prefix
        self._parts: dict[str, TorchStore] = {}
        self._clones: list[TorchStore] = []

    def part(self, name: str) -> TorchStore:
        """Return the part of the store whose keys begin with a name, as those of torch's PrefixStore do."""
        if name not in self._parts:
            self._parts[name] = TorchStore(self.client, f"{self.prefix}{name}/")
            self._parts[name].set_timeout(self._timeout)
        return self._parts[name]

    def full_key(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    @_with_errors_of_torch
    def again(self, role: int, patience: float = math.inf) -> TorchStore:
        """Return the same part over connections of its own; the caller keeps it."""
        other = TorchStore(self.client.again(role, patience), self.prefix)
        other.set_timeout(self._timeout)
        return other

    def clone(self, patience: float = math.inf) -> TorchStore:
        """Return the same part over connections of its own, for torch, which keeps half of it only.

        One thread may use it with some seconds of ``patience`` for each reply; then the store counts as lost.
        """
        self._clones.append(self.again(WATCHER, patience))
        return self._clones[-1]

    def close(self) -> None:
        for store in (*self._parts.values(), *self._clones):
            store.close()
        self.client.close()

    @_with_errors_of_torch
    def set(self, key: str, value: str | bytes) -> None:
        self.client.set(self.full_key(key), _bytes(value))

    @_with_errors_of_torch
    def get(self, key: str) -> bytes:
        return self.client.get(self.full_key(key), self._timeout.total_seconds())

    @_with_errors_of_torch
    def add(self, key: str, value: int) -> int:
        return self.client.add(self.full_key(key), value)

    @_with_errors_of_torch
    def check(self, keys: Sequence[str]) -> bool:
        return self.client.check(self._keys(keys))

    @_with_errors_of_torch
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None, *, unless: bytes = b"") -> None:
        """Wait until all keys are set, or ``unless``, the :meth:`full_key` of one that ends the wait: GaveUpError."""
        limit = self._timeout if timeout is None else timeout
        self.client.wait(self._keys(keys), limit.total_seconds(), unless)

    @_with_errors_of_torch
    def has_come(self, keys: Sequence[str], limit: float) -> bool:
        """Wait until all keys are set, for ``limit`` seconds at most, and return whether they are."""
        try:
            self.client.wait(self._keys(keys), limit)
        except StoreTimeoutError:
            return False
        return True

    @_with_errors_of_torch
    def arrive(self, counter: str, size: int, outcome: tuple[str, str], limit: float) -> bytes:
        """Count this one as come, wait until so many have, and return the outcome; see :meth:`Client.arrive`."""
        key, value = outcome
        return self.client.arrive(self.full_key(counter), size, (self.full_key(key), value.encode()), limit)

    @_with_errors_of_torch
    def register_will(
        self, key: str, counter: str, *, unless: str, if_closed: str | bytes, if_unreachable: str | bytes
    ) -> None:
        self.client.register_will(
            self.full_key(key),
            self.full_key(counter),
            unless=self.full_key(unless),
            if_closed=_bytes(if_closed),
            if_unreachable=_bytes(if_unreachable),
        )

    @_with_errors_of_torch
    def revoke_will(self) -> None:
        self.client.revoke_will()

    @_with_errors_of_torch
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self.client.compare_set(self.full_key(key), _bytes(expected_value), _bytes(desired_value))

    @_with_errors_of_torch
    def delete_key(self, key: str) -> bool:
        return self.client.delete(self.full_key(key))

    @_with_errors_of_torch
    def delete_keys(self, keys: Sequence[str]) -> None:
        self.client.delete(*self._keys(keys))

    @_with_errors_of_torch
    def num_keys(self) -> int:
        return self.client.num_keys()

    @_with_errors_of_torch
    def append(self, key: str, value: str | bytes) -> None:
        self.client.append(self.full_key(key), _bytes(value))

    @_with_errors_of_torch
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.client.multi_get(self._keys(keys), self._timeout.total_seconds())

    @_with_errors_of_torch
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.client.multi_set(zip(self._keys(keys), map(_bytes, values), strict=True))

    def has_extended_api(self) -> bool:
        return True

    deleteKey = delete_key  # noqa: N815 - the names under which torch's C++ looks for them
    getNumKeys = num_keys  # noqa: N815

    @property
    def _timeout(self) -> timedelta:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
        return timeout

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self.full_key(key) for key in keys]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


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
        except dist.DistStoreError:
            raise TimeoutError(
                f"keys {keys} must be set within {limit:g} s, got none. See what the other ranks do."
            ) from None

    def get(self, key: str) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)
