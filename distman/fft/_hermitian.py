"""The rows of the spectrum of real data that are worth computing, and how they are shared out.

Of a transform of real data over two or more dims, row ``n - k`` is the conjugate of row ``k`` with all other
frequencies negated. So half of the rows are computed, each by a rank that owns the row or its mirror image, and the
other half is read off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from distman._groups.registry import Group
from distman.collectives._exchange import exchange
from distman.collectives._result_memory import new_empty
from distman.fft._blocks import Run
from distman.topology import split_sizes

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class HermitianRows:
    """How the rows of a dim are shared out: which rank owns them, and which computes them.

    A rank holds the rows that it computes, then their mirror images, sorted by the ranks that own them; those that
    nobody owns come last. A pair that nobody owns is not computed.

    Attributes:
        runs: For each rank, the rows of the first half that it computes, as runs of neighbours.
        runs_in_order: Where all rows of the first half lie, in their order, when the runs of all ranks follow each
            other; what nobody computes comes last.
        num_computed: For each rank, how many it computes.
        num_held: How many this rank holds.
        places: Where this rank holds each row that it computes.
        mirror_places: Where it holds their mirror images; a row that is its own has the same place.
        outgoing: How many of them each rank owns.
        incoming: How many of this rank's rows each rank computes.
        owned: This rank's rows in the order in which they come.
    """

    runs: tuple[tuple[Run, ...], ...]
    runs_in_order: tuple[Run, ...]
    num_computed: tuple[int, ...]
    num_held: int
    places: torch.Tensor
    mirror_places: torch.Tensor
    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    owned: torch.Tensor

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, length: int, sizes: tuple[int, ...], rank: int, device: torch.device) -> HermitianRows:
        """Return the rows of a dim of this length, of which each rank owns so many, as this rank needs them."""
        size = len(sizes)
        owner = np.repeat(np.arange(size + 1), [*sizes, length - sum(sizes)])
        computer = _computers(length, owner, size)
        mine = np.flatnonzero(computer == rank)
        mirrored = (length - mine) % length
        held = np.concatenate([mine, mirrored[mirrored != mine]])
        held = held[np.argsort(owner[held], kind="stable")]
        place = np.full(length, -1)
        place[held] = np.arange(len(held))

        owned = np.flatnonzero(owner == rank)
        is_image = owned > length // 2
        source = computer[np.where(is_image, length - owned, owned)]
        order = np.lexsort([np.where(is_image, -owned, owned), is_image, source])  # each sender's rows, then its images

        runs = [_runs(np.flatnonzero(computer == other)) for other in range(size)]
        num_computed = [sum(number for _, number in one) for one in runs]
        starts = itertools.accumulate((number for one in runs for _, number in one), initial=0)
        by_row = sorted(zip((run for one in runs for run in one), starts, strict=False))
        rest = (sum(num_computed), len(computer) - sum(num_computed))
        return cls(
            runs=tuple(runs),
            runs_in_order=(*((start, number) for (_, number), start in by_row), rest),
            num_computed=tuple(num_computed),
            num_held=len(held),
            places=torch.from_numpy(place[mine]).to(device),
            mirror_places=torch.from_numpy(place[mirrored]).to(device),
            outgoing=tuple(np.bincount(owner[held], minlength=size + 1)[:size].tolist()),
            incoming=tuple(np.bincount(source, minlength=size).tolist()),
            owned=torch.from_numpy((owned - sum(sizes[:rank]))[order]).to(device),
        )

    def to_owners(self, held: torch.Tensor, group: Group) -> torch.Tensor:
        """Bring rows and mirror images to the ranks that own them.

        Collective. Blocking.

        Args:
            held: What this rank holds; rows along dim 0.
            group: The group.

        Returns:
            What it owns; rows along dim 0.
        """
        arrived, owned = (new_empty(held, [len(self.owned), *held.shape[1:]]) for _ in range(2))
        sends = held[: sum(self.outgoing)].split_with_sizes(self.outgoing)
        exchange(sends, arrived.split_with_sizes(self.incoming), group)
        owned[self.owned] = arrived
        return owned

    def to_computers(self, owned: torch.Tensor, group: Group) -> torch.Tensor:
        """Bring owned rows to the ranks that compute with them and their mirror images; those nobody owns are zero.

        Collective. Blocking.

        Args:
            owned: What this rank owns; rows along dim 0.
            group: The group.

        Returns:
            What it holds; rows along dim 0.
        """
        num_owned = sum(self.outgoing)
        held = new_empty(owned, [self.num_held, *owned.shape[1:]])
        held[num_owned:] = 0
        sends = owned.index_select(0, self.owned).split_with_sizes(self.incoming)
        exchange(sends, held[:num_owned].split_with_sizes(self.outgoing), group)
        return held


def negated(spectrum: torch.Tensor, dims: Sequence[int], length: int | None = None) -> torch.Tensor:
    """Return a spectrum with the frequencies of some dims negated; of the last of them only the first ``length``."""
    for dim in dims:
        whole = spectrum.shape[dim]
        num_kept = whole if length is None or dim != dims[-1] else length
        rest = spectrum.narrow(dim, whole - num_kept + 1, num_kept - 1).flip(dim)
        spectrum = torch.cat([spectrum.narrow(dim, 0, 1), rest], dim)
    return spectrum


def _computers(length: int, owner: IntArray, size: int) -> IntArray:
    """Return which rank computes each row of the first half: where two own it and its mirror image, half of them each.

    What nobody owns has the owner ``size``, and so has a pair that nobody computes.
    """
    rows = np.arange(length // 2 + 1)
    pairs = np.stack([owner[rows], owner[(length - rows) % length]])
    computer = np.full_like(rows, size)
    changes = np.flatnonzero(np.any(np.diff(pairs, prepend=-1) != 0, axis=0))
    for run in np.split(rows, changes)[1:]:
        ranks = [rank for rank in pairs[:, run[0]] if rank < size]
        if ranks:
            computer[run] = np.repeat(ranks, split_sizes(len(run), len(ranks)))
    return computer


def _runs(rows: IntArray) -> tuple[Run, ...]:
    """Return ascending rows as runs of neighbours."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) > 1)
    return tuple((int(run[0]), len(run)) for run in np.split(rows, starts)[1:])
