"""Layers whose results depend on a window of each position: convolutions, pooling, resizing, padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from distman.collectives import all_gather_v
from distman.domain._axes import Axis, Boundary, Layout, longest_halo
from distman.domain._domain import OnBlocks, rank_in, window
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region


def repeated(value: Any, num: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * num


def padded(
    tensor: torch.Tensor, dim: int, before: int, after: int, boundary: Boundary = "zeros", value: float = 0.0
) -> torch.Tensor:
    """Pad a dim that is whole; negative numbers cut off."""
    if before == after == 0:
        return tensor
    if boundary == "zeros" and tensor.numel() == 0:  # which torch 2.8 refuses to pad
        shape = list(tensor.shape)
        shape[dim] += before + after
        return tensor.new_full(shape, value) + tensor.sum()
    if boundary == "zeros":
        return functional.pad(tensor, [0] * (2 * (-dim - 1)) + [before, after], value=value)
    # By indices, since torch refuses to pad what is empty along another dim.
    places = torch.arange(tensor.shape[dim], dtype=torch.float64, device=tensor.device)[None, None]
    return tensor.index_select(dim, functional.pad(places, (before, after), mode=boundary)[0, 0].long())


Strides = tuple[int, int, int]  # of a result's entries in the field, entries before it, entries that each one takes


def strided_window(
    tensor: torch.Tensor,
    dim: int,
    axis: Axis,
    length: int,
    strides: Strides,
    boundary: Boundary = "zeros",
    value: float = 0.0,
) -> tuple[torch.Tensor, Axis]:
    """Return what a layer needs for this rank's entries of a result of a length, and how that is split."""
    (stride, before, reach), out = strides, axis.resized(length)
    bounds = [(start * stride - before, (end - 1) * stride - before + reach) for start, end in _entries(out)]
    return window(tensor, dim, axis, bounds, boundary, value), out


Growth = tuple[int, int, int, int]  # factor, entries cut off in front, reach of an entry beside its own, length


