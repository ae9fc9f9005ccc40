"""Streams of samples, shared out over the ranks and over the workers of their loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from distman._torch_internals import as_only_worker
from distman.collectives import GroupLike, resolve_group

_Position = tuple[int, int, Any]
"""The part that is being read, how many samples of its shard have been taken, and the state of that shard, if any."""

_START: _Position = (0, 0, None)
_NOT_TOLD = -1  # an epoch, of which the stream leaves to the program what the dataset is told


@dataclasses.dataclass(frozen=True)
class _Part:
    """Every ``step``-th sample of a shard, from ``start`` on."""

    shard: int
    start: int = 0
    step: int = 1


class DistributedStream(IterableDataset[Any]):
    """A stream of which each rank, and each worker of its DataLoader, reads a part; see :func:`distributed_stream`.

    Args:
        dataset: The stream.
        group: The ranks that share it.

    Example on two ranks:
        >>> stream = distributed_stream(range(5))
        >>> all_gather_objects([*stream])
        [[0, 2, 4], [1, 3]]
    """

    def __init__(self, dataset: Iterable[Any], *, group: GroupLike = None) -> None:
        members = resolve_group(group)
        self.dataset: Any = dataset
        self._rank, self._num_ranks = members.rank, members.size
        self._epoch = torch.tensor(_NOT_TOLD)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that persist have to see it
        self._begin = self._reached = _START
        self._source: Any = None  # what is read at the position reached; None between two parts

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's part of this rank's part, or over the rest of it after a restored position."""
        self._reached, self._begin = self._begin, _START
        return self._read(self._reached)

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream, if it has ``set_epoch``, which epoch the next iteration is, also in workers that persist.

        Local. :class:`~distman.handler.NNHandler` does it.

        Args:
            epoch: Index of the epoch, the same on all ranks.

        Example on two ranks:
            >>> class Shuffled:
            ...     epoch = 0
            ...     def set_epoch(self, epoch):
            ...         self.epoch = epoch
            ...     def __iter__(self):
            ...         order = torch.Generator().manual_seed(self.epoch)  # the same in every process
            ...         return iter(torch.randperm(4, generator=order).tolist())
            >>> stream = distributed_stream(Shuffled())
            >>> stream.set_epoch(1)
            >>> sorted(sum(all_gather_objects([*stream]), []))
            [0, 1, 2, 3]
        """
        self._epoch.fill_(epoch)

    def _read(self, begin: _Position) -> Iterator[Any]:
        first, taken, state = begin
        if hasattr(self.dataset, "set_epoch") and self._epoch != _NOT_TOLD:
            self.dataset.set_epoch(int(self._epoch))
        parts = self._parts()
        for index in range(first, len(parts)):
            yield from self._read_part(index, parts[index], taken, state)
            taken, state = 0, None
            self._reached, self._source = (index + 1, 0, None), None

    def _read_part(self, index: int, part: _Part, taken: int, state: Any) -> Iterator[Any]:
        with as_only_worker():  # what splits itself by the worker would do so twice
            source = self._open(part.shard)
            if state is not None:
                source.load_state_dict(state)
            samples = iter(source)
        for position in count(taken):
            with as_only_worker():
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            if position % part.step == part.start:
                self._reached, self._source = (index, position + 1, None), source
                yield sample

    def _open(self, shard: int) -> Any:
        if not hasattr(self.dataset, "shard"):
            return self.dataset
        return self.dataset.shard(num_shards=self._num_shards(), index=shard)

    def _num_shards(self) -> int:
        return int(self.dataset.num_shards) if hasattr(self.dataset, "shard") else 1

    def _parts(self) -> list[_Part]:
        """Return what this worker of this rank reads: by ranks first, whose numbers of workers may differ."""
        of_rank = _share([_Part(shard) for shard in range(self._num_shards())], self._rank, self._num_ranks)
        worker = get_worker_info()
        return of_rank if worker is None else _share(of_rank, worker.id, worker.num_workers)


class _StatefulStream(DistributedStream):
    """A stream that has ``state_dict`` and ``load_state_dict``, so that a position in it is restored without reading.

    Its shards, if it has any, need these methods too.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest sample that was read in this process."""
        part, taken, restored = self._reached
        return {"part": part, "taken": taken, "own": restored if self._source is None else self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a position, saved by the same rank and worker among as many."""
        self._begin = self._reached = (state["part"], state["taken"], state["own"])
        self._source = None


def distributed_stream(dataset: Iterable[Any], *, group: GroupLike = None) -> DistributedStream:
    """Return a stream of which each rank, and each worker of its DataLoader, reads a part: every sample exactly once.

    Local. Pass it to torch's DataLoader, or to one that is like it. The ranks may have different numbers of workers,
    and get different numbers of samples, even none.

    A stream with an attribute ``num_shards`` and a method ``shard(num_shards, index)``, which returns one of that many
    parts as an iterable, is shared out by whole shards as far as that is even; the shards that are left over, or the
    stream if it has none, are read by several processes each, say n, of which each takes every n-th sample. So all of
    them must find the same samples in the same order: shuffle with a generator of your own, seeded by the epoch.
    ``dataset.set_epoch`` is called where it exists, once :meth:`DistributedStream.set_epoch` has been.

    Do not pass a stream that splits itself by rank. One that splits itself by worker finds that it is the only one.

    Args:
        dataset: An IterableDataset, or another iterable of samples that can be iterated over again.
        group: The ranks that share the stream: a process group, the name of one, or None for the world.

    Raises:
        TypeError: It is a loader, an iterator, or a map-style dataset.

    Example on two ranks:
        >>> class Files:
        ...     num_shards = 3
        ...     def shard(self, num_shards, index):
        ...         return [f"file {index}, line {line}" for line in range(2)]
        ...     def __iter__(self):
        ...         return (line for index in range(3) for line in self.shard(3, index))
        >>> loader = torch.utils.data.DataLoader(distributed_stream(Files()), batch_size=2)
        >>> [own[-1] for own in all_gather_objects([*loader])]  # the third file is shared
        [['file 2, line 0'], ['file 2, line 1']]
    """
    is_map_style = isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)
    if is_map_style or isinstance(dataset, DataLoader | Iterator) or not isinstance(dataset, Iterable):
        raise TypeError(
            "dataset must be an IterableDataset, or another iterable of samples that starts over each time, got a "
            f"{type(dataset).__name__}. Pass a map-style dataset to distributed_loader(), and not a loader but what it "
            "loads."
        )
    if hasattr(dataset, "shard") and not hasattr(dataset, "num_shards"):
        raise TypeError(
            f"dataset must have num_shards if it has shard(), got {type(dataset).__name__}. Add the number of shards."
        )
    is_stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return (_StatefulStream if is_stateful else DistributedStream)(dataset, group=group)


def _share(parts: Sequence[_Part], index: int, size: int) -> list[_Part]:
    """Return what one of several readers reads: as many whole parts as all others, and of the rest some samples."""
    num_whole = len(parts) // size * size
    own, rest = list(parts[index:num_whole:size]), parts[num_whole:]
    if rest:
        part = rest[index % len(rest)]
        num_sharing = len(range(index % len(rest), size, len(rest)))
        own.append(_Part(part.shard, part.start + part.step * (index // len(rest)), part.step * num_sharing))
    return own
