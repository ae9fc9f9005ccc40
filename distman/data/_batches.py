"""Which samples each rank takes at each step: arithmetic, the same on all ranks, without communication."""

from __future__ import annotations

import abc
import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DistributedSampler, Sampler

from distman._base.arguments import check_number
from distman._base.seeds import seed_generators, seed_of
from distman.collectives import GroupLike, resolve_group
from distman.data._randomness import generators_preserved, seed_generators_of
from distman.topology import split_sizes

_NO_SAMPLES = "See whether its files were found."

T = TypeVar("T")


class Batch(list[int]):
    """Indices of samples, and the seed of the random numbers used while they are read."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class EpochSampler(Generic[T]):
    """A sampler whose epochs are the same on all ranks, and in every run, whatever generators it draws from."""

    def __init__(self, name: str, sampler: Iterable[T], seed: int) -> None:
        inner = getattr(sampler, "sampler", None)
        if any(isinstance(one, DistributedSampler) for one in (sampler, inner)):
            raise TypeError(
                f"{name} must yield the samples of all ranks, got a DistributedSampler. Leave it out: the ranks share "
                "the dataset."
            )
        if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator) or not isinstance(sampler, Sized):
            raise TypeError(
                f"{name} must be iterable in each epoch and have a length, got {sampler!r}. Define __iter__ and "
                "__len__, or pass a DataLoader."
            )
        self._length = check_number(f"the length of {name}", len(sampler))
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


class EpochBatches(Sampler[list[int]], abc.ABC):
    """Batches of one epoch after another, from any position within one: the number of samples drawn of it before."""

    given: EpochSampler[Any] | None = None
    """What the program has passed to draw with, if anything."""
    layout: list[int]
    """What a position refers to; positions saved with another layout do not apply."""
    end: int
    """Position from which on an epoch has no step any more."""
    stride: int
    """By how much a step advances the position."""

    def __init__(self, batch_size: int, seed: int, group: GroupLike) -> None:
        members = resolve_group(group)
        self.batch_size, self.seed = check_number("batch_size", batch_size), operator.index(seed)
        self._rank, self.num_ranks = members.rank, members.size
        self._epoch, self._position = 0, 0

    def __len__(self) -> int:
        """Return the number of steps of a full epoch, the same on all ranks."""
        return -(-self.end // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each remaining step of the epoch."""
        epoch, position = self._epoch, self._position
        # Only when the first batch is requested: a DataLoader may make iterators that it never uses.
        self.start_at(epoch + 1)
        for step, part in enumerate(self.parts(epoch, position)):
            yield Batch(part.tolist(), seed_of(self.seed, epoch, position + step * self.stride, self._rank))

    def start_at(self, epoch: int, position: int = 0) -> None:
        """Let the next iteration run through the rest of this epoch, and later ones through the next epochs."""
        self._epoch, self._position = epoch, position

    @abc.abstractmethod
    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:
        """Return an iterator over this rank's number of samples and that of all, for each step as :meth:`parts`."""

    @abc.abstractmethod
    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        """Return an iterator over the indices of this rank's samples, for each step of an epoch from a position on."""


