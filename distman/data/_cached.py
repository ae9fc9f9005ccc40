"""Datasets: the rows of an HDF5 file, and of any dataset the shard of this rank in memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from distman._base.arguments import require
from distman._torch_internals import TreeSpec, tree_flatten, tree_structure, tree_unflatten
from distman.collectives import GroupLike, resolve_group
from distman.data._batches import EvaluationBatches, ShardBatches
from distman.data._loaders import EvaluationLoader, TrainingLoader, check_for_evaluation, length_of
from distman.manager import DistributedManager
from distman.topology import split_sizes


class Hdf5Dataset(Dataset[tuple[torch.Tensor, ...]]):
    """The samples of an HDF5 file: sample ``i`` is row ``i`` of each of the datasets named.

    Local. Every process opens the file itself, when it first reads from it.

    Args:
        path: The file.
        names: Names of datasets in it, such as ``["fields", "grid/labels"]``, which must be equally long.

    Raises:
        ImportError: h5py is not installed.
        FileNotFoundError: The file does not exist.
        ValueError: A dataset does not exist in the file, or they differ in length.

    Example:
        >>> import h5py
        >>> with h5py.File("flow.h5", "w") as file:
        ...     file["fields"], file["labels"] = [[0.0, 1.0], [2.0, 3.0]], [0, 1]
        >>> dataset = Hdf5Dataset("flow.h5", ["fields", "labels"])
        >>> dataset[1]
        (tensor([2., 3.], dtype=torch.float64), tensor(1))
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str]) -> None:
        self._path, self._names = Path(path), list(names)
        self._opened: tuple[int, list[Any]] | None = None
        lengths = {name: len(data) for name, data in zip(self._names, self.arrays(), strict=True)}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"datasets must be equally long, got {lengths} from {path}. Name those with a row for each sample."
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.as_tensor(data[index]) for data in self.arrays())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def arrays(self) -> list[Any]:
        """Return the datasets of h5py as this process has opened them.

        Local.

        Example:
            >>> import h5py
            >>> with h5py.File("flow.h5", "w") as file:
            ...     file["labels"] = [5, 6, 7, 8]
            >>> Hdf5Dataset("flow.h5", ["labels"]).arrays()
            [<HDF5 dataset "labels": shape (4,), type "<i8">]
        """
        # Those opened before a fork cannot be shared with it. They are kept, since finding one by its name takes
        # several times as long as reading a row.
        if self._opened is None or self._opened[0] != os.getpid():
            h5py = require("h5py", "Hdf5Dataset")
            # HDF5 would read 64 kB around each row of a block that has a part of the rows.
            access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
            access.set_sieve_buf_size(0)
            file = h5py.File(h5py.h5f.open(os.fsencode(self._path), h5py.h5f.ACC_RDONLY, access))
            found = {name: file.get(name) for name in self._names}
            missing = [name for name, data in found.items() if not hasattr(data, "shape")]
            if missing or not found:
                raise ValueError(f"names must be datasets in {self._path}, got {missing}. The file has {sorted(file)}.")
            self._opened = os.getpid(), list(found.values())
        return self._opened[1]


_CHUNK = 1024
"""Samples that are read and collated at a time: few enough that they need little memory beside the shard."""

Indices = int | slice | torch.Tensor


class RankCachedDataset(Dataset[Any]):
    """This rank's shard of a dataset, read once and kept in memory as one tensor per leaf.

    The shards are consecutive and balanced; in rank order they are the dataset.

    Args:
        dataset: A map-style dataset with a length, the same on all ranks. Its samples are numbers, arrays, tensors, or
            tuples, lists and mappings of such, all of the same shape. Of an :class:`Hdf5Dataset` only the shard is
            read.
        device: Where to keep the shard; None keeps it in host memory, pinned if this rank uses CUDA.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Attributes:
        sizes: Number of samples of each rank's shard, in rank order.

    Raises:
        TypeError: The dataset is not a map-style dataset with a length, or its samples do not consist of numbers.
        ValueError: The dataset is empty, or two samples differ in shape.

    Example on two ranks:
        >>> shard = RankCachedDataset(TensorDataset(torch.arange(5)))
        >>> shard.sizes, all_gather_objects(shard[:][0].tolist())
        ([3, 2], [[0, 1, 2], [3, 4]])
    """

    _is_shard = True  # to be divided no more

    def __init__(
        self, dataset: Dataset[Any], *, device: torch.device | str | None = None, group: GroupLike = None
    ) -> None:
        members = resolve_group(group)
        length = length_of(dataset)
        if not length:
            raise ValueError("dataset must have at least one sample to be cached, got none. Check where it reads from.")
        self._ranks, self.sizes = members.ranks, split_sizes(length, members.size)
        start = sum(self.sizes[: members.rank])
        self._length = self.sizes[members.rank]
        spare = 0 if self._length else 1  # a sample for a rank with an empty shard, which takes part with weight 0
        shard = range(0, spare) if spare else range(start, start + self._length)
        self._tensors, self._structure = _read(_reader(dataset), shard)
        if device is not None:
            self._tensors = [tensor.to(device) for tensor in self._tensors]
        self._is_pinned = device is None and DistributedManager().cuda
        if self._is_pinned:
            self._tensors = [tensor.pin_memory() for tensor in self._tensors]
        is_flat = self._structure == tree_structure(tuple(self._tensors))
        self._unflatten = tuple if is_flat else functools.partial(tree_unflatten, treespec=self._structure)

    def __len__(self) -> int:
        """Return the number of samples in this rank's shard."""
        return self._length

    def __getitem__(self, indices: Indices) -> Any:
        """Return one sample, or several as one batch; indices are relative to the shard."""
        if not isinstance(indices, torch.Tensor):
            own = slice(self._length)  # the spare sample is for the loader, which asks for it by a tensor
            return self._unflatten([tensor[own][indices] for tensor in self._tensors])
        if not self._is_pinned:
            indices = indices.to(self._tensors[0].device)
            return self._unflatten([tensor.index_select(0, indices) for tensor in self._tensors])
        return self._unflatten([_take_pinned(tensor, indices) for tensor in self._tensors])


