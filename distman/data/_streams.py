"""Random numbers that differ between ranks, workers, epochs and steps, and are the same in every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from distman._base.seeds import seed_generators


class Batch(list[int]):
    """Indices of samples, and the seed of the random numbers used while they are read."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class SeededDataset(Dataset[Any]):
    """Seeds the worker processes of a loader for each batch that they read.

    Random transforms then depend neither on the number of workers nor on what a worker has read before, and a resumed
    run repeats them. In the process of the rank itself nothing is seeded.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch is read, if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare a length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if isinstance(indices, Batch) and get_worker_info() is not None:
            seed_generators(indices.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]