class TrainingBatches(EpochBatches):
    """A batch sampler that draws global batches in each epoch, and gives this rank its part of each.

    The global batches depend on seed and epoch only, so they are the same on any number of ranks, as long as ranks
    times ``batch_size`` is. The parts of a batch differ by at most one sample. If the last batch has fewer samples than
    there are ranks, a rank without a part reads a sample of another rank, and :meth:`counts` says 0.

    A position is a number of samples that all ranks have drawn, and the layout the number of samples.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        group: GroupLike = None,
    ) -> None:
        super().__init__(batch_size, seed, group)
        self._num_samples = check_number("the length of the dataset", num_samples, remedy=_NO_SAMPLES)
        self._shuffle = shuffle
        if sampler is not None:
            self.given = EpochSampler("sampler", sampler, self.seed)
            self._num_samples = len(self.given)
        self.layout, self.stride = [self._num_samples], self.batch_size * self.num_ranks
        self.end = self._num_samples - (self.stride - 1 if drop_last else 0)

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the same in each
        for start in range(position, self.end, self.stride):
            num_total = min(self.stride, self._num_samples - start)
            yield num_total // self.num_ranks + (self._rank < num_total % self.num_ranks), num_total

    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        order = self._order(epoch)
        for number, (num_own, num_total) in enumerate(self.counts(epoch, position)):
            quotient, rest = divmod(num_total, self.num_ranks)
            first = position + number * self.stride
            start = first + self._rank * quotient + min(self._rank, rest)
            yield order[start : start + num_own] if num_own else order[first : first + 1]

    def _order(self, epoch: int) -> torch.Tensor:
        if self.given is not None:
            return torch.tensor(self.given.epoch(epoch), dtype=torch.int64)
        if not self._shuffle:
            return torch.arange(self._num_samples)
        return torch.randperm(self._num_samples, generator=torch.Generator().manual_seed(seed_of(self.seed, epoch)))


class ShardBatches(EpochBatches):
    """A batch sampler that draws this rank's batches from its own shard of the dataset.

    All ranks make the same number of steps; a rank that has reached the end of its shard reads one of its samples
    again, and :meth:`counts` says 0. Indices are relative to the shard.

    A position is the number of samples drawn by the rank that draws most, and the layout the sizes of all shards.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        group: GroupLike = None,
    ) -> None:
        super().__init__(batch_size, seed, group)
        if len(sizes) != self.num_ranks:
            raise ValueError(
                f"sizes must have one number for each of {self.num_ranks} ranks, got {list(sizes)}. Pass the sizes "
                "of all shards."
            )
        check_number("the length of the dataset", sum(sizes), remedy=_NO_SAMPLES)
        self._own_size, self._shuffle = sizes[self._rank], shuffle
        self._num_shards_of = Counter(sizes)  # two sizes at most if balanced, however many ranks there are
        self.layout, self.stride = list(sizes), self.batch_size
        self.end = min(sizes) - self.batch_size + 1 if drop_last else max(sizes)

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the same in each
        for start in range(position, self.end, self.stride):
            num_total = sum(count * self._num_of(size, start) for size, count in self._num_shards_of.items())
            yield self._num_of(self._own_size, start), num_total

    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        size = max(1, self._own_size)
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, self._rank))
        order = torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        for start in range(position, self.end, self.stride):
            num_own = self._num_of(self._own_size, start)
            yield order[start : start + num_own] if num_own else order[:1]

    def _num_of(self, size: int, position: int) -> int:
        return min(self.batch_size, max(0, size - position))


class SampledBatches(EpochBatches):
    """A batch sampler that gives each rank every n-th batch of another one, on n ranks.

    In a last step with fewer batches than ranks, a rank without one reads a sample of the first and takes part with
    weight 0. A position is a number of batches, and so is the layout, marked as such.
    """

    def __init__(self, batch_sampler: Iterable[Sequence[int]], *, seed: int = 0, group: GroupLike = None) -> None:
        super().__init__(1, seed, group)
        self.given: EpochSampler[Sequence[int]] = EpochSampler("batch_sampler", batch_sampler, self.seed)
        self.end, self.stride = len(self.given), self.num_ranks
        self.layout = [0, self.end]  # marked as a number of batches

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:
        for step in self._steps(epoch, position):
            yield len(step[self._rank]) if self._rank < len(step) else 0, sum(map(len, step))

    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        for step in self._steps(epoch, position):
            yield torch.tensor(step[self._rank] if self._rank < len(step) else step[0][:1], dtype=torch.int64)

    def _steps(self, epoch: int, position: int) -> Iterator[list[Sequence[int]]]:
        batches = self.given.epoch(epoch)
        if not all(map(len, batches)):
            raise ValueError("batch_sampler must yield batches with samples, got an empty one. Leave it out.")
        return (batches[start : start + self.stride] for start in range(position, len(batches), self.stride))


class EvaluationBatches(Sampler[list[int]]):
    """A batch sampler that gives each rank its part of the samples, each sample once and in order.

    The ranks may make different numbers of steps, even none. Their parts, in rank order, are the dataset.
    """

    def __init__(self, num_samples: int, batch_size: int, *, group: GroupLike = None) -> None:
        members = resolve_group(group)
        sizes = split_sizes(num_samples, members.size)
        start = sum(sizes[: members.rank])
        self.own = range(start, start + sizes[members.rank])
        self.batch_size = check_number("batch_size", batch_size)

    def __len__(self) -> int:
        """Return this rank's number of steps."""
        return -(-len(self.own) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each step."""
        for first in range(0, len(self.own), self.batch_size):
            own = self.own[first : first + self.batch_size]
            yield Batch(own, seed_of(own[0]))
