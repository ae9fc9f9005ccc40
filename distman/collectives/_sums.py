"""Sums of one piece from each rank, the same bits on all of them."""

from __future__ import annotations

import torch

from distman.collectives._result_memory import new_empty

HALVES = (torch.float16, torch.bfloat16)
"""What ``use_fp32`` adds up in float32."""
NOT_ADDED = (torch.int16, torch.bool)
"""What no backend adds up."""


class SumInRankOrder:
    """The sum of the ranks' pieces, which the others bring in rank order; this rank's own is never changed."""

    def __init__(self, own: torch.Tensor, rank: int, *, use_fp32: bool = False) -> None:
        self._own, self._rank = own, rank
        self._dtype = torch.float32 if use_fp32 and own.dtype in HALVES else own.dtype
        self._total: torch.Tensor | None = None

    def add(self, rank: int, piece: torch.Tensor) -> None:
        """Add another rank's piece, which may change afterwards."""
        piece = piece.to(self._own.device)
        if self._total is not None:
            self._total += piece
        elif self._rank < 2:  # both are the first two, whose order makes no difference
            self._total = torch.add(self._own.to(self._dtype), piece, out=self._new())
        else:
            self._total = self._new().copy_(piece)
        if rank + 1 == self._rank > 1:
            self._total += self._own

    def result(self) -> torch.Tensor:
        total = self._total if self._total is not None else self._new().copy_(self._own)  # of the only rank
        return total.to(self._own.dtype)

    def _new(self) -> torch.Tensor:
        return new_empty(self._own, self._own.shape, self._dtype)
