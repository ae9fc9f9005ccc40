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

from distman._base.arguments import check_number
from distman._base.seeds import seed_of
from distman.collectives import GroupLike, resolve_group
from distman.data._sampling import EpochSampler
from distman.topology import split_sizes

Weights = Sequence[float] | torch.Tensor

_NO_SAMPLES = "See whether its files were found."


class Batch(list[int]):
    """Indices of samples, and the seed of the random numbers used while they are read."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class EpochBatches(Sampler[list[int]], abc.ABC):
    """Batches of one epoch after another, from any position within one: the number of samples drawn of it before."""

    given: EpochSampler[Any] | None = None
    """What the program has passed to draw with, if anything."""
    layout: list[int]
    """What a position refers to; positions saved with another layout do not apply."""
    num_drawn: int
    """Position at the end of an epoch."""
    stride: int
    """By how much a step advances the position."""

    def __init__(self, batch_size: int, seed: int, group: GroupLike) -> None:
        members = resolve_group(group)
        self.batch_size, self.seed = check_number("batch_size", batch_size), operator.index(seed)
        self._rank, self.num_ranks = members.rank, members.size
        self._epoch, self._position = 0, 0

    def __len__(self) -> int:
        """Return the number of steps of a full epoch, the same on all ranks."""
        return -(-self.num_drawn // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each remaining step of the epoch."""
        epoch, position = self._epoch, self._position
        # Only when the first batch is requested: a DataLoader may make iterators that it never uses.
        self.start_at(epoch + 1)
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


class TrainingBatches(EpochBatches):
    """A batch sampler that draws global batches in each epoch, and gives this rank its part of each.

    The global batches depend on seed and epoch only, so they are the same on any number of ranks, as long as ranks
    times ``batch_size`` is. All ranks make the same number of steps, and every sample is drawn once per epoch. The
    parts of a batch differ by at most one sample. If the last batch has fewer samples than there are ranks, a rank
    without a part reads a sample of another rank, and :meth:`counts` says 0.

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

    Attributes:
        num_drawn: Position at the end of an epoch, the number of samples that all ranks draw.
        stride: Number of samples of a full step on all ranks, by which it advances the position.
        layout: The number of samples: a position saved with another one does not apply.

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
        self._num_samples = check_number("the length of the dataset", num_samples, remedy=_NO_SAMPLES)
        self._shuffle = shuffle
        if sampler is not None:
            self.given = EpochSampler("sampler", sampler, self.seed)
            self._num_samples = len(self.given)
        self._cumulated = None if weights is None else _cumulate(weights, num_samples)
        self.layout, self.stride = [self._num_samples], self.batch_size * self.num_ranks
        self.num_drawn = self._num_samples - (self._num_samples % self.stride if drop_last else 0)

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the same in each
        for start in range(position, self.num_drawn, self.stride):
            num_total = min(self.stride, self.num_drawn - start)
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
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch))
        if self._cumulated is not None:
            drawn = torch.rand(self._num_samples, generator=generator, dtype=torch.float64) * self._cumulated[-1]
            return torch.searchsorted(self._cumulated, drawn, right=True).clamp_(max=self._num_samples - 1)
        if self._shuffle:
            return torch.randperm(self._num_samples, generator=generator)
        return torch.arange(self._num_samples)


class ShardBatches(EpochBatches):
    """A batch sampler that draws this rank's batches from its own shard of the dataset.

    For samples that are kept on one rank each. All ranks make the same number of steps, and every sample is drawn once
    per epoch; a rank that has reached the end of its shard reads one of its samples again, and :meth:`counts` says 0.

    Args:
        sizes: Number of samples of each rank's shard, in rank order. Indices are relative to the shard.
        batch_size: Samples per rank and step.
        shuffle: Draw in a new order in each epoch.
        drop_last: Drop the steps in which a rank has no full batch.
        seed: Seed of the order, the same on all ranks; each rank draws differently.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Attributes:
        num_drawn: Position at the end of an epoch, the number of samples drawn by the rank that draws most.
        stride: Number of samples of a full step on one rank, by which it advances the position.
        layout: The sizes of all shards: a position saved with others does not apply.

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
        check_number("the length of the dataset", sum(sizes), remedy=_NO_SAMPLES)
        self._own_size, self._shuffle = sizes[self._rank], shuffle
        self._num_shards_of = Counter(sizes)  # two sizes at most if balanced, however many ranks there are
        self.layout, self.stride = list(sizes), self.batch_size
        self.num_drawn = min(sizes) // self.batch_size * self.batch_size if drop_last else max(sizes)

    def counts(self, epoch: int, position: int = 0) -> Iterator[tuple[int, int]]:  # noqa: ARG002 - the same in each
        for start in range(position, self.num_drawn, self.stride):
            num_total = sum(count * self._num_of(size, start) for size, count in self._num_shards_of.items())
            yield self._num_of(self._own_size, start), num_total

    def parts(self, epoch: int, position: int = 0) -> Iterator[torch.Tensor]:
        size = max(1, self._own_size)
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch, self._rank))
        order = torch.randperm(size, generator=generator) if self._shuffle else torch.arange(size)
        for start in range(position, self.num_drawn, self.stride):
            num_own = self._num_of(self._own_size, start)
            yield order[start : start + num_own] if num_own else order[:1]

    def _num_of(self, size: int, position: int) -> int:
        return min(self.batch_size, max(0, size - position))


class SampledBatches(EpochBatches):
    """A batch sampler that gives each rank every n-th batch of another one, on n ranks.

    All ranks make the same number of steps, and every batch is read once per epoch. In a last step with fewer batches
    than ranks, a rank without one reads a sample of the first and takes part with weight 0.

    Args:
        batch_sampler: Yields lists of indices, as many in each epoch as its length; see :func:`distributed_loader`.
        seed: Seed of what it draws, the same on all ranks.
        group: The ranks that share the batches: a process group, the name of one, or None for the world.

    Attributes:
        num_drawn: Position at the end of an epoch, the number of batches.
        stride: Number of batches in a step, by which it advances the position.
        layout: The number of batches, marked as such: a position saved with another one does not apply.

    Raises:
        TypeError: It has no length, or is for one rank already.
        ValueError: It has no batches.

    Example on two ranks:
        >>> batches = SampledBatches([[0, 1, 2], [5], [3, 4]])
        >>> all_gather_objects([*batches])  # the last one of rank 1 has weight 0
        [[[0, 1, 2], [3, 4]], [[5], [3]]]
    """

    def __init__(self, batch_sampler: Iterable[Sequence[int]], *, seed: int = 0, group: GroupLike = None) -> None:
        super().__init__(1, seed, group)
        self.given: EpochSampler[Sequence[int]] = EpochSampler("batch_sampler", batch_sampler, self.seed)
        self.num_drawn, self.stride = len(self.given), self.num_ranks
        self.layout = [0, self.num_drawn]  # marked as a number of batches

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
        self.batch_size = check_number("batch_size", batch_size)

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