def enlarged_window(
    tensor: torch.Tensor, layout: Layout, growths: Mapping[int, Growth], more: int, *, is_clipped: bool = False
) -> tuple[torch.Tensor, Layout, dict[int, int]]:
    """Return what a layer needs that makes several entries of one, how the result is split, and where it starts.

    So many more entries are taken behind; beyond the field there are zeros, or nothing.
    """
    out_layout, firsts = {}, {}
    for dim, axis in layout.items():
        factor, padding, reach, length = growths[dim]
        out_layout[dim] = axis.resized(length)
        entries = _entries(out_layout[dim])
        bounds = [((s + padding - reach) // factor, -(-(e + padding) // factor) + more) for s, e in entries]
        if is_clipped:
            bounds = [(max(start, 0), min(end, axis.length)) for start, end in bounds]
        tensor = window(tensor, dim, axis, bounds)
        firsts[dim] = entries[rank_in(axis)][0] + padding - bounds[rank_in(axis)][0] * factor
    return tensor, out_layout, firsts


def _entries(out: Axis) -> list[tuple[int, int]]:
    """Return the entries that each rank computes: its own, or one that it drops."""
    return [(start, end) if start < end else (0, 1) for start, end in out.intervals]


def cropped(tensor: torch.Tensor, layout: Layout, firsts: Mapping[int, int] | None = None) -> torch.Tensor:
    """Keep this rank's entries of a result."""
    for dim, axis in layout.items():
        num = axis.sizes[rank_in(axis)]
        if num != tensor.shape[dim]:
            tensor = tensor.narrow(dim, (firsts or {}).get(dim, 0), num)
    return tensor


def _num_results(layer: OnBlocks, room: int, stride: int) -> int:
    if room < 0:
        raise layer.refuse("must have a kernel that fits into the field, got a smaller field. Use a larger one")
    return room // stride + 1


def _check_padding(layer: OnBlocks, length: int, before: int, after: int, boundary: Boundary) -> None:
    if max(before, after) > longest_halo(boundary, length):
        raise layer.refuse(
            f"must pad by {boundary} less than the field is long, got {before, after} for {length}. Pad less"
        )


def _padding_of(padding: Any, at: int, reach: int) -> tuple[int, int]:
    """Return a convolution's padding before and after the field along one dim, by torch's rule for "same"."""
    if padding == "same":
        return (reach - 1) // 2, reach // 2
    return (0, 0) if padding == "valid" else (padding[at], padding[at])


class Conv(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = len(self.kernel_size)
        self.spatial(layout, num)
        out_layout, paddings = {}, [0] * num
        mode: Boundary = self.padding_mode  # by torch's names, which are ours
        for at in range(num):
            dim, reach = at - num, self.dilation[at] * (self.kernel_size[at] - 1) + 1
            before, after = _padding_of(self.padding, at, reach)
            if dim in layout:
                axis, stride = layout[dim], self.stride[at]
                _check_padding(self, axis.length, before, after, mode)
                length = _num_results(self, axis.length + before + after - reach, stride)
                strides = stride, before, reach
                tensor, out_layout[dim] = strided_window(tensor, dim, axis, length, strides, mode)
            elif mode == "zeros" and before == after:
                paddings[at] = before
            else:
                tensor = padded(tensor, dim, before, after, mode)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[num - 1]
        result = convolve(tensor, self.weight, self.bias, self.stride, tuple(paddings), self.dilation, self.groups)
        return cropped(result, out_layout), out_layout


class ConvTranspose(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = len(self.kernel_size)
        self.spatial(layout, num)
        paddings, extra, growths = list(self.padding), list(self.output_padding), {}
        for dim, axis in layout.items():
            at = dim + num
            stride, padding, reach = self.stride[at], self.padding[at], self.dilation[at] * (self.kernel_size[at] - 1)
            length = (axis.length - 1) * stride - 2 * padding + reach + self.output_padding[at] + 1
            if axis.length == 0 or length < 1:
                raise self.refuse(f"must have a result, got a field of length {axis.length}. Use a larger one")
            growths[dim] = stride, padding, reach, length
            paddings[at] = extra[at] = 0
        tensor, out_layout, firsts = enlarged_window(tensor, layout, growths, 1)
        convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[num - 1]
        result = convolve(tensor, self.weight, None, self.stride, paddings, extra, self.groups, self.dilation)
        result = cropped(result, out_layout, firsts)
        if self.bias is not None:
            result = result + self.bias.view(-1, *[1] * num)
        return result, out_layout


def _pooled_length(length: int, padding: int, reach: int, stride: int, *, rounds_up: bool) -> int:
    num = (length + 2 * padding - reach + (stride - 1 if rounds_up else 0)) // stride + 1
    # torch's rule: the last window starts within the field or its padding in front.
    return num - 1 if rounds_up and (num - 1) * stride >= length + padding else num


class Pool(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = self.num_dims
        self.spatial(layout, num)
        kernel, padding = repeated(self.kernel_size, num), repeated(self.padding, num)
        dilation, stride = repeated(getattr(self, "dilation", 1), num), repeated(self.stride or self.kernel_size, num)
        value = -math.inf if self.is_max else 0.0
        out_layout, lengths, out_lengths = {}, [], []
        for at in range(num):
            dim, reach = at - num, dilation[at] * (kernel[at] - 1) + 1
            lengths.append(layout[dim].length if dim in layout else tensor.shape[dim])
            length = _pooled_length(lengths[at], padding[at], reach, stride[at], rounds_up=self.ceil_mode)
            out_lengths.append(_num_results(self, length - 1, 1))
            if dim in layout:
                strides = stride[at], padding[at], reach
                tensor, out_layout[dim] = strided_window(tensor, dim, layout[dim], length, strides, "zeros", value)
            else:
                after = (length - 1) * stride[at] + reach - padding[at] - lengths[at]
                tensor = padded(tensor, dim, padding[at], after, "zeros", value)
        if self.is_max:
            pool_max = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[num - 1]
            return cropped(pool_max(tensor, kernel, stride, 0, dilation), out_layout), out_layout
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[num - 1]
        result = cropped(pool(tensor, kernel, stride), out_layout)
        divisor = getattr(self, "divisor_override", None)
        if divisor:
            return result * (math.prod(kernel) / divisor), out_layout
        for at in range(num):
            starts = torch.arange(out_lengths[at], dtype=torch.float64) * stride[at] - padding[at]
            around = padding[at] if self.count_include_pad else 0
            counts = (starts + kernel[at]).clamp(max=lengths[at] + around) - starts.clamp(min=-around)
            if at - num in layout:
                axis = out_layout[at - num]
                counts = counts[slice(*axis.intervals[rank_in(axis)])]
            if (counts != kernel[at]).any():
                result = result * (kernel[at] / counts).to(result).view(-1, *[1] * (num - at - 1))
        return result, out_layout


class AdaptivePool(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = self.num_dims
        self.spatial(layout, num)
        sizes = repeated(self.output_size, num)
        out_layout: Layout = {}
        for at in range(num):
            dim = at - num
            length = layout[dim].length if dim in layout else tensor.shape[dim]
            size = length if sizes[at] is None else sizes[at]
            if size == 1 and dim in layout:
                tensor = (_maximum if self.is_max else _mean)(tensor, dim, layout[dim])
            else:
                taps = adaptive_taps(length, size)
                tensor = resampled(tensor, dim, layout, size, taps, out_layout, is_max=self.is_max)
        return tensor, out_layout


def _mean(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    total = reduce_from_parallel_region(tensor.sum(dim, keepdim=True), axis.group)
    return copy_to_parallel_region(total, axis.group) / axis.length


def _maximum(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    mine = tensor.amax(dim, keepdim=True) if tensor.shape[dim] else tensor
    sizes = [min(size, 1) for size in axis.sizes]
    return all_gather_v(mine, sizes, dim, group=axis.group).max(dim, keepdim=True).values


# What each entry of a result is made of, and the weights; None where each is taken as it is.
Taps = tuple[torch.Tensor, torch.Tensor | None]


def resampled(
    tensor: torch.Tensor, dim: int, layout: Layout, size: int, taps: Taps, out_layout: Layout, *, is_max: bool = False
) -> torch.Tensor:
    """Return a field of another length along a dim, each entry a weighted sum, or the maximum, of some entries."""
    index, weights = taps
    if dim in layout:
        axis, out_layout[dim] = layout[dim], layout[dim].resized(size)
        parts = [index[start:end] for start, end in out_layout[dim].intervals]
        bounds = [(int(part.min()), int(part.max()) + 1) if len(part) else (0, 0) for part in parts]
        rank = rank_in(axis)
        tensor = window(tensor, dim, axis, bounds)
        index = parts[rank] - bounds[rank][0]
        weights = None if weights is None else weights[slice(*out_layout[dim].intervals[rank])]
    index = index.to(tensor.device)
    if is_max:
        taken: torch.Tensor = tensor.index_select(dim, index.reshape(-1)).unflatten(dim, tuple(index.shape))
        return taken.max(dim).values
    terms = [tensor.index_select(dim, index[:, at]) for at in range(index.shape[1])]
    if weights is not None:
        columns = weights.to(terms[0]).unbind(1)
        terms = [term * column.view(-1, *[1] * (-dim - 1)) for term, column in zip(terms, columns, strict=True)]
    return functools.reduce(torch.add, terms)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # what is kept serves trainings, too
def adaptive_taps(length: int, size: int) -> Taps:
    """Return the windows of adaptive pooling, the last entries of shorter ones again with weight 0."""
    places = torch.arange(size)
    starts = places * length // size
    ends = -(-((places + 1) * length) // size)
    counts = ends - starts
    steps = torch.arange(int(counts.max()))
    index = torch.minimum(starts[:, None] + steps, ends[:, None] - 1)
    weights = (steps < counts[:, None]).double() / counts[:, None]
    return index, weights


@functools.lru_cache(maxsize=64)
@torch.inference_mode(mode=False)  # what is kept serves trainings, too
def resize_taps(length: int, size: int, scale: float | None, mode: str, *, aligns: bool) -> Taps:
    """Return what interpolation takes; a scale is how many times as long the result is, else the lengths say it."""
    if mode.startswith("nearest"):
        places = torch.arange(length, dtype=torch.float64)[None, None]
        # By torch, whose rounding decides.
        found = functional.interpolate(
            places, size=size if scale is None else None, scale_factor=scale, mode=mode, recompute_scale_factor=False
        )
        return found[0, 0].long()[:, None], None
    outs = torch.arange(size, dtype=torch.float64)
    if aligns:
        source = outs * ((length - 1) / (size - 1) if size > 1 else 0)
    else:
        source = (outs + 0.5) * (1 / scale if scale is not None else length / size) - 0.5
    if not mode.endswith("cubic"):
        source = source.clamp(min=0)
    first = source.floor()
    part = source - first
    if mode.endswith("cubic"):
        offsets, weights = torch.arange(-1, 3), _cubic(part)
    else:
        offsets, weights = torch.arange(2), torch.stack([1 - part, part], 1)
    index = (first.long()[:, None] + offsets).clamp(0, length - 1)
    return index, weights


def _cubic(t: torch.Tensor, a: float = -0.75) -> torch.Tensor:
    """Return the weights of Keys' cubic convolution, with torch's parameter."""
    outer, inner = a * (t**3 - 2 * t**2 + t), (a + 2) * t**3 - (a + 3) * t**2 + 1
    return torch.stack([outer, inner, -(a + 2) * t**3 + (2 * a + 3) * t**2 - a * t, a * (t**2 - t**3)], 1)


class Upsample(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = tensor.ndim - 2
        self.spatial(layout, num)
        sizes, scales = repeated(self.size, num), repeated(self.scale_factor, num)
        out_layout: Layout = {}
        if self.size is None and not self.align_corners and all(float(scale).is_integer() for scale in scales):
            return multiplied(self, tensor, layout, [int(scale) for scale in scales])
        for at in range(num):
            dim = at - num
            length = layout[dim].length if dim in layout else tensor.shape[dim]
            size = sizes[at] if self.size is not None else math.floor(float(length) * scales[at])
            scale = None if self.size is not None or self.recompute_scale_factor else scales[at]
            if self.mode == "area":
                taps = adaptive_taps(length, size)
            else:
                taps = resize_taps(length, size, scale, self.mode, aligns=bool(self.align_corners))
            tensor = resampled(tensor, dim, layout, size, taps, out_layout)
        return tensor, out_layout


def multiplied(layer: Any, tensor: torch.Tensor, layout: Layout, factors: list[int]) -> tuple[torch.Tensor, Layout]:
    """Resize by whole numbers, which torch does alike at each place of the field."""
    more = {"bicubic": 2, "linear": 1, "bilinear": 1, "trilinear": 1}.get(layer.mode, 0)  # entries on each side
    growths = {dim: (factors[dim], 0, more * factors[dim], axis.length * factors[dim]) for dim, axis in layout.items()}
    tensor, out_layout, firsts = enlarged_window(tensor, layout, growths, more, is_clipped=True)
    scales = [float(factor) for factor in factors]
    result = functional.interpolate(tensor, scale_factor=scales, mode=layer.mode, align_corners=layer.align_corners)
    return cropped(result, out_layout, firsts), out_layout


class Pad(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        pads, value = self.padding, getattr(self, "value", 0.0)
        out_layout = dict(layout)
        for at in range(len(pads) // 2):
            dim, before, after = -1 - at, pads[2 * at], pads[2 * at + 1]
            if dim in layout:
                axis = layout[dim]
                _check_padding(self, axis.length, before, after, self.boundary)
                out_layout[dim] = axis.resized(axis.length + before + after)
                bounds = [(start - before, end - before) for start, end in out_layout[dim].intervals]
                tensor = window(tensor, dim, axis, bounds, self.boundary, value)
            else:
                tensor = padded(tensor, dim, before, after, self.boundary, value)
        return tensor, out_layout


class PixelShuffle(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        self.spatial(layout, 2)
        factor = self.upscale_factor
        growths = {dim: (factor, 0, 0, axis.length * factor) for dim, axis in layout.items()}
        tensor, out_layout, firsts = enlarged_window(tensor, layout, growths, 0)
        return cropped(functional.pixel_shuffle(tensor, factor), out_layout, firsts), out_layout


class PixelUnshuffle(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        self.spatial(layout, 2)
        factor, out_layout = self.downscale_factor, {}
        for dim, axis in layout.items():
            if axis.length % factor:
                raise self.refuse(f"must divide the field, got length {axis.length} and factor {factor}. Crop it")
            length = axis.length // factor
            tensor, out_layout[dim] = strided_window(tensor, dim, axis, length, (factor, 0, factor))
        return cropped(functional.pixel_unshuffle(tensor, factor), out_layout), out_layout


class Roll(torch.nn.Module):
    """Shift a field along dims, what leaves one end coming back at the other, as :func:`torch.roll` does.

    Collective, where :func:`distman.domain.decompose` was given the model that it is in; else local.

    Args:
        shifts: By how many places, for each dim.
        dims: The dims, counted from the end, such as (-2, -1).

    Example:
        >>> Roll([1], [-1])(torch.arange(4))
        tensor([3, 0, 1, 2])
    """

    def __init__(self, shifts: Sequence[int], dims: Sequence[int]) -> None:
        super().__init__()
        self.shifts, self.dims = tuple(shifts), tuple(dims)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the shifted field.

        Local. Collective in a decomposed model.

        Args:
            input: A field that has the dims.

        Example:
            >>> Roll([1, 1], [-2, -1])(torch.eye(2)).tolist()
            [[1.0, 0.0], [0.0, 1.0]]
        """
        return torch.roll(input, self.shifts, self.dims)


class RollOnBlocks(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        for shift, given in zip(self.shifts, self.dims, strict=True):
            dim = given if given < 0 else given - tensor.ndim
            if dim in layout:
                axis = layout[dim]
                step = shift % axis.length if axis.length else 0
                bounds = [(start - step, end - step) for start, end in axis.intervals]
                tensor = window(tensor, dim, axis, bounds, "circular")
            else:
                tensor = tensor.roll(shift, dim)
        return tensor, layout
