"""Transforms of dims that are whole on this rank, done in blocks that fit a processor's cache.

A transform along a dim with a large stride, all at once, takes many times as long as its arithmetic: every number is
on another page. So a block is copied in the order of its memory, turned in the cache, and transformed there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from distman.collectives import new_empty

Index = tuple[slice, ...]
Run = tuple[int, int]  # start and length
Kind = Literal["fft", "ifft", "rfft", "irfft"]

_BLOCK_BYTES = 2**20  # bytes per thread: most of a block and its transform stay in a second-level cache of 2 MiB
_FEWEST = 16  # numbers side by side: fewer would leave cache lines half read, or write them more than once
_MOST_BYTES = 2**24  # of a block that would have fewer: it takes memory beside the tensor and its transform

ADJOINT: dict[Kind, Kind] = {"fft": "ifft", "ifft": "fft", "rfft": "irfft", "irfft": "rfft"}
DUAL = {"backward": "forward", "forward": "backward", "ortho": "ortho"}  # the norm of the adjoint

TRANSFORMS = {"fft": torch.fft.fftn, "ifft": torch.fft.ifftn, "rfft": torch.fft.rfftn, "irfft": torch.fft.irfftn}


@dataclasses.dataclass(frozen=True)
class LocalTransform:
    kind: Kind  # rfft gives half of a spectrum, irfft takes one, along the last of the dims
    dims: tuple[int, ...]
    length: int  # of the signal, along the last of the dims
    norm: str
    is_weighted: bool = False  # frequencies that stand for two are doubled after rfft, halved before irfft

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        """Return the transform of a block whose last dims are these."""
        axes = tuple(range(-len(self.dims), 0))
        lengths = [*(block.shape[axis] for axis in axes[:-1]), self.length]
        if self.kind == "irfft" and self.is_weighted:
            block = scale_pairs(block.clone(), -1, self.length, 0.5)
        transformed: torch.Tensor = TRANSFORMS[self.kind](block, lengths, axes, self.norm)
        if self.kind == "rfft" and self.is_weighted:
            scale_pairs(transformed, -1, self.length, 2.0)
        return transformed

    def shape(self, shape: Sequence[int]) -> list[int]:
        lengths = list(shape)
        lengths[self.dims[-1]] = self.length // 2 + 1 if self.kind == "rfft" else self.length
        return lengths

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return {"rfft": dtype.to_complex(), "irfft": dtype.to_real()}.get(self.kind, dtype)


def scale_pairs(half: torch.Tensor, dim: int, length: int, factor: float) -> torch.Tensor:
    """Scale, in place, the frequencies of half of a spectrum that stand for two."""
    half.narrow(dim, 1, (length - 1) // 2).mul_(factor)
    return half


def empty_with_last(
    tensor: torch.Tensor, shape: Sequence[int], last: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    order = _order(len(shape), last)
    return new_empty(tensor, [shape[dim] for dim in order], dtype).permute(_inverse(order))


def indices_of_blocks(tensor: torch.Tensor, whole: Iterable[int], across: int | None = None) -> Iterator[Index]:
    """Cut a tensor into blocks, whole along some dims; ``across`` is cut last. An accelerator gets one block."""
    if tensor.numel() == 0:
        return
    num_blocks = tensor.numel() * tensor.element_size() / (_BLOCK_BYTES * torch.get_num_threads())
    lengths, strides = list(tensor.shape), tensor.stride()
    free = sorted(set(range(tensor.ndim)) - set(whole), key=lambda dim: (dim == across, -strides[dim]))
    for dim in free if tensor.device.type == "cpu" else ():
        if num_blocks > 1:
            fewest = 1
            if dim == across or strides[dim] == 1:
                num_bytes = math.prod(lengths) // lengths[dim] * tensor.element_size()
                fewest = max(min(_FEWEST, _MOST_BYTES // num_bytes), 1)
            lengths[dim] = min(max(math.floor(tensor.shape[dim] / num_blocks), fewest), tensor.shape[dim])
            num_blocks /= tensor.shape[dim] / lengths[dim]
    cuts = [
        [slice(start, start + lengths[dim]) for start in range(0, tensor.shape[dim], lengths[dim])]
        if dim in free
        else [slice(None)]
        for dim in range(tensor.ndim)
    ]
    yield from itertools.product(*cuts)


def blocks_of(
    tensor: torch.Tensor,
    local: LocalTransform | None,
    whole: Iterable[int] = (),
    across: int | None = None,
    runs: Sequence[Run] = (),
) -> Iterator[tuple[Index, torch.Tensor]]:
    """Yield the transform of a tensor block by block, each with its place; ``runs`` put the last dim in order."""
    dims = local.dims if local is not None else ()
    turned = _order(tensor.ndim, dims)
    back = _inverse(turned)
    for index in indices_of_blocks(tensor, {*dims, *whole}, across):
        if local is None:
            yield index, tensor[index]
        else:  # under no name here: the next one is made in its memory
            yield index, local(_lying(tensor[index], turned, len(dims), runs)).permute(back)


def _lying(block: torch.Tensor, turned: list[int], num_dims: int, runs: Sequence[Run]) -> torch.Tensor:
    """Return a block with its dims in another order, contiguous along the last ones; see :func:`blocks_of`."""
    lying = block.permute(turned)
    if not lying.is_contiguous() and block.device.type == "cpu":
        lying = block.clone().permute(turned)
    matrix = lying.reshape(-1, math.prod(lying.shape[-num_dims:]))  # which torch turns tile by tile
    lying = matrix.contiguous().view(lying.shape)
    return torch.cat([lying.narrow(-1, *run) for run in runs], -1) if runs else lying


def transform(
    tensor: torch.Tensor, local: LocalTransform, runs: Sequence[Run] = (), *, keeps_input: bool = False
) -> torch.Tensor:
    """Return the transform of a tensor, in its place if it has the same shape and dtype and need not be kept."""
    shape = local.shape(tensor.shape)
    result = tensor if local.kind in ("fft", "ifft") and not keeps_input else None
    for index, block in blocks_of(tensor, local, runs=runs):
        if list(block.shape) == shape:
            return block  # the only one
        if result is None:
            result = empty_with_last(tensor, shape, local.dims, local.dtype(tensor.dtype))
        result[index] = block
        del block  # so that the next one is made in its memory, which is in the cache
    return result if result is not None else tensor.new_empty(shape, dtype=local.dtype(tensor.dtype))


def _order(ndim: int, last: Sequence[int]) -> list[int]:
    return [*(dim for dim in range(ndim) if dim not in last), *last]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
