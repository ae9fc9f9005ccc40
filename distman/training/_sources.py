"""The batches of the training steps, the same number of steps on all ranks."""

from __future__ import annotations

import functools
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import data

from distman._base.log import logger
from distman._coordination import step_times
from distman._coordination.wait_scope import collective
from distman._torch_internals import tree_leaves
from distman.collectives import all_gather_numbers, broadcast_data, sum_numbers
from distman.data import (
    TrainingLoader,
    generators_preserved,
    generators_state,
    set_generators_state,
    set_states_of,
    states_of,
)
from distman.errors import DistmanError
from distman.manager import DistributedManager

NumSamples = Callable[[Any], int]
_OF_KNOWN_LENGTH = (
    data.DistributedSampler,
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
)
"""Samplers that draw as many indices as their length says; a subclass may not."""
_NOTHING = object()


class Step(NamedTuple):
    """This rank's batch of a step, as the loader returned it."""

    batch: Any
    num_own: int  # samples in it; 0 where the rank has none left and takes part with weight 0
    num_total: int  # samples of all ranks


def check_ranks(loader: TrainingLoader, otherwise: str) -> None:
    """Refuse a loader of a part of the ranks, whose numbers of samples are not those of all."""
    if loader.batches.num_ranks != DistributedManager().world_size:
        raise ValueError(
            "a loader to train with must distribute its data over all ranks, got one for "
            f"{loader.batches.num_ranks}. Leave its group out, or {otherwise}."
        )


def check_starts_over(name: str, batches: object) -> None:
    if isinstance(batches, Iterator):
        raise TypeError(
            f"{name} must be re-iterable, once per epoch, got the iterator {batches!r}. Pass a DataLoader, or an "
            "object whose __iter__ starts over."
        )


class LoaderSource:
    """Steps of a loader that distributes the samples by a plan known to all ranks."""

    def __init__(self, loader: TrainingLoader, num_samples: NumSamples | None = None) -> None:
        if not len(loader):
            raise ValueError("a loader to train with must have a full batch, got none. Choose a smaller batch_size.")
        if num_samples is None:
            check_ranks(loader, "pass num_samples where ranks share samples")
        self.loader = loader
        self._count = num_samples
        self._epoch, self._position = 0, 0  # counted here: the program may iterate over the loader meanwhile

    def begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0

    def steps(self, epoch: int) -> Generator[Step]:
        if self._epoch > epoch:
            return
        self.loader.load_state_dict(self.state_dict())
        sampler = self.loader.batches.given
        if sampler is not None and len({number for (number,) in _exchange(sampler.checksum(epoch))}) > 1:
            raise DistmanError(
                f"the samplers of all ranks must draw the same, which differs in epoch {epoch}. Let them draw from the "
                "global generators, or from one that is their attribute, and not depend on the rank."
            )
        for batch in self.loader:
            self._position += self.loader.batches.stride
            if self._count is None:
                yield Step(batch, self.loader.num_own, self.loader.num_total)
            else:
                num_own = counted(batch, self._count) if self.loader.num_own else 0
                yield Step(batch, num_own, _sum_samples(num_own))
        self.begin(epoch + 1)

    def num_steps(self) -> int:
        return len(self.loader)

    @property
    def batch_size(self) -> int | None:
        return getattr(self.loader.batches, "batch_size", None)

    def state_dict(self) -> dict[str, Any]:
        return self.loader._state_at(self._epoch, self._position)

    def load_state_dict(self, state: Mapping[str, Any], *, is_same_job: bool) -> bool:  # noqa: ARG002 - makes no difference
        """Resume after this position, saved by any number of ranks; return False if the data have changed."""
        self.loader.load_state_dict(state)
        reached = self.loader.state_dict()
        self._epoch, self._position = reached["epoch"], reached["position"]
        return bool(self._position == state["position"])


