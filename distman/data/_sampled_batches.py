"""The batches of a batch sampler of the program's own, shared by the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from distman.collectives import GroupLike
from distman.data._batches import EpochBatches
from distman.data._sampling import EpochSampler


class SampledBatches(EpochBatches):
    """A batch sampler that gives each rank every n-th batch of another one, on n ranks.

    All ranks make the same number of steps, and every batch is read once per epoch. In a last step with fewer batches
    than ranks, a rank without one reads a sample of the first and takes part with weight 0.

    Args:
        batch_sampler: Yields lists of indices, as many in each epoch as its length; see :func:`distributed_loader`.
        seed: Seed of what it draws, the same on all ranks.
        group: The ranks that share the batches: a process group, the name of one, or None for the world.

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

    @property
    def layout(self) -> list[int]:
        """The number of batches, marked as such; a position applies to any number of ranks."""
        return [0, len(self.given)]

    @property
    def num_drawn(self) -> int:
        """Position at the end of an epoch, the number of batches."""
        return len(self.given)

    @property
    def stride(self) -> int:
        """Number of batches in a step."""
        return self.num_ranks

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