class _CachedTrainingLoader(TrainingLoader):
    """A TrainingLoader that takes each batch out of memory at once."""

    def _read(self, epoch: int, position: int) -> Iterator[Any]:
        return (self.dataset[part] for part in self.batches.parts(epoch, position))


class _CachedEvaluationLoader(EvaluationLoader):
    """An EvaluationLoader that takes each batch out of memory at once."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises an iterator of its own
        parts = torch.split(torch.arange(len(self.batches.own)), self.batches.batch_size)
        return (self.dataset[part] for part in parts if len(part))


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

    Local. Like :func:`distributed_loader`, except that each rank draws from its own shard, so the contents of a batch
    depend on the number of ranks. Batches are new tensors, copied from memory at once; no workers are needed.

    Args:
        dataset: A :class:`RankCachedDataset`, or a dataset to make one of.
        evaluation: Load for evaluation: the ranks read the dataset once, in order.
        batch_size: Samples per rank and step.
        shuffle: Draw in a new order in each epoch; None does so for training.
        drop_last: Drop the steps in which a rank has no full batch; for training only.
        seed: Seed of the order, the same on all ranks.
        device: See :class:`RankCachedDataset`.
        group: The ranks that share the dataset: a process group, the name of one, or None for the world.

    Raises:
        TypeError: See :class:`RankCachedDataset`; or an option is for training only.
        ValueError: See :class:`RankCachedDataset`; or an option is not valid, or the shard is of another group.

    Example on two ranks:
        >>> loader = rank_cached_loader(TensorDataset(torch.arange(5)), batch_size=2, shuffle=False)
        >>> all_gather_objects([batch.tolist() for (batch,) in loader])  # the last one of rank 1 has weight 0
        [[[0, 1], [2]], [[3, 4], [3]]]
    """
    if not isinstance(dataset, RankCachedDataset):
        dataset = RankCachedDataset(dataset, device=device, group=group)
    elif device is not None:
        raise TypeError("device must be left out: the dataset is cached already. Pass it to RankCachedDataset.")
    ranks = resolve_group(group).ranks
    if dataset._ranks != ranks:
        raise ValueError(
            f"group must be the one that shares the shard's dataset, ranks {list(dataset._ranks)}, got ranks "
            f"{list(ranks)}. Pass that group, or cache the dataset for this one."
        )
    if evaluation:
        check_for_evaluation(shuffle=shuffle, drop_last=drop_last)
        return _CachedEvaluationLoader(dataset, EvaluationBatches(sum(dataset.sizes), batch_size, group=group))
    batches = ShardBatches(
        dataset.sizes, batch_size, shuffle=shuffle is not False, drop_last=drop_last, seed=seed, group=group
    )
    return _CachedTrainingLoader(dataset, batches)


def _reader(dataset: Dataset[Any]) -> Callable[[range], Any]:
    """Return a function that reads consecutive samples as one batch; a subclass may have samples of its own."""
    if type(dataset) is TensorDataset:
        return lambda chunk: tuple(tensor[chunk.start : chunk.stop] for tensor in dataset.tensors)
    if type(dataset) is Hdf5Dataset:
        return lambda chunk: tuple(torch.as_tensor(data[chunk.start : chunk.stop]) for data in dataset.arrays())
    return lambda chunk: default_collate([dataset[index] for index in chunk])


def _read(reader: Callable[[range], Any], shard: range) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the leaves of a shard's samples, one tensor each, and the structure of a sample."""
    leaves, structure = tree_flatten(reader(shard[:1]))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"samples must consist of numbers to be cached, got {leaf!r:.80}. Use distributed_loader.")
    tensors = [torch.empty(len(shard), *leaf.shape[1:], dtype=leaf.dtype) for leaf in leaves]
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    for start in range(0, len(shard), _CHUNK):
        chunk = shard[start : start + _CHUNK]
        try:
            leaves, found = tree_flatten(reader(chunk))
        except RuntimeError as error:
            raise _unequal(chunk) from error
        if found != structure or [(leaf.shape[1:], leaf.dtype) for leaf in leaves] != kinds:
            raise _unequal(chunk)
        for leaf, tensor in zip(leaves, tensors, strict=True):
            tensor[start : start + len(chunk)] = leaf
    return tensors, structure


def _unequal(chunk: range) -> ValueError:
    return ValueError(
        f"samples must have the same shape and dtype to be cached, got different ones among {chunk.start} to "
        f"{chunk.stop - 1}. Convert or pad them, or use distributed_loader."
    )


def _take_pinned(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    batch = torch.empty(len(indices), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=batch)
