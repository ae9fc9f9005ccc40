"""What samplers of the program's own yield: the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from torch.utils.data import DistributedSampler

from distman._base.arguments import check_number
from distman._base.seeds import seed_generators, seed_of
from distman.data._randomness import generators_preserved, seed_generators_of

T = TypeVar("T")


def length_of_sampler(name: str, sampler: Any) -> int:
    """Return how many indices, or batches, a sampler for all ranks yields in an epoch, at least one."""
    inner = getattr(sampler, "sampler", None)
    if any(isinstance(one, DistributedSampler) for one in (sampler, inner)):
        raise TypeError(
            f"{name} must yield the samples of all ranks, got a DistributedSampler. Leave it out: the ranks share the "
            "dataset."
        )
    if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator) or not isinstance(sampler, Sized):
        raise TypeError(
            f"{name} must be iterable in each epoch and have a length, got {sampler!r}. Define __iter__ and __len__, "
            "or pass a DataLoader."
        )
    return check_number(f"the length of {name}", len(sampler))


class EpochSampler(Generic[T]):
    """A sampler whose epochs are the same on all ranks, and in every run, whatever generators it draws from."""

    def __init__(self, name: str, sampler: Iterable[T], seed: int) -> None:
        self._length = length_of_sampler(name, sampler)
        self._name, self._sampler, self._seed = name, sampler, seed
        self._latest: tuple[int, list[T]] | None = None

    def __len__(self) -> int:
        return self._length

    def epoch(self, epoch: int) -> list[T]:
        """Return what it yields in an epoch, as many as its length says."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._draw(epoch)
        return self._latest[1]

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(repr(self.epoch(epoch)).encode())

    def _draw(self, epoch: int) -> list[T]:
        one: Any
        for one in (self._sampler, getattr(self._sampler, "sampler", None)):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        with generators_preserved():
            seed_generators(seed_of(self._seed, epoch))
            seed_generators_of(self._sampler, seed_of(self._seed, epoch))
            drawn = list(self._sampler)
        if len(drawn) != self._length:
            raise ValueError(
                f"{self._name} must yield as many as its length says, {self._length}, got {len(drawn)} in epoch "
                f"{epoch}. Mend its __len__."
            )
        return drawn
