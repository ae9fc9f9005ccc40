"""Which samples each rank takes at each step: arithmetic, the same on all ranks, without communication."""

from __future__ import annotations

import abc
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from distman._base.seeds import seed_of
from distman.collectives import GroupLike
from distman.collectives._validation import resolve_group
from distman.data._sampling import EpochSampler, at_least_one
from distman.data._streams import Batch
from distman.topology import split_sizes

Weights = Sequence[float] | torch.Tensor


_NO_SAMPLES = "See whether its files were found."


class EpochBatches(Sampler[list[int]], abc.ABC):
    """Batches of one epoch after another, from any position within one: the number of samples drawn of it before."""

    given: EpochSampler[Any] | None = None
    """What the program has passed to draw with, if anything."""

    def __init__(self, batch_size: int, seed: int, group: GroupLike) -> None:
        members = resolve_group(group)
        self.batch_size, self.seed = at_least_one("batch_size", batch_size), operator.index(seed)
        self._rank, self.num_ranks = members.rank, members.size
        self._epoch, self._position = 0, 0

    def __len__(self) -> int:
        """Return the number of steps of a full epoch, the same on all ranks."""
        return -(-self.num_drawn // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each remaining step of the epoch."""
        epoch, position = self._epoch, self._position
        self.start_at(
            epoch + 1
        )  # only when the first batch is requested: a DataLoader may make iterators that it never uses
        for step, part in enumerate(self.parts(epoch, position)):
            yield Batch(part.tolist(), seed_of(self.seed, epoch, position + step * self.stride, self._rank))

    def start_at(self, epoch: int, position: int = 0) -> None:
        """Let the next iteration run through this epoch from this position on, and later ones through the next epochs.

        Local.

        Args:
            epoch: Index of the epoch; the first iteration is 0.
            position: Number of samples drawn of it before, a multiple of :attr:`stride`, or :attr:`num_drawn`.

        Example on two ranks:
            >>> batches = TrainingBatches(6, batch_size=1, shuffle=False)
            >>> batches.start_at(epoch=0, position=4)
            >>> all_gather_objects([*batches])
            [[[4]], [[5]]]
        """
        self._epoch, self._position = epoch, position

    @property
    @abc.abstractmethod
    def layout(self) -> list[int]:
        """What a position refers to; positions saved with another layout do not apply."""

    @property
    @abc.abstractmethod
    def num_drawn(self) -> int:
        """Position at the end of an epoch."""

    @property
    @abc.abstractmethod
    def stride(self) -> int:
        """By how much a step advances the position."""

    @abc.abstractmethod
    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:
        """Return an iterator over this rank's number of samples and that of all, for each step as :meth:`parts`.

        Local.

        Args:
            epoch: Index of the epoch.
            position: Number of samples drawn of it before, or of batches, as for :meth:`start_at`.

        Example on two ranks:
            >>> batches = TrainingBatches(5, batch_size=2)
            >>> all_gather_objects([*batches.counts(epoch=0)])
            [[(2, 4), (1, 1)], [(2, 4), (0, 1)]]
        """

    @abc.abstractmethod
    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        """Return an iterator over the indices of this rank's samples, for each step of an epoch from a position on.

        Local. The next iteration is not affected.

        Args:
            epoch: Index of the epoch.
            position: Number of samples drawn of it before, or of batches, as for :meth:`start_at`.

        Returns:
            A tensor for each step, shape ``(samples,)``.

        Example on two ranks:
            >>> batches = TrainingBatches(6, batch_size=1, shuffle=False)
            >>> all_gather_objects([part.tolist() for part in batches.parts(epoch=0, position=2)])
            [[[2], [4]], [[3], [5]]]
        """


class _PlannedBatches(EpochBatches):
    """Batches whose sizes are the same in each epoch."""

    @abc.abstractmethod
    def _counts_at(self, position: int) -> tuple[int, int]:
        """Return how many samples of the step at this position are this rank's, and how many it has on all ranks."""

    @abc.abstractmethod
    def _order(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch in order."""

    @abc.abstractmethod
    def _part(self, order: torch.Tensor, position: int) -> torch.Tensor:
        """Return this rank's samples of a step; at least one."""

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the same in each
        for start in range(position, self.num_drawn, self.stride):
            yield self._counts_at(start)

    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        order = self._order(epoch)
        for start in range(position, self.num_drawn, self.stride):
            yield self._part(order, start)

    def num_own(self, position: int) -> int:
        """Return how many samples of the step at this position are this rank's; 0 if it takes part with weight 0.

        Local.

        Args:
            position: Number of samples drawn before, see :meth:`start_at`; of shards, by a rank with the largest one.

        Example on two ranks:
            >>> batches = TrainingBatches(5, batch_size=2)
            >>> all_gather_objects([batches.num_own(position) for position in (0, 4)])
            [[2, 1], [2, 0]]
        """
        return self._counts_at(position)[0]

    def num_total(self, position: int) -> int:
        """Return how many samples the step at this position has on all ranks.

        Local.

        Args:
            position: As of :meth:`num_own`.

        Example on two ranks:
            >>> batches = TrainingBatches(5, batch_size=2)
            >>> [batches.num_total(position) for position in (0, 4)]
            [4, 1]
        """
        return self._counts_at(position)[1]


class TrainingBatches(_PlannedBatches):
    """A batch sampler that draws global batches in each epoch, and gives this rank its part of each.

    The global batches depend on seed and epoch only, so they are the same on any number of ranks, as long as ranks
    times ``batch_size`` is. All ranks make the same number of steps, and every sample is drawn once per epoch. The
    parts of a batch differ by at most one sample. If the last batch has fewer samples than there are ranks, a rank
    without a part reads a sample of another rank, and :meth:`num_own` is 0.

    Args:
        num_samples: Number of samples in the dataset.
        batch_size: Samples per rank and step.
        shuffle: Draw in a new order in each epoch.
        drop_last: Drop the last batch if it is not full.
        weights: Relative frequency with which each sample is drawn; an epoch is then ``num_samples`` draws with
            replacement.
        sampler: Yields the indices of an epoch in order, instead; its length is the number of samples. See
            :func:`distributed_loader`.
        seed: Seed of the order, the same on all ranks.
        group: The ranks that share the batches: a process group, the name of one, or None for the world.

    Raises:
        ValueError: There are no samples, the batch size is less than 1, or the weights are not valid.

    Example on two ranks:
        >>> batches = TrainingBatches(10, batch_size=2, shuffle=False)
        >>> len(batches), all_gather_objects([*batches])
        (3, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]])
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        weights: Weights | None = None,
        sampler: Iterable[int] | None = None,
        seed: int = 0,
        group: GroupLike = None,
    ) -> None:
        super().__init__(batch_size, seed, group)
        self._num_samples = at_least_one("the length of the dataset", num_samples, _NO_SAMPLES)
        self._shuffle, self._drop_last = shuffle, drop_last
        if sampler is not None:
            self.given = EpochSampler("sampler", sampler, self.seed)
            self._num_samples = len(self.given)
        self._cumulated = None if weights is None else _cumulate(weights, num_samples)

    @property
    def layout(self) -> list[int]:
        """The number of samples; a position applies to any number of ranks."""
        return [self._num_samples]

    @property
    def num_drawn(self) -> int:
        """Position at the end of an epoch, the number of samples that all ranks draw."""
        return self._num_samples - (self._num_samples % self.stride if self._drop_last else 0)

    @property
    def stride(self) -> int:
        """Number of samples of a full step on all ranks."""
        return self.batch_size * self.num_ranks

    def _counts_at(self, position: int) -> tuple[int, int]:
        num_total = min(self.stride, self.num_drawn - position)
        quotient, rest = divmod(num_total, self.num_ranks)
        return quotient + (self._rank < rest), num_total

    def _order(self, epoch: int) -> torch.Tensor:
        if self.given is not None:
            return torch.tensor(self.given.epoch(epoch), dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        if self._cumulated is not None:
            drawn = torch.rand(self._num_samples, generator=generator, dtype=torch.float64) * self._cumulated[-1]
            return torch.searchsorted(self._cumulated, drawn, right=True).clamp_(max=self._num_samples - 1)
        if self._shuffle:
            return torch.randperm(self._num_samples, generator=generator)
        return torch.arange(self._num_samples)

    def _part(self, order: torch.Tensor, position: int) -> torch.Tensor:
        quotient, rest = divmod(self.num_total(position), self.num_ranks)
        start = position + self._rank * quotient + min(self._rank, rest)
        num_own = quotient + (self._rank < rest)
        return order[start : start + num_own] if num_own else order[position : position + 1]


class ShardBatches(_PlannedBatches):
    """A batch sampler that draws this rank's batches from its own shard of the dataset.

    For samples that are kept on one rank each. All ranks make the same number of steps, and every sample is drawn once
    per epoch; a rank that has reached the end of its shard reads one of its samples again, and :meth:`num_own` is 0.

    Args:
        sizes: Number of samples of each rank's shard, in rank order. Indices are relative to the shard.
        batch_size: Samples per rank and step.
        shuffle: Draw in a new order in each epoch.
        drop_last: Drop the steps in which a rank has no full batch.
        seed: Seed of the order, the same on all ranks; each rank draws differently.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Raises:
        ValueError: There are no samples, the batch size is less than 1, or the number of sizes is not that of ranks.

    Example on two ranks:
        >>> batches = ShardBatches([3, 2], batch_size=2, shuffle=False)
        >>> all_gather_objects([*batches])  # the last one of rank 1 has weight 0
        [[[0, 1], [2]], [[0, 1], [0]]]
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
        at_least_one("the length of the dataset", sum(sizes), _NO_SAMPLES)
        self._sizes: list[int] = list(sizes)
        self._counts = Counter(
            self._sizes
        )  # at most two if balanced, so that num_total does not take longer with more ranks
        self._shuffle, self._drop_last = shuffle, drop_last

    @property
    def layout(self) -> list[int]:
        """The sizes of all shards."""
        return list(self._sizes)

    @property
    def num_drawn(self) -> int:
        """Position at the end of an epoch, the number of samples drawn by the rank that draws most."""
        return min(self._sizes) // self.batch_size * self.batch_size if self._drop_last else max(self._sizes)

    @property
    def stride(self) -> int:
        """Number of samples of a full step on one rank."""
        return self.batch_size

    def _counts_at(self, position: int) -> tuple[int, int]:
        num_total = sum(count * self._num_of(size, position) for size, count in self._counts.items())
        return self._num_of(self._sizes[self._rank], position), num_total

    def _num_of(self, size: int, position: int) -> int:
        return min(self.batch_size, max(0, size - position))

    def _order(self, epoch: int) -> torch.Tensor:
        size = max(1, self._sizes[self._rank])
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, self._rank))
        return torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)

    def _part(self, order: torch.Tensor, position: int) -> torch.Tensor:
        num_own = self._num_of(self._sizes[self._rank], position)
        return order[position : position + num_own] if num_own else order[:1]


