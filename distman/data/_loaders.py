"""Loaders that give each rank its part of a dataset, and whose position within an epoch can be saved."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from distman._base.arguments import check_options
from distman._base.log import logger
from distman._base.seeds import seed_generators
from distman._coordination import step_times
from distman.collectives import GroupLike
from distman.data._batches import Batch, EpochBatches, EvaluationBatches, SampledBatches, TrainingBatches
from distman.manager import DistributedManager


class EvaluationLoader(DataLoader[Any]):
    """A DataLoader with which the ranks read the dataset once, in order: every sample, and none twice.

    The ranks may make different numbers of steps, so nothing within the loop may wait for other ranks.

    Args:
        dataset: A map-style dataset with a length.
        batches: Which samples this rank takes; :func:`distributed_loader` says it.
        options: Options of torch's DataLoader.

    Example on two ranks:
        >>> loader = distributed_loader(TensorDataset(torch.arange(5)), evaluation=True, batch_size=2)
        >>> all_gather_objects([batch.tolist() for (batch,) in loader])
        [[[0, 1], [2]], [[3, 4]]]
    """

    def __init__(self, dataset: Dataset[Any], batches: EvaluationBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, generator=torch.Generator(), **options)
        self.batches = batches

    def __repr__(self) -> str:
        return f"EvaluationLoader({type(self.dataset).__name__}, {len(self)} batches on this rank)"


class TrainingLoader(DataLoader[Any]):
    """A DataLoader that shuffles in each epoch, and whose position within an epoch can be saved and restored.

    All ranks make the same number of steps. Each iteration is the next epoch, without :meth:`set_epoch`.

    Args:
        dataset: A map-style dataset with a length.
        batches: Which samples this rank takes; :func:`distributed_loader` says it.
        options: Options of torch's DataLoader.

    Attributes:
        num_own: How many samples of the latest batch are this rank's; 0 if it takes part with weight 0.
        num_total: How many samples the latest batch has on all ranks.

    Example on two ranks:
        >>> loader = distributed_loader(TensorDataset(torch.arange(6)), batch_size=2)
        >>> for (batch,) in loader:
        ...     print(f"{loader.num_own} samples of {loader.num_total}")
        2 samples of 4
        1 samples of 2
    """

    def __init__(self, dataset: Dataset[Any], batches: EpochBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, generator=torch.Generator(), **options)
        self.batches = batches
        self.num_own = self.num_total = 0
        self._next = self._reached = (0, 0)

    def __repr__(self) -> str:
        return f"TrainingLoader({type(self.dataset).__name__}, {len(self)} steps on {self.batches.num_ranks} ranks)"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares its own iterator type
        """Iterate over the next epoch, or over the rest of the one that was restored."""
        epoch, position = self._reached = self._next
        self._next = epoch + 1, 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)  # workers that persist keep a copy that is not told
        counts = self.batches.counts(epoch, position)
        for batch in step_times.current().batches(self._read(epoch, position)):
            self.num_own, self.num_total = next(counts)
            position += self.batches.stride
            self._reached = epoch, position
            yield batch

    @property
    def loss_scale(self) -> float:
        """Factor for the mean loss of the latest batch that turns DDP's mean over ranks into the mean over samples."""
        return self.num_own * self.batches.num_ranks / self.num_total

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch.

        Local.

        Args:
            epoch: Index of the epoch; the first iteration is 0.

        Example on two ranks:
            >>> loader = distributed_loader(TensorDataset(torch.arange(6)), batch_size=3)
            >>> first = [batch.tolist() for (batch,) in loader]
            >>> loader.set_epoch(0)
            >>> [batch.tolist() for (batch,) in loader] == first
            True
        """
        self._next = self._reached = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; within the loop, the one after the latest batch.

        Local.
        """
        return self._state_at(*self._reached)

    def _state_at(self, epoch: int, position: int) -> dict[str, Any]:
        if position >= self.batches.end:
            epoch, position = epoch + 1, 0
        return {"epoch": epoch, "position": position, "seed": self.batches.seed, "layout": self.batches.layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a saved position.

        Local. The position applies to any number of ranks and any batch size. If the dataset has another number of
        samples, or is cached by another number of ranks, the epoch starts over, and a warning is logged.

        Args:
            state: From :meth:`state_dict` on any rank.

        Raises:
            ValueError: The position was saved with another seed, so with another order.

        Example on two ranks:
            >>> dataset = TensorDataset(torch.arange(8))
            >>> loader = distributed_loader(dataset, batch_size=2, shuffle=False)
            >>> step = next(iter(loader))
            >>> resumed = distributed_loader(dataset, batch_size=1, shuffle=False)
            >>> resumed.load_state_dict(loader.state_dict())
            >>> all_gather_objects([batch.tolist() for (batch,) in resumed])
            [[[4], [6]], [[5], [7]]]
        """
        if state["seed"] != self.batches.seed:
            raise ValueError(f"seed must be {state['seed']}, as saved, got {self.batches.seed}. Pass it to the loader.")
        epoch, position = state["epoch"], state["position"]
        if position and state["layout"] != self.batches.layout:
            logger.warning("epoch %d starts over: its position was saved with another dataset or shard sizes", epoch)
            position = 0
        self._next = self._reached = epoch, position

    def _read(self, epoch: int, position: int) -> Iterator[Any]:
        self.batches.start_at(epoch, position)
        return super().__iter__()


@overload
def distributed_loader(
    dataset: Dataset[Any], *, evaluation: Literal[False] = False, **options: Any
) -> TrainingLoader: ...


@overload
def distributed_loader(dataset: Dataset[Any], *, evaluation: Literal[True], **options: Any) -> EvaluationLoader: ...


def distributed_loader(
    dataset: Dataset[Any],
    *,
    evaluation: bool = False,
    batch_size: int = 1,
    shuffle: bool | None = None,
    drop_last: bool = False,
    sampler: Iterable[int] | None = None,
    batch_sampler: Iterable[Sequence[int]] | None = None,
    seed: int = 0,
    group: GroupLike = None,
    **loader_kwargs: Any,
) -> TrainingLoader | EvaluationLoader:
    """Return a DataLoader that gives this rank its part of the dataset.

    Local. For training the dataset is shuffled in each epoch, all ranks make the same number of steps, and no sample is
    left out or repeated. For evaluation the ranks read the dataset once, in order, possibly in different numbers of
    steps.

    Args:
        dataset: A map-style dataset with a length, the same on all ranks. For training its ``set_epoch`` is called
            before each epoch, if it has one.
        evaluation: Load for evaluation.
        batch_size: Samples per rank and step.
        shuffle: Draw in a new order in each epoch; None does so for training.
        drop_last: Drop the last step of an epoch if it is not full; for training only.
        sampler: Yields the indices of an epoch in order, those of all ranks, instead of ``shuffle``; for training only.
            It has a length, and draws from the global generators or from its own, which are seeded for each epoch, or
            by ``set_epoch``: so the ranks draw the same, as with torch's ``WeightedRandomSampler``.
        batch_sampler: Yields batches, as lists of indices, instead of ``batch_size`` and ``drop_last`` too: on n ranks,
            each takes every n-th. Otherwise as ``sampler``.
        seed: Seed of the order, the same on all ranks.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.
        loader_kwargs: Options of torch's DataLoader. By default, ``num_workers`` is the number of CPUs that the
            scheduler assigned to each rank, if known, and ``pin_memory`` is True on CUDA.

    Raises:
        TypeError: The dataset is not a map-style dataset with a length, or an option is one that this function sets.
        ValueError: An option is not valid.

    Example on two ranks:
        >>> loader = distributed_loader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=False)
        >>> all_gather_objects([batch.tolist() for (batch,) in loader])
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    """
    length = length_of(dataset)
    if "generator" in loader_kwargs:
        raise TypeError("generator must be left out: the order of the samples depends on seed. Pass that.")
    if not loader_kwargs.get("in_order", True):
        raise TypeError(
            "in_order must be left out: num_own, loss_scale and saved positions count the batches in order, and "
            "evaluation reads in order. Use torch's DataLoader to read in another one."
        )
    own = [name for name in inspect.signature(distributed_loader).parameters if name != "loader_kwargs"]
    check_options(loader_kwargs, {*inspect.signature(DataLoader).parameters, *own}, "distributed_loader")
    _check_sampling(
        sampler=sampler,
        batch_sampler=batch_sampler,
        batch_size=None if batch_size == 1 else batch_size,
        shuffle=shuffle,
        drop_last=drop_last or None,
    )
    options = {
        "num_workers": 0 if isinstance(dataset, TensorDataset) else _default_num_workers(),
        "pin_memory": DistributedManager().cuda,
        **loader_kwargs,
    }
    source = SeededDataset(dataset) if options["num_workers"] else dataset
    if evaluation:
        check_for_evaluation(shuffle=shuffle, drop_last=drop_last, sampler=sampler, batch_sampler=batch_sampler)
        return EvaluationLoader(source, EvaluationBatches(length, batch_size, group=group), **options)
    if batch_sampler is not None:
        return TrainingLoader(source, SampledBatches(batch_sampler, seed=seed, group=group), **options)
    batches = TrainingBatches(
        length,
        batch_size,
        shuffle=shuffle is not False,
        drop_last=drop_last,
        sampler=sampler,
        seed=seed,
        group=group,
    )
    return TrainingLoader(source, batches, **options)


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


def _check_sampling(**options: Any) -> None:
    """Refuse options of which one says already what the other does; None stands for one that is not given."""
    given = [name for name, value in options.items() if value is not None]
    allowed = {"sampler": {"sampler", "batch_size", "drop_last"}, "batch_sampler": {"batch_sampler"}}
    for name in allowed.keys() & set(given):
        for other in given:
            if other not in allowed[name]:
                raise TypeError(f"{other} must be left out beside {name}, which says what is drawn.")


def _default_num_workers() -> int:
    """Return how many CPUs the scheduler assigned to this rank, 0 if only one; those of PBS are the host's."""
    number = _positive(os.environ.get("SLURM_CPUS_PER_TASK"))
    if not number and "PBS_JOBID" in os.environ:
        number = _positive(os.environ.get("NCPUS")) // DistributedManager().local_world_size
    number = min(number, len(os.sched_getaffinity(0)))
    return number if number > 1 else 0


def _positive(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def length_of(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, str | bytes | os.PathLike):
        raise TypeError(f"dataset must be a dataset, got {dataset!r}. Make one of your files first.")
    if isinstance(dataset, DataLoader):
        raise TypeError(f"dataset must be a dataset, got a {type(dataset).__name__}. Pass loader.dataset.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset must be a map-style dataset with a length, got {type(dataset).__name__}. Share a stream out by "
            "DataLoader(distributed_stream(dataset), batch_size=32), or batch_size=None if it yields batches."
        )
    if getattr(dataset, "_is_shard", False):
        raise TypeError(
            f"dataset must be one that each rank has the whole of, got a {type(dataset).__name__}, which is a shard. "
            "Pass it to rank_cached_loader."
        )
    return len(dataset)


def check_for_evaluation(**of_training: object) -> None:
    """Refuse options that are for training only, where they were given."""
    given = [name for name, value in of_training.items() if value is not None and value is not False]
    if given:
        raise TypeError(f"{given[0]} must be left out for evaluation: each sample is read once, in order.")