class ForeignSource:
    """Steps of batches that each rank gets in its own way, in numbers that may differ.

    Before the first step of an epoch the ranks exchange their numbers of samples, and before each step their total,
    unless the lengths of all ranks' loaders say it. A rank that has none left takes part with its last batch, or with
    another rank's if it never had one, with weight 0.
    """

    def __init__(self, batches: Iterable[Any], num_samples: NumSamples | None = None) -> None:
        check_starts_over("batches", batches)
        self.batches = batches
        self._count = num_samples or count_samples
        self._epoch, self._num_taken = 0, 0
        self._at_start: dict[str, Any] | None = None  # of the epoch: the global generators
        self._own_at_start: dict[str, Any] | None = None  # and those that the loader holds
        self._last: Any = _NOTHING  # batch of this rank
        self._is_exhausted = False  # this rank's part of the epoch
        self._lengths: Counter[tuple[int, int]] = Counter()  # of the ranks' loaders; none unless all are known
        self._own_lengths = (0, 0)
        self._is_compared = DistributedManager().world_size == 1
        self._had_workers = False  # in the run that is resumed, in epochs before this one

    @property
    def _stateful(self) -> Any:
        """What restores a position without reading: the loader, or the stream that it reads in this process.

        A loader of torchdata that is at an epoch's end draws random numbers for that epoch once more, and one with
        workers does not know the generators of these. So the former begins anew, and the latter is read again.
        """
        batches: Any = self.batches
        dataset = getattr(batches, "dataset", None)
        is_read_here = getattr(batches, "num_workers", 1) == 0
        holders = [batches, dataset] if is_read_here and isinstance(dataset, data.IterableDataset) else [batches]
        if any(cls.__module__.startswith("torchdata.stateful_dataloader") for cls in type(batches).__mro__):
            holders = [batches] if self._num_taken and (is_read_here or _has_state(dataset)) else []
        return next((one for one in holders if _has_state(one)), None)

    def _first_total(self, num_own: int) -> int:
        """Return the number of samples of all ranks in an epoch's first step, for which each has a batch then."""
        checksum = 0 if self._is_compared else _checksum(self._example())
        is_counted = self._count is count_samples
        is_as_drawn = is_counted and getattr(self.batches, "collate_fn", None) is data.default_collate
        lengths = _drawn_lengths(self.batches) if is_as_drawn else (0, 0)
        self._own_lengths = lengths if num_own == _num_in_batch(self._num_taken, *lengths) else (0, 0)
        gathered = _exchange(num_own, self._last is _NOTHING, checksum, *self._own_lengths)
        if checksum and all(row[:3] == gathered[0][:3] for row in gathered) and DistributedManager().is_main:
            logger.warning(
                "the first sample is the same on all ranks: each seems to read all samples instead of its part. Use "
                "distributed_loader(dataset, ...) in place of the loader, or share a stream out by "
                "DataLoader(distributed_stream(dataset))"
            )
        self._is_compared = True
        are_known = all(row[4] for row in gathered)
        self._lengths = Counter((row[3], row[4]) for row in gathered if are_known)
        total, lacking = sum(row[0] for row in gathered), [bool(row[1]) for row in gathered]
        if total and any(lacking):
            batch = broadcast_data(None if self._last is _NOTHING else self._last, src=lacking.index(False))
            self._last = batch if self._last is _NOTHING else self._last
        return total

    def _example(self) -> Any:
        """Return what is the same on all ranks that read the same: a shuffled loader's first batch is not."""
        loader: Any = self.batches
        if self._last is _NOTHING or not isinstance(getattr(loader, "sampler", None), data.RandomSampler):
            return self._last
        with generators_preserved():
            return loader.dataset[0]

    def _next_total(self, num_own: int) -> int:
        if not self._lengths:
            return _sum_samples(num_own)
        expected = _num_in_batch(self._num_taken, *self._own_lengths)
        if num_own != expected:
            raise ValueError(
                f"a batch must have as many samples as its sampler has drawn, {expected}, got {num_own} in batch "
                f"{self._num_taken} of epoch {self._epoch}. Pass the loader a collate_fn of your own: what one returns "
                "is counted batch by batch."
            )
        return sum(_num_in_batch(self._num_taken, *one) * num for one, num in self._lengths.items())

    def begin(self, epoch: int) -> None:
        self._epoch, self._num_taken, self._is_exhausted = epoch, 0, False
        self._at_start = self._own_at_start = None

    def steps(self, epoch: int) -> Generator[Step]:
        """Yield the rest of an epoch; nothing if the next one has been reached. Collective."""
        if self._epoch > epoch:
            return
        iterator = step_times.current().batches(self._resume(epoch))
        num_own = self._take(iterator)
        num_total = self._first_total(num_own)
        while num_total:
            self._num_taken += 1
            yield Step(self._last, num_own, num_total)
            num_own = self._take(iterator)
            num_total = self._next_total(num_own)
        if not self._num_taken:
            raise ValueError(f"no rank has a batch to train with in epoch {epoch}. Check the data.")
        self.begin(epoch + 1)

    def _resume(self, epoch: int) -> Iterator[Any]:
        """Return an iterator that has skipped the batches already taken, with the random numbers of that time."""
        batch_sampler: Any = getattr(self.batches, "batch_sampler", None)
        inner = [getattr(self.batches, name, None) for name in ("sampler", "dataset")]
        parts: list[Any] = [self.batches, batch_sampler, getattr(batch_sampler, "sampler", None), *inner]
        for part in {id(one): one for one in parts}.values():  # torch's own batch sampler has the loader's
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if self._at_start is None:
            self._at_start, self._own_at_start = generators_state(), states_of(self.batches)
            return self._begin_reading()
        set_states_of(self.batches, self._own_at_start or {})
        with generators_preserved():
            set_generators_state(self._at_start)
            iterator = self._begin_reading()
            if self._stateful is not None:
                return iter(()) if self._is_exhausted else iterator  # at its end, a loader begins the next epoch
            for _ in range(self._num_taken):
                self._take(iterator)
        return iterator

    def _begin_reading(self) -> Iterator[Any]:
        """Return an iterator over a pass; of workers that persisted in the run that is resumed, their next one."""
        if self._had_workers and not (self._num_taken and self._stateful is not None):
            own = states_of(self.batches)
            with generators_preserved():
                iter(self.batches)  # starts them, which draws random numbers that the next passes do not draw
            set_states_of(self.batches, own)
        self._had_workers = False
        return iter(self.batches)

    def num_steps(self) -> int | None:
        batches: Any = self.batches
        try:
            return len(batches)
        except (TypeError, NotImplementedError):  # of a stream, or of a loader over one
            return None

    @property
    def batch_size(self) -> int | None:
        size = getattr(self.batches, "batch_size", None)
        return size if isinstance(size, int) else None

    def state_dict(self) -> dict[str, Any]:
        generators, stateful = self._own_at_start, self._stateful
        return {
            "epoch": self._epoch,
            "num_taken": self._num_taken,
            "is_exhausted": self._is_exhausted,
            "random_at_start": self._at_start,
            "generators_at_start": states_of(self.batches) if generators is None else generators,
            "batch_size": self.batch_size,
            "own": None if stateful is None else stateful.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_same_job: bool) -> bool:
        """Resume after this position; return False if another number of ranks saved it."""
        self.begin(state["epoch"])
        if not is_same_job:
            logger.warning("epoch %d starts over: its position was saved by another number of ranks", self._epoch)
            return False
        if state["num_taken"] and state.get("batch_size", self.batch_size) != self.batch_size:
            logger.warning("epoch %d starts over: its position was saved with another batch_size", self._epoch)
            return False
        persists = getattr(self.batches, "persistent_workers", False)
        self._had_workers = bool(persists and self._epoch)
        if persists and (self._epoch or state["num_taken"]):
            logger.warning(
                "random transforms go on with other numbers than in the interrupted run: workers that persist keep "
                "theirs, which cannot be saved. Set persistent_workers=False, or pass the dataset instead of a loader"
            )
        self._num_taken, self._at_start = state["num_taken"], state["random_at_start"]
        self._is_exhausted = state["is_exhausted"]
        self._own_at_start = state["generators_at_start"]
        set_states_of(self.batches, self._own_at_start or {})
        stateful = self._stateful
        if state["own"] is not None and stateful is not None and (self._num_taken or stateful is self.batches):
            stateful.load_state_dict(state["own"])  # a stream between two epochs is at its end, and would stay there
        return True

    def _take(self, iterator: Iterator[Any]) -> int:
        for batch in iterator:
            num_samples = counted(batch, self._count)
            if num_samples:
                self._last = batch
                return num_samples
        self._is_exhausted = True
        return 0


