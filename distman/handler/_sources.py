"""Where the steps of training come from: the same number on all ranks."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman._log import logger
from distman._torch_internals import tree_leaves
from distman.collectives._exchange import all_gather_numbers, control_device
from distman.collectives._objects import broadcast_data
from distman.data import TrainingLoader
from distman.handler._randomness import generators_preserved, generators_state, set_generators_state
from distman.manager import DistributedManager


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch of this rank.

    Attributes:
        batch: What the loader made.
        num_own: How many samples it holds; 0 where it only keeps the other ranks company.
        num_total: How many samples all ranks have at this step.
    """

    batch: Any
    num_own: int
    num_total: int


class Source(abc.ABC):
    """Steps of one epoch after another, the same number on all ranks."""

    @abc.abstractmethod
    def begin(self, epoch: int) -> None:
        """Stand at the start of an epoch."""

    @abc.abstractmethod
    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield what is left of an epoch; nothing if that is over.

        Local; collective where the ranks have to agree.
        """

    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """Return the number of steps of a whole epoch; None if nobody knows."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest step."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], *, is_same_job: bool) -> bool:
        """Go on after this position; return False where it means nothing here, and the epoch begins anew.

        Args:
            state: The position.
            is_same_job: Whether it was saved by as many ranks.
        """


class LoaderSource(Source):
    """Steps of a loader that shares out the samples by a plan known to all ranks.

    Args:
        loader: The loader.

    Raises:
        ValueError: It has no batch, or is one of a group.
    """

    def __init__(self, loader: TrainingLoader) -> None:
        if not len(loader):
            raise ValueError("a loader to train with must have a full batch, got none. Make batch_size smaller.")
        if loader.batches.num_ranks != DistributedManager().world_size:
            raise ValueError(
                f"a loader to train with must share out its data over all ranks, got one for "
                f"{loader.batches.num_ranks}. Leave its group out."
            )
        self.loader = loader
        self._epoch, self._position = 0, 0  # counted here: the program may go through the loader meanwhile

    def begin(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        self._epoch, self._position = epoch, 0

    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield what is left of an epoch; nothing if the next one has been reached."""
        if self._epoch > epoch:
            return
        self.loader.load_state_dict(self.state_dict())
        stride = self.loader.batches.stride
        for batch in self.loader:
            self._position += stride
            yield Step(batch, self.loader.num_own, self.loader.num_total)
        self.begin(epoch + 1)

    def num_steps(self) -> int:
        """Return the number of steps of a whole epoch."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest step."""
        return self.loader.state_at(self._epoch, self._position)

    def load_state_dict(self, state: Mapping[str, Any], *, is_same_job: bool) -> bool:
        """Go on after this position, of any number of ranks; return False where the data are others."""
        self.loader.load_state_dict(state)
        reached = self.loader.state_dict()
        self._epoch, self._position = reached["epoch"], reached["position"]
        return bool(self._position == state["position"])


class ForeignSource(Source):
    """Steps of batches that each rank finds in a way of its own, in numbers that may differ.

    Before each step the ranks tell each other how many samples they have. A rank that has none left takes its last
    batch along, or another rank's if it never had one, and the step counts none of its samples.

    Args:
        batches: A DataLoader, or what else can be iterated once for each epoch. A ``sampler`` with ``set_epoch`` is
            told the epoch. A position is restored by ``load_state_dict``, if it has that, else by going past batches.

    Raises:
        TypeError: It can be iterated only once.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches must be there again in each epoch, got the iterator {batches!r}. Pass a DataLoader, or an "
                "object whose __iter__ begins anew."
            )
        self.batches = batches
        self._epoch, self._num_past = 0, 0
        self._at_start: dict[str, Any] | None = None
        self._last: Any = None
        self._has_last = False

    @collective
    def _agree(self, num_samples: int, *, lacks_all: bool) -> tuple[list[int], list[bool]]:
        members = DistributedManager().resolve_group(None)
        device = control_device(members, DistributedManager().device)
        told = all_gather_numbers([num_samples, lacks_all], members, device)
        return [num for num, _ in told], [bool(lacks) for _, lacks in told]

    def begin(self, epoch: int) -> None:
        """Stand at the start of an epoch."""
        self._epoch, self._num_past, self._at_start = epoch, 0, None

    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield what is left of an epoch; nothing if the next one has been reached.

        Collective.
        """
        if self._epoch > epoch:
            return
        iterator = self._resume(epoch)
        while True:
            num_own = self._take(iterator)
            nums, lacking = self._agree(num_own, lacks_all=not self._has_last)
            if not any(nums):
                break
            if any(lacking):
                batch = broadcast_data(self._last, src=lacking.index(False))
                self._last, self._has_last = (self._last, True) if self._has_last else (batch, True)
            self._num_past += 1
            yield Step(self._last, num_own, sum(nums))
        if not self._num_past:
            raise ValueError(f"there must be batches to train with, got none on any rank in epoch {epoch}. Bring some.")
        self.begin(epoch + 1)

    def _resume(self, epoch: int) -> Iterator[Any]:
        """Return an iterator that has gone past what was taken before, with the random numbers of that time."""
        sampler: Any = getattr(self.batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if self._at_start is None or hasattr(self.batches, "load_state_dict"):
            self._at_start = generators_state()
            return iter(self.batches)
        with generators_preserved():
            set_generators_state(self._at_start)
            iterator = iter(self.batches)
            for _ in range(self._num_past):
                self._take(iterator)
        return iterator

    def num_steps(self) -> int | None:
        """Return the number of this rank's batches; None if it cannot be known."""
        return len(self.batches) if isinstance(self.batches, Sized) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest step."""
        batches: Any = self.batches
        own = batches.state_dict() if hasattr(batches, "state_dict") else None
        return {"epoch": self._epoch, "num_past": self._num_past, "random_at_start": self._at_start, "own": own}

    def load_state_dict(self, state: Mapping[str, Any], *, is_same_job: bool) -> bool:
        """Go on after this position; return False if it was saved by another number of ranks."""
        self.begin(state["epoch"])
        if not is_same_job:
            logger.warning("epoch %d begins anew: another number of ranks found batches of their own", self._epoch)
            return False
        self._num_past, self._at_start = state["num_past"], state["random_at_start"]
        if state["own"] is not None and hasattr(self.batches, "load_state_dict"):
            self.batches.load_state_dict(state["own"])
        return True

    def _take(self, iterator: Iterator[Any]) -> int:
        """Keep the next batch, if there is one, and return its number of samples."""
        for batch in iterator:
            num_samples = count_samples(batch)
            if num_samples:
                self._last, self._has_last = batch, True
                return num_samples
        return 0


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor, or its own."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return len(leaf) if leaf.ndim else 1
    return len(batch)
