"""Loaders that give each rank its part, shuffle by themselves, and know where in the epoch they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from distman._log import logger
from distman.collectives._validation import GroupLike
from distman.data._batches import EvaluationBatches, ShardBatches, TrainingBatches, Weights
from distman.data._streams import SeededDataset
from distman.manager import DistributedManager

_SETTLED = ("sampler", "batch_sampler", "generator")


class EvaluationLoader(DataLoader[Any]):
    """A DataLoader with which the ranks go through the dataset once, in order: no sample twice, none left out.

    The ranks may make different numbers of steps, so nothing within the loop may wait for the other ranks.

    Args:
        dataset: A dataset with indices and a length.
        batches: Which samples this rank takes.
        options: Options of torch's DataLoader.
    """

    def __init__(self, dataset: Dataset[Any], batches: EvaluationBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, generator=torch.Generator(), **options)
        self.batches = batches


class TrainingLoader(DataLoader[Any]):
    """A DataLoader that draws each epoch anew, and whose position within an epoch can be saved and restored.

    All ranks make the same number of steps. Each iteration is the next epoch, without :meth:`set_epoch`.

    Args:
        dataset: A dataset with indices and a length.
        batches: Which samples this rank takes.
        options: Options of torch's DataLoader.

    Attributes:
        batches: Which samples this rank takes.
        num_own: How many samples of the latest batch are this rank's; 0 where it only keeps the others company.
        num_total: How many samples the latest batch has on all ranks.
    """

    def __init__(self, dataset: Dataset[Any], batches: TrainingBatches | ShardBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, generator=torch.Generator(), **options)
        self.batches = batches
        self.num_own = self.num_total = 0
        self._next = self._reached = (0, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises an iterator of its own
        """Go through the next epoch, or what is left of the one that was restored."""
        epoch, position = self._reached = self._next
        self._next = epoch + 1, 0
        for batch in self._read(epoch, position):
            self.num_own, self.num_total = self.batches.num_own(position), self.batches.num_total(position)
            position += self.batches.stride
            self._reached = epoch, position
            yield batch

    @property
    def loss_scale(self) -> float:
        """Factor for the mean loss over the latest batch: with it DDP's mean over ranks is the mean over samples."""
        return self.num_own * self.batches.num_ranks / self.num_total

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration go through this epoch.

        Local.
        """
        self._next = self._reached = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: within the loop, after the latest batch.

        Local.
        """
        return self.state_at(*self._reached)

    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """Return a position by its numbers, for loops that count by themselves.

        Local.

        Args:
            epoch: Index of the epoch.
            position: What was drawn of it, see :attr:`batches`; at its end it is the start of the next.
        """
        if position >= self.batches.num_drawn:
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position, "seed": self.batches.seed, "layout": self.batches.layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where the position was.

        Local. It fits any number of ranks, and any batch size. Where the dataset has another number of samples, or is
        cached by other ranks, the epoch begins anew, and a warning says so.

        Raises:
            ValueError: The position belongs to another seed, so to other epochs.
        """
        if state["seed"] != self.batches.seed:
            raise ValueError(f"seed must be {state['seed']}, as saved, got {self.batches.seed}. Pass it to the loader.")
        epoch, position = state["epoch"], state["position"]
        if position and state["layout"] != self.batches.layout:
            logger.warning("epoch %d begins anew: its saved position is one of another dataset or job", epoch)
            position = 0
        self._next = self._reached = epoch, position

    def _read(self, epoch: int, position: int) -> Iterator[Any]:
        self.batches.start_at(epoch, position)
        return super().__iter__()


def distributed_loader(
    dataset: Dataset[Any],
    *,
    evaluation: bool = False,
    batch_size: int = 1,
    shuffle: bool | None = None,
    drop_last: bool = False,
    weights: Weights | None = None,
    seed: int = 0,
    group: GroupLike = None,
    **loader_kwargs: Any,
) -> TrainingLoader | EvaluationLoader:
    """Return a DataLoader that gives this rank its part of the dataset.

    Local. For training every epoch is drawn anew, all ranks make the same number of steps, and no sample is left out
    or repeated. For evaluation the ranks go through the dataset once, in order, maybe in different numbers of steps.

    Args:
        dataset: A dataset with indices and a length, the same on all ranks.
        evaluation: Load for evaluation.
        batch_size: Samples per rank and step.
        shuffle: Draw each epoch in a new order; None does so for training.
        drop_last: Leave out the last step of an epoch if it is not full; for training only.
        weights: How often each sample is drawn, relative to the others, with replacement; for training only.
        seed: The same on all ranks.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.
        loader_kwargs: Options of torch's DataLoader. ``num_workers`` is as many as the CPUs that the scheduler gave
            each rank, if it says so (:func:`default_num_workers`); ``pin_memory`` is True on CUDA.

    Raises:
        TypeError: The dataset has no length or indices, or an option is one that this function settles.
        ValueError: An option has no meaning.
    """
    length = length_of(dataset)
    settled = [name for name in _SETTLED if name in loader_kwargs]
    if settled:
        raise TypeError(f"{settled[0]} must be left out: the ranks' parts are settled here. Make a DataLoader for it.")
    options = {
        "num_workers": 0 if isinstance(dataset, TensorDataset) else default_num_workers(),
        "pin_memory": DistributedManager().cuda,
        **loader_kwargs,
    }
    source = SeededDataset(dataset) if options["num_workers"] else dataset
    if evaluation:
        check_for_evaluation(shuffle=shuffle, drop_last=drop_last, weights=weights is not None)
        return EvaluationLoader(source, EvaluationBatches(length, batch_size, group=group), **options)
    batches = TrainingBatches(
        length,
        batch_size,
        shuffle=shuffle is not False,
        drop_last=drop_last,
        weights=weights,
        seed=seed,
        group=group,
    )
    return TrainingLoader(source, batches, **options)


def default_num_workers() -> int:
    """Return how many workers a loader of this rank may have: the CPUs that the scheduler gave it, 0 if it gave one.

    Local. ``SLURM_CPUS_PER_TASK`` says so, or under PBS ``NCPUS``, which the ranks of a host share; no more than this
    process may use. Without a scheduler it is 0.
    """
    number = _positive(os.environ.get("SLURM_CPUS_PER_TASK"))
    if not number and "PBS_JOBID" in os.environ:
        number = _positive(os.environ.get("NCPUS")) // DistributedManager().local_world_size
    number = min(number, len(os.sched_getaffinity(0)))
    return number if number > 1 else 0


def _positive(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def length_of(dataset: Dataset[Any]) -> int:
    """Return the number of samples.

    Raises:
        TypeError: The dataset has no length or indices, or is a loader.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(f"dataset must be a dataset, got a {type(dataset).__name__}. Pass loader.dataset.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset must have indices and a length, got {type(dataset).__name__}. Give a stream to torch's "
            "DataLoader, and let each rank read its part."
        )
    return len(dataset)


def check_for_evaluation(**of_training: bool | None) -> None:
    """Refuse options that only training has.

    Args:
        of_training: Whether each option was given.
    """
    given = [name for name, value in of_training.items() if value]
    if given:
        raise TypeError(f"{given[0]} must be left out for evaluation: each sample is read once, in order.")
