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

from distman.collectives.exchange import exchange
from distman.fft.blocks import Run
from distman.groups import Group
from distman.topology import split_sizes

__all__ = ["HermitianRows", "negated"]

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class HermitianRows:
    """How the rows of a dim are shared out: who owns them, and who computes them.

    A rank that computes holds the rows and then their mirror images, sorted by the ranks that own them; rows that
    nobody owns come last.

    Attributes:
        runs: For each rank, the rows of the first half that it computes, as runs of neighbours.
        num_computed: For each rank, how many these are.
        num_held: For each rank, how many it holds with their images.
        places: For each rank, where it holds each of them.
        mirror_places: For each rank, where it holds their mirror images; a row that is its own has the same place.
        counts: ``counts[i][j]`` rows travel from rank i, which computes them, to rank j, which owns them.
        owned: For each rank, which of its rows come, in the order of the ranks that computed them.
    """

    runs: tuple[tuple[Run, ...], ...]
    num_computed: tuple[int, ...]
    num_held: tuple[int, ...]
    places: tuple[torch.Tensor, ...]
    mirror_places: tuple[torch.Tensor, ...]
    counts: tuple[tuple[int, ...], ...]
    owned: tuple[torch.Tensor, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, length: int, sizes: tuple[int, ...]) -> HermitianRows:
        """Return the rows of a dim of this length, of which each rank owns so many.

        Local.
        """
        size = len(sizes)
        owner = np.repeat(np.arange(size + 1), [*sizes, length - sum(sizes)])
        computer = _computers(length, owner, size)
        offset = np.cumsum([0, *sizes])
        runs, places, mirror_places, counts, sent = [], [], [], [], []
        for rank in range(size):
            mine = np.flatnonzero(computer == rank)
            mirrored = (length - mine) % length
            held = np.concatenate([mine, mirrored[mirrored != mine]])
            held = held[np.argsort(owner[held], kind="stable")]
            place = np.full(length, -1)
            place[held] = np.arange(len(held))
            starts = np.flatnonzero(np.diff(mine, prepend=-2) > 1)
            runs.append(tuple((int(one[0]), len(one)) for one in np.split(mine, starts)[1:]))
            places.append(torch.from_numpy(place[mine]))
            mirror_places.append(torch.from_numpy(place[mirrored]))
            counts.append(tuple(np.bincount(owner[held], minlength=size + 1)[:size].tolist()))
            sent.append(held)
        owned = (np.concatenate([held[owner[held] == rank] for held in sent]) - offset[rank] for rank in range(size))
        return cls(
            tuple(runs),
            tuple(map(len, places)),
            tuple(map(len, sent)),
            tuple(places),
            tuple(mirror_places),
            tuple(counts),
            tuple(map(torch.from_numpy, owned)),
        )

    @property
    def runs_in_order(self) -> list[Run]:
        """Where each run lies behind the runs of the ranks before it, in the order of the rows."""
        runs = [run for mine in self.runs for run in mine]
        places = itertools.accumulate((length for _, length in runs), initial=0)
        return [(place, length) for (_, length), place in sorted(zip(runs, places, strict=False))]

    def to_owners(self, held: torch.Tensor, owned: torch.Tensor, group: Group) -> None:
        """Bring rows and mirror images to the ranks that own them.

        Collective. Blocking.

        Args:
            held: What this rank computed; rows along dim 0.
            owned: What it owns, to be filled; rows along dim 0.
            group: The group.
        """
        outgoing, incoming = self.counts[group.rank], [row[group.rank] for row in self.counts]
        sends = list(held[: sum(outgoing)].split_with_sizes(list(outgoing)))
        receives = [held.new_empty([count, *held.shape[1:]]) for count in incoming]
        receives[group.rank] = sends[group.rank]
        exchange(sends, receives, group)
        for rows, received in zip(self.owned[group.rank].split_with_sizes(incoming), receives, strict=True):
            owned[rows.to(owned.device)] = received

    def to_computers(self, owned: torch.Tensor, group: Group) -> torch.Tensor:
        """Bring owned rows to the ranks that compute with them and their mirror images; rows that nobody owns are zero.

        Collective. Blocking.

        Args:
            owned: What this rank owns; rows along dim 0.
            group: The group.

        Returns:
            What it holds, rows along dim 0.
        """
        outgoing, incoming = [row[group.rank] for row in self.counts], self.counts[group.rank]
        held = owned.new_empty([self.num_held[group.rank], *owned.shape[1:]])
        held[sum(incoming) :] = 0
        sends = [
            owned.index_select(0, rows.to(owned.device)) for rows in self.owned[group.rank].split_with_sizes(outgoing)
        ]
        exchange(sends, held[: sum(incoming)].split_with_sizes(list(incoming)), group)
        return held


def negated(spectrum: torch.Tensor, dims: Sequence[int], length: int | None = None) -> torch.Tensor:
    """Return a spectrum with the frequencies of some dims negated; of the last of them only the first ``length``.

    Local.
    """
    for dim in dims:
        whole = spectrum.shape[dim]
        num_kept = whole if length is None or dim != dims[-1] else length
        rest = spectrum.narrow(dim, whole - num_kept + 1, num_kept - 1).flip(dim)
        spectrum = torch.cat([spectrum.narrow(dim, 0, 1), rest], dim)
    return spectrum


def _computers(length: int, owner: IntArray, size: int) -> IntArray:
    """Return which rank computes each row of the first half: where two own it and its mirror image, half of them each.

    Rows that nobody owns have the owner ``size``.
    """
    rows = np.arange(length // 2 + 1)
    pairs = np.stack([owner[rows], owner[(length - rows) % length]])
    computer = np.empty_like(rows)
    changes = np.flatnonzero(np.any(np.diff(pairs, prepend=-1) != 0, axis=0))
    for run in np.split(rows, changes)[1:]:
        ranks = [rank for rank in pairs[:, run[0]] if rank < size] or list(range(size))
        computer[run] = np.repeat(ranks, split_sizes(len(run), len(ranks)))
    return computer