Source = LoaderSource | ForeignSource  # steps of one epoch after another, the same number on all ranks


def make_source(batches: Any, num_samples: NumSamples | None) -> Source:
    return (LoaderSource if isinstance(batches, TrainingLoader) else ForeignSource)(batches, num_samples)


def _has_state(value: object) -> bool:
    return hasattr(value, "load_state_dict") and hasattr(value, "state_dict")


def _checksum(batch: Any) -> int:
    """Return a number that is the same for equal batches; 0 if there is nothing to compare."""
    found = next((one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.numel()), None)
    if found is None or found.layout != torch.strided or bool((found == found.flatten()[0]).all()):  # of constant data
        return 0
    return zlib.crc32(found.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


@collective
def _exchange(*numbers: int) -> list[list[int]]:
    return all_gather_numbers(numbers, DistributedManager().resolve_group(None))


@collective
def _sum_samples(number: int) -> int:
    members = DistributedManager().resolve_group(None)
    (total,) = sum_numbers([number], "the next step of a training", ["number of samples"], members)
    return int(total)


def _drawn_lengths(batches: Any) -> tuple[int, int]:
    """Return how many samples are drawn in a pass through a loader, and for a batch; zeros where that is unknown."""
    drawn: Any = batches.batch_sampler if type(batches) is data.DataLoader else None
    sampler: Any = drawn.sampler if type(drawn) is data.BatchSampler else None
    if type(sampler) not in _OF_KNOWN_LENGTH:
        return 0, 0
    num_all = len(sampler)
    return num_all - num_all % drawn.batch_size if drawn.drop_last else num_all, drawn.batch_size


def drawn_numbers(batches: Any) -> Callable[[int], int] | None:
    """Return a function that says how many samples are drawn for each batch of a loader; None if that is unknown."""
    num_all, size = _drawn_lengths(batches)
    return functools.partial(_num_in_batch, num_all=num_all, size=size) if size else None


def _num_in_batch(index: int, num_all: int, size: int) -> int:
    """Return the number of samples in a batch of a loader of such lengths; 0 after the last."""
    return max(0, min(size, num_all - index * size))


def counted(batch: Any, num_samples: NumSamples) -> int:
    value = num_samples(batch)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"num_samples must return a whole number, got {value!r}. Return over how many samples the loss is a mean."
        ) from None
    if number < 0:
        raise ValueError(f"num_samples must return at least 0, got {number}. Return the number of samples.")
    return number


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor, or its own without one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return len(leaf) if leaf.ndim else 1
    return len(batch)
