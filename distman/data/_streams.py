"""Random numbers that differ between ranks, workers, epochs and steps, and are the same in every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from distman._seeds import seed_generators


class Batch(list[int]):
    """Indices of samples, and the seed for what is random about reading them.

    Args:
        indices: Indices of samples.
        seed: See :func:`~distman._seeds.seed_of`.
    """

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class SeededDataset(Dataset[Any]):
    """Lets the worker processes of a loader read each batch with random numbers of its own.

    So random transforms do not depend on how many workers there are or what they have read before, and a run that is
    resumed repeats them. In the process of the rank itself nothing is seeded.

    Args:
        dataset: A dataset with indices.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset does not say that it has a length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, Batch) and get_worker_info() is not None:
            seed_generators(indices.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]
