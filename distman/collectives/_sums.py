"""Sums of what the ranks send, which are the same bits in whatever order it comes."""

from __future__ import annotations

import torch

from distman.collectives._result_memory import new_empty

_IN_FLOAT32 = (torch.float16, torch.bfloat16)


class SumInRankOrder:
    """The sum of one piece from each rank; this rank's own is never changed."""

    def __init__(self, own: torch.Tensor, rank: int, *, use_fp32: bool) -> None:
        self._own = own
        self._dtype = torch.float32 if use_fp32 and own.dtype in _IN_FLOAT32 else own.dtype
        self._waiting = {rank: own}
        self._next = 0
        self._total: torch.Tensor | None = None

    def add(self, rank: int, piece: torch.Tensor) -> None:
        """Add another rank's piece, which may change afterwards."""
        self._waiting[rank] = piece.to(self._own.device)
        while self._next in self._waiting and self._add_next():
            pass
        if rank in self._waiting:  # one before it is to come
            self._waiting[rank] = _copied(self._waiting[rank])

    def result(self) -> torch.Tensor:
        total = self._total if self._total is not None else _copied(self._own)  # there are no others
        return total.to(self._own.dtype)

    def _add_next(self) -> bool:
        """Add the next piece; return False where one more is needed to begin without a copy."""
        piece, second = self._waiting[self._next], self._waiting.get(self._next + 1)
        if self._total is not None:
            self._total += piece
        elif self._dtype != piece.dtype:
            self._total = piece.to(self._dtype)
        elif second is not None:
            self._total = torch.add(piece, second, out=new_empty(piece, piece.shape))
            self._pass_by()
        elif piece is self._own:
            return False
        else:
            self._total = _copied(piece)
        self._pass_by()
        return True

    def _pass_by(self) -> None:
        del self._waiting[self._next]
        self._next += 1


def _copied(piece: torch.Tensor) -> torch.Tensor:
    return new_empty(piece, piece.shape).copy_(piece)