class EvaluationBatches(Sampler[list[int]]):
    """A batch sampler that gives each rank its part of the samples, each sample once and in order.

    The ranks may make different numbers of steps, even none. Their parts, in rank order, are the dataset.

    Args:
        num_samples: Number of samples in the dataset.
        batch_size: Samples per rank and step.
        group: The ranks that share the samples: a process group, the name of one, or None for the world.

    Raises:
        ValueError: The batch size is less than 1.

    Example on two ranks:
        >>> batches = EvaluationBatches(5, batch_size=2)
        >>> all_gather_objects([*batches])
        [[[0, 1], [2]], [[3, 4]]]
    """

    def __init__(self, num_samples: int, batch_size: int, *, group: GroupLike = None) -> None:
        members = resolve_group(group)
        sizes = split_sizes(num_samples, members.size)
        start = sum(sizes[: members.rank])
        self.own = range(start, start + sizes[members.rank])
        self.batch_size = at_least_one("batch_size", batch_size)

    def __len__(self) -> int:
        """Return this rank's number of steps."""
        return -(-len(self.own) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each step."""
        for first in range(0, len(self.own), self.batch_size):
            own = self.own[first : first + self.batch_size]
            yield Batch(own, seed_of(own[0]))


def _cumulate(weights: Weights, num_samples: int) -> torch.Tensor:
    given = torch.as_tensor(weights, dtype=torch.float64)
    if given.shape != (num_samples,):
        raise ValueError(
            f"weights must have one number for each of {num_samples} samples, got shape {tuple(given.shape)}. Pass a "
            "list or a tensor with one dim."
        )
    total = given.cumsum(0)
    if not (given.isfinite().all() and (given >= 0).all() and total[-1] > 0):
        bad = [index for index, weight in enumerate(given.tolist()) if not 0 <= weight < math.inf]
        got = f"{given[bad[0]].item()} for sample {bad[0]}" if bad else "only zeros"
        raise ValueError(f"weights must be finite, 0 or more and not all 0, got {got}. Pass relative frequencies.")
    return total
