"""A rank's shard of a dataset, in its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from distman._torch_internals import TreeSpec, tree_flatten, tree_structure, tree_unflatten
from distman.collectives._validation import GroupLike, resolve_group
from distman.data._batches import EvaluationBatches, ShardBatches
from distman.data._hdf5 import Hdf5Dataset
from distman.data._loaders import EvaluationLoader, TrainingLoader, check_for_evaluation, length_of
from distman.manager import DistributedManager
from distman.topology import split_sizes

_CHUNK = 1024

Indices = int | slice | torch.Tensor


class RankCachedDataset(Dataset[Any]):
    """This rank's shard of a dataset, read once and kept in memory as whole tensors.

    The shards are consecutive and balanced; in rank order they are the dataset.

    Args:
        dataset: A dataset with indices and a length, the same on all ranks. Its samples are numbers, arrays, tensors,
            or tuples, lists and mappings of such, all of one shape. Of an :class:`Hdf5Dataset` no more is read than
            the shard.
        device: Where to keep the shard; None keeps it in the host's memory, pinned if this rank uses CUDA.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Attributes:
        sizes: Number of samples of each rank's shard, in rank order.

    Raises:
        TypeError: The dataset has no length or indices, or its samples hold something else than numbers.
        ValueError: The dataset is empty, or two samples differ in shape.
    """

    def __init__(
        self, dataset: Dataset[Any], *, device: torch.device | str | None = None, group: GroupLike = None
    ) -> None:
        members = resolve_group(group)
        length = length_of(dataset)
        if not length:
            raise ValueError("dataset must have at least one sample to be cached, got none.")
        self.sizes = split_sizes(length, members.size)
        start = sum(self.sizes[: members.rank])
        self._length = self.sizes[members.rank]
        spare = 0 if self._length else 1  # with which a rank without samples keeps the others company
        shard = range(0, spare) if spare else range(start, start + self._length)
        self._tensors, self._structure = _read(_reader(dataset), shard)
        if device is not None:
            self._tensors = [tensor.to(device) for tensor in self._tensors]
        self._is_pinned = device is None and DistributedManager().cuda
        if self._is_pinned:
            self._tensors = [tensor.pin_memory() for tensor in self._tensors]
        is_flat = self._structure == tree_structure(tuple(self._tensors))
        self._put_together = tuple if is_flat else functools.partial(tree_unflatten, treespec=self._structure)

    def __len__(self) -> int:
        """Return the number of samples in this rank's shard."""
        return self._length

    def __getitem__(self, indices: Indices) -> Any:
        """Return one sample, or several as one batch; indices count within the shard."""
        if not isinstance(indices, torch.Tensor):
            return self._put_together([tensor[indices] for tensor in self._tensors])
        if not self._is_pinned:
            indices = indices.to(self._tensors[0].device)
            return self._put_together([tensor.index_select(0, indices) for tensor in self._tensors])
        return self._put_together([_take_pinned(tensor, indices) for tensor in self._tensors])


class _CachedTrainingLoader(TrainingLoader):
    """A TrainingLoader that takes whole batches out of memory."""

    def _read(self, epoch: int, position: int) -> Iterator[Any]:
        return (self.dataset[part] for part in self.batches.parts(epoch, position))


class _CachedEvaluationLoader(EvaluationLoader):
    """An EvaluationLoader that takes whole batches out of memory."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises an iterator of its own
        size = self.batches.batch_size
        starts = range(0, len(self.batches.own), size)
        return (self.dataset[torch.arange(start, min(start + size, len(self.batches.own)))] for start in starts)


def rank_cached_loader(
    dataset: Dataset[Any],
    *,
    evaluation: bool = False,
    batch_size: int = 1,
    shuffle: bool | None = None,
    drop_last: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    group: GroupLike = None,
) -> TrainingLoader | EvaluationLoader:
    """Return a loader of this rank's shard, which is read once and stays in memory.

    Local. As :func:`distributed_loader`, but for the shards: each rank draws from its own one, so what a batch holds
    depends on the number of ranks. Batches are new tensors, taken out of the memory at once; no workers are needed.

    Args:
        dataset: A :class:`RankCachedDataset`, or what to make one of.
        evaluation: Load for evaluation: the ranks go through the dataset once, in order.
        batch_size: Samples per rank and step.
        shuffle: Draw each epoch in a new order; None does so for training.
        drop_last: Leave out the steps at which a rank has no full batch; for training only.
        seed: The same on all ranks.
        device: See :class:`RankCachedDataset`.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Raises:
        TypeError: See :class:`RankCachedDataset`; or an option is for training only.
        ValueError: See :class:`RankCachedDataset`; or an option has no meaning.
    """
    if not isinstance(dataset, RankCachedDataset):
        dataset = RankCachedDataset(dataset, device=device, group=group)
    elif device is not None:
        raise TypeError("device must be left out: the dataset is cached already. Pass it to RankCachedDataset.")
    if evaluation:
        check_for_evaluation(shuffle=shuffle, drop_last=drop_last)
        return _CachedEvaluationLoader(dataset, EvaluationBatches(sum(dataset.sizes), batch_size, group=group))
    batches = ShardBatches(
        dataset.sizes, batch_size, shuffle=shuffle is not False, drop_last=drop_last, seed=seed, group=group
    )
    return _CachedTrainingLoader(dataset, batches)


def _reader(dataset: Dataset[Any]) -> Callable[[range], Any]:
    """Return how to read consecutive samples as one batch."""
    if isinstance(dataset, TensorDataset):
        return lambda chunk: tuple(tensor[chunk.start : chunk.stop] for tensor in dataset.tensors)
    if isinstance(dataset, Hdf5Dataset):
        return dataset.read
    return lambda chunk: default_collate([dataset[index] for index in chunk])


def _read(reader: Callable[[range], Any], shard: range) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the samples of a shard as whole tensors, and their structure."""
    leaves, structure = tree_flatten(reader(shard[:1]))
    whole = [_room(leaf, len(shard)) for leaf in leaves]
    for start in range(0, len(shard), _CHUNK):
        chunk = shard[start : start + _CHUNK]
        try:
            leaves, found = tree_flatten(reader(chunk))
        except RuntimeError as error:
            raise _unequal(chunk) from error
        if found != structure or any(map(_differ, leaves, whole)):
            raise _unequal(chunk)
        for leaf, room in zip(leaves, whole, strict=True):
            room[start : start + len(chunk)] = leaf
    return whole, structure


def _differ(leaf: torch.Tensor, room: torch.Tensor) -> bool:
    return (leaf.shape[1:], leaf.dtype) != (room.shape[1:], room.dtype)


def _room(leaf: object, length: int) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"samples must be made of numbers to be cached, got {leaf!r:.80}. Use distributed_loader.")
    return torch.empty(length, *leaf.shape[1:], dtype=leaf.dtype)


def _unequal(chunk: range) -> ValueError:
    return ValueError(
        f"samples must be of one shape and dtype to be cached, got others among {chunk.start} to {chunk.stop - 1}. "
        "Convert or pad them, or use distributed_loader."
    )


def _take_pinned(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    batch = torch.empty(len(indices), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=batch)
