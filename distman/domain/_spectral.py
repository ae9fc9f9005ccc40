"""A convolution by Fourier's transform, of which each rank computes the part of its block."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from distman.domain._axes import Layout
from distman.domain._domain import OnBlocks, rank_in
from distman.domain._norms import computable
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region


class SpectralConv(torch.nn.Module):
    """Multiply the lowest frequencies of a field by matrices over its channels, and drop the others.

    Collective, where :func:`distman.domain.decompose` was given the model that it is in; else local. The layer of a
    Fourier neural operator. Of a split field the ranks exchange the frequencies that are kept, and no more.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the result.
        modes: For each of the last dims, how many frequencies are kept: those below this number, and in all dims but
            the last as many negative ones.

    Attributes:
        weight: Real and imaginary parts, of shape ``(in_channels, out_channels, 2 * modes[0], ..., modes[-1], 2)``; in
            all dims but the last the negative frequencies come behind the others.

    Raises:
        ValueError: In a later call: the field is too short for its modes, or has not these dims.

    Source:
        Li et al., "Fourier Neural Operator for Parametric Partial Differential Equations", ICLR 2021.

    Example:
        >>> layer = SpectralConv(1, 1, [1, 2])
        >>> _ = torch.nn.init.zeros_(layer.weight)
        >>> layer.weight.data[0, 0, 0, 0, 0] = 1.0  # the frequency 0 is kept as it is
        >>> layer(torch.arange(8.0).view(1, 1, 2, 4))[0, 0, 0]
        tensor([3.5000, 3.5000, 3.5000, 3.5000], grad_fn=...)
    """

    def __init__(self, in_channels: int, out_channels: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.modes = tuple(modes)
        kept = [2 * num for num in self.modes[:-1]] + [self.modes[-1]]
        scale = 1 / (in_channels * out_channels)
        self.weight = torch.nn.Parameter(scale * torch.rand(in_channels, out_channels, *kept, 2))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the convolved field.

        Local. Collective in a decomposed model.

        Args:
            input: A real field of shape ``(samples, in_channels, *)``.

        Example:
            >>> tuple(SpectralConv(2, 3, [4, 4, 4])(torch.ones(5, 2, 8, 8, 8)).shape)
            (5, 3, 8, 8, 8)
        """
        return _convolved(self, input, {})


class SpectralConvOnBlocks(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        self.spatial(layout, len(self.modes))
        return _convolved(self, tensor, layout), layout


def _convolved(layer: Any, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    num = len(layer.modes)
    places = [(0, length, length) for length in tensor.shape[2:]]  # start and end of the block, length of the field
    for dim, axis in layout.items():
        places[dim] = *axis.intervals[rank_in(axis)], axis.length
    most = [length // 2 + (dim == num - 1) for dim, (_, _, length) in enumerate(places)]
    if len(places) != num or any(modes > limit for modes, limit in zip(layer.modes, most, strict=True)):
        raise ValueError(
            f"a field must have samples, channels and {num} dims, long enough for {list(layer.modes)} modes, got dims "
            f"of the lengths {[length for _, _, length in places]}. Use a longer field, or fewer modes."
        )
    weight = torch.view_as_complex(computable(layer.weight))
    spectrum = computable(tensor).to(weight.dtype)
    waves = [
        _waves(modes, *place, is_last=at == num - 1, dtype=weight.dtype, device=tensor.device)
        for at, (modes, place) in enumerate(zip(layer.modes, places, strict=True))
    ]
    for at, wave in enumerate(waves):
        spectrum = (spectrum.movedim(at - num, -1) @ wave.conj().T).movedim(-1, at - num)
    for axis in layout.values():
        spectrum = copy_to_parallel_region(reduce_from_parallel_region(spectrum, axis.group), axis.group)
    result = torch.einsum("bi...,io...->bo...", spectrum, weight)
    for at, (wave, (_, _, length)) in enumerate(zip(waves, places, strict=True)):
        scaled = wave / length
        if at == num - 1:  # each of them stands for its negative, too
            alone = torch.arange(len(wave), device=wave.device) * 2 % length == 0
            scaled = scaled * torch.where(alone, 1, 2)[:, None]
        result = (result.movedim(at - num, -1) @ scaled).movedim(-1, at - num)
    return result.real.to(tensor.dtype)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def _waves(
    num: int, start: int, end: int, length: int, *, is_last: bool, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the kept waves at the places of a block: shape (frequencies, places)."""
    frequencies = torch.arange(num) if is_last else torch.arange(2 * num) - 2 * num * (torch.arange(2 * num) >= num)
    turns = frequencies[:, None] * torch.arange(start, end) % length
    angles = turns.double() * (2 * math.pi / length)
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype)
