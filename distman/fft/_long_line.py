"""A transform of one long line that no rank holds as a whole.

A line of ``n = rows * columns`` points is a matrix whose rows follow each other. With ``w = exp(-2 pi i / n)``
and the points ``j = j1 * columns + j2``, the frequency ``k = k1 + rows * k2`` is

    sum over j2 of  w ** (rows * j2 * k2)  *  w ** (j2 * k1)  *  sum over j1 of  w ** (columns * j1 * k1) * x[j1, j2]

so the columns are transformed, then each number is turned, then the rows are transformed.

Source:
    D. H. Bailey, FFTs in external or hierarchical memory, Journal of Supercomputing 4 (1990), 23-35.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch

from distman._job.groups.registry import Group
from distman.fft._blocks import LocalTransform
from distman.fft._plan import LinePlan
from distman.fft._resharding import Rearrangement, Stretch, execute, resized
from distman.topology import split_sizes

_Sign = Literal[-1, 1]

_POINTS = 2**16  # of which sines and cosines are held at a time: 1 MiB


@functools.lru_cache(maxsize=64)
def num_columns(length: int) -> int:
    """Return the largest divisor of a length that is not larger than its root; 1 for a prime."""
    return next(one for one in range(math.isqrt(length), 0, -1) if length % one == 0)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Each number of a matrix is multiplied by ``exp(2 pi i * sign * row * column / length)``."""

    first: int  # number of the first column that this rank has
    length: int  # of the whole line
    sign: _Sign
    group: Group

    def adjoint(self) -> _Turn:
        return dataclasses.replace(self, sign=1 if self.sign < 0 else -1)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = tensor.shape[-2:]
        column = torch.arange(self.first, self.first + columns, device=tensor.device)
        result = torch.empty_like(tensor)
        step = max(1, _POINTS // max(1, columns))
        for start in range(0, rows, step):
            row = torch.arange(start, min(start + step, rows), device=tensor.device)
            angle = torch.outer(row, column).double().mul_(2 * self.sign * math.pi / self.length)
            turn = torch.polar(torch.ones_like(angle), angle).to(tensor.dtype)
            torch.mul(tensor[..., start : start + step, :], turn, out=result[..., start : start + step, :])
        return result


def transform_long(
    tensor: torch.Tensor, local: LocalTransform, sizes: Sequence[int], out_sizes: Sequence[int], group: Group
) -> torch.Tensor:
    """Transform a dim that stays sharded, of a length that is no prime; real data are transformed as complex ones."""
    (dim,), kind, length = local.dims, local.kind, local.length
    if kind == "irfft":
        whole = tuple(split_sizes(length, group.size))
        tensor, sizes = _completed(tensor, dim, tuple(sizes), whole, group), whole
    if kind == "rfft":
        tensor = tensor.to(tensor.dtype.to_complex())
    columns = num_columns(length)
    rows = length // columns
    row_parts, column_parts = (tuple(split_sizes(one, group.size)) for one in (rows, columns))
    tensor = resized(tensor, dim, sizes, [part * columns for part in row_parts], group)
    matrix = tensor.movedim(dim, -1).unflatten(-1, (row_parts[group.rank], columns))
    is_forward = kind in ("fft", "rfft")
    matrix = _transform_matrix(matrix, "fft" if is_forward else "ifft", row_parts, column_parts, local.norm, group)
    tensor = matrix.transpose(-1, -2).flatten(-2).movedim(-1, dim)
    tensor = tensor.real if kind == "irfft" else tensor
    return resized(tensor, dim, [part * rows for part in column_parts], out_sizes, group)


def _transform_matrix(
    matrix: torch.Tensor,
    kind: Literal["fft", "ifft"],
    row_parts: tuple[int, ...],
    column_parts: tuple[int, ...],
    norm: str,
    group: Group,
) -> torch.Tensor:
    """Return the frequencies ``k1 + rows * k2`` for row k1 and column k2; this rank's rows become its columns."""
    rows, columns, first = sum(row_parts), sum(column_parts), sum(column_parts[: group.rank])
    row_dim, column_dim = matrix.ndim - 2, matrix.ndim - 1
    along_rows = LocalTransform(kind, (row_dim,), rows, norm)
    matrix = execute(matrix, LinePlan(along_rows, row_dim, row_parts, column_dim, column_parts, column_dim, group))
    matrix = execute(matrix, _Turn(first, rows * columns, -1 if kind == "fft" else 1, group))
    along_columns = LocalTransform(kind, (column_dim,), columns, norm)
    plan = LinePlan(along_columns, column_dim, column_parts, column_dim, column_parts, row_dim, group)
    return execute(matrix, plan)


def _completed(
    half: torch.Tensor, dim: int, sizes: tuple[int, ...], whole: tuple[int, ...], group: Group
) -> torch.Tensor:
    length, num_there = sum(whole), min(sum(sizes), sum(whole) // 2 + 1)
    there = Stretch(0, 0, num_there)
    num_mirrored = min(num_there - 1, (length - 1) // 2)
    image = Stretch(1, length - num_mirrored, num_mirrored, is_reversed=True)
    direct, mirrored = (execute(half, Rearrangement(dim, sizes, whole, (one,), group)) for one in (there, image))
    return direct + mirrored.conj()
