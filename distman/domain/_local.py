"""Layers whose results depend on a window of each position: convolutions, pooling, resizing, padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from distman.collectives import all_gather_v
from distman.domain._axes import Axis, Layout
from distman.domain._domain import OnBlocks, rank_in, window
from distman.domain._windows import Boundary, longest_halo
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region


def repeated(value: Any, num: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * num


def padded(tensor: torch.Tensor, dim: int, before: int, after: int, value: float = 0.0) -> torch.Tensor:
    """Pad a dim by a constant; negative numbers cut off."""
    if before == after == 0:
        return tensor
    return functional.pad(tensor, [0] * (2 * (-dim - 1)) + [before, after], value=value)


def clipped_window(
    tensor: torch.Tensor, dim: int, axis: Axis, bounds: list[tuple[int, int]], value: float
) -> torch.Tensor:
    """Return a window, beyond the ends of the field a constant."""
    inside = [(min(max(start, 0), axis.length), min(max(end, 0), axis.length)) for start, end in bounds]
    rank = rank_in(axis)
    part = window(tensor, dim, axis, inside)
    (start, end), (low, high) = bounds[rank], inside[rank]
    if low == high:
        return padded(part, dim, 0, end - start, value)
    return padded(part, dim, low - start, end - high, value)


class _Emptied:
    """Gives a layer of torch an entry to compute with where this rank has no result, which is dropped afterwards."""

    def __init__(self) -> None:
        self._dims: list[int] = []

    def fill(self, tensor: torch.Tensor, dim: int, num_results: int, length: int) -> torch.Tensor:
        if num_results:
            return tensor
        self._dims.append(dim)
        return padded(tensor, dim, 0, length - tensor.shape[dim])

    def drop(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim in self._dims:
            tensor = tensor.narrow(dim, 0, 0)
        return tensor


def _strided(out: Axis, stride: int, before: int, reach: int) -> list[tuple[int, int]]:
    """Return what each rank needs for its results, of which each takes so many entries."""
    return [
        (start * stride - before, (end - 1) * stride - before + reach) if start < end else (0, 0)
        for start, end in out.intervals
    ]


def _padding_of(padding: Any, at: int, reach: int) -> tuple[int, int]:
    """Return a convolution's padding before and after the field along one dim, by torch's rule for "same"."""
    if padding == "same":
        return (reach - 1) // 2, reach // 2
    return (0, 0) if padding == "valid" else (padding[at], padding[at])


class Conv(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = len(self.kernel_size)
        self.spatial(layout, num)
        out_layout, emptied, paddings = {}, _Emptied(), [0] * num
        mode: Boundary = self.padding_mode  # by torch's names, which are ours
        for at in range(num):
            dim, stride, dilation = at - num, self.stride[at], self.dilation[at]
            reach = dilation * (self.kernel_size[at] - 1) + 1
            before, after = _padding_of(self.padding, at, reach)
            if dim in layout:
                axis = layout[dim]
                _check_padding(self, axis, before, after, mode)
                out = axis.resized(_num_results(self, axis.length + before + after - reach, stride))
                tensor = window(tensor, dim, axis, _strided(out, stride, before, reach), mode)
                tensor = emptied.fill(tensor, dim, out.sizes[rank_in(out)], reach)
                out_layout[dim] = out
            elif mode == "zeros" and before == after:
                paddings[at] = before
            elif mode == "zeros":
                tensor = padded(tensor, dim, before, after)
            elif before or after:
                tensor = _continued(tensor, dim, before, after, mode)
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[num - 1]
        result = convolve(tensor, self.weight, self.bias, self.stride, tuple(paddings), self.dilation, self.groups)
        return emptied.drop(result), out_layout


def _num_results(layer: OnBlocks, room: int, stride: int) -> int:
    if room < 0:
        raise layer.refuse("must have a kernel that fits into the field, got a smaller field. Use a larger one")
    return room // stride + 1


def _check_padding(layer: OnBlocks, axis: Axis, before: int, after: int, boundary: Boundary) -> None:
    if max(before, after) > longest_halo(boundary, axis.length):
        raise layer.refuse(
            f"must pad by {boundary} less than the field is long, got {before, after} for {axis.length}. Pad less"
        )


def _continued(tensor: torch.Tensor, dim: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Pad a dim that is whole by what the field is beyond its ends, also where another dim is empty on this rank."""
    places = torch.arange(tensor.shape[dim], dtype=torch.float64, device=tensor.device)[None, None]
    return tensor.index_select(dim, functional.pad(places, (before, after), mode=mode)[0, 0].long())


class ConvTranspose(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = len(self.kernel_size)
        self.spatial(layout, num)
        paddings, extra, fits = list(self.padding), list(self.output_padding), []
        out_layout = {}
        for dim, axis in layout.items():
            at = dim + num
            stride, reach = self.stride[at], self.dilation[at] * (self.kernel_size[at] - 1)
            length = (axis.length - 1) * stride - 2 * self.padding[at] + reach + self.output_padding[at] + 1
            if axis.length == 0 or length < 1:
                raise self.refuse(f"must have a result, got a field of length {axis.length}. Use a larger one")
            out = axis.resized(length)
            bounds = [_touching(axis.length, *one, stride, self.padding[at], reach) for one in out.intervals]
            tensor = window(tensor, dim, axis, bounds)
            rank = rank_in(axis)
            fits.append((dim, bounds[rank][0] * stride - self.padding[at], *out.intervals[rank]))
            paddings[at] = extra[at] = 0
            out_layout[dim] = out
        convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[num - 1]
        result = convolve(tensor, self.weight, None, self.stride, paddings, extra, self.groups, self.dilation)
        for dim, first, start, end in fits:
            result = _fitted(result, dim, first, start, end)
        if self.bias is not None:
            result = result + self.bias.view(-1, *[1] * num)
        return result, out_layout


def _touching(length: int, start: int, end: int, stride: int, padding: int, reach: int) -> tuple[int, int]:
    """Return the entries that reach into a part of the result; one of them, if there is none."""
    low = max(0, -(-(start + padding - reach) // stride))
    high = min(length, (end - 1 + padding) // stride + 1)
    low = min(low, length - 1)
    return low, max(high, low + 1)


def _fitted(tensor: torch.Tensor, dim: int, first: int, start: int, end: int) -> torch.Tensor:
    """Return the part from start to end of what begins at ``first``, with zeros where it lacks."""
    low, high = max(first, start), min(first + tensor.shape[dim], end)
    if low >= high:
        return padded(tensor.narrow(dim, 0, 0), dim, 0, end - start)
    return padded(tensor.narrow(dim, low - first, high - low), dim, low - start, end - high)


def _pooled_length(length: int, padding: int, reach: int, stride: int, *, rounds_up: bool) -> int:
    num = (length + 2 * padding - reach + (stride - 1 if rounds_up else 0)) // stride + 1
    # torch's rule: the last window starts within the field or its padding in front.
    return num - 1 if rounds_up and (num - 1) * stride >= length + padding else num


class MaxPool(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = self.num_dims
        self.spatial(layout, num)
        kernel, padding, dilation = (repeated(one, num) for one in (self.kernel_size, self.padding, self.dilation))
        stride = repeated(self.stride or self.kernel_size, num)
        out_layout, emptied, paddings = {}, _Emptied(), list(padding)
        for dim, axis in layout.items():
            at = dim + num
            reach = dilation[at] * (kernel[at] - 1) + 1
            length = _pooled_length(axis.length, padding[at], reach, stride[at], rounds_up=self.ceil_mode)
            _num_results(self, length - 1, 1)
            out = axis.resized(length)
            bounds = _strided(out, stride[at], padding[at], reach)
            tensor = clipped_window(tensor, dim, axis, bounds, -math.inf)
            tensor = emptied.fill(tensor, dim, out.sizes[rank_in(axis)], reach)
            paddings[at] = 0
            out_layout[dim] = out
        pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[num - 1]
        result: torch.Tensor = pool(tensor, kernel, stride, paddings, dilation, self.ceil_mode)
        return emptied.drop(result), out_layout


class AvgPool(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num = self.num_dims
        self.spatial(layout, num)
        kernel, padding = repeated(self.kernel_size, num), repeated(self.padding, num)
        stride = repeated(self.stride or self.kernel_size, num)
        out_layout: Layout = {}
        divisor = getattr(self, "divisor_override", None)
        for at in range(num):
            dim = at - num
            length = layout[dim].length if dim in layout else tensor.shape[dim]
            size = _pooled_length(length, padding[at], kernel[at], stride[at], rounds_up=self.ceil_mode)
            _num_results(self, size - 1, 1)
            counted = "all" if divisor else "padded" if self.count_include_pad else "inside"
            taps = _mean_taps(length, size, kernel[at], stride[at], padding[at], counted)
            tensor = resampled(tensor, dim, layout, size, taps, out_layout)
        return tensor * (math.prod(kernel) / divisor) if divisor else tensor, out_layout


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
def _mean_taps(length: int, size: int, kernel: int, stride: int, padding: int, counted: str) -> Taps:
    """Return the windows of a mean, divided by how many of their entries are counted: all, or those in the field."""
    starts = torch.arange(size) * stride - padding
    index = starts[:, None] + torch.arange(kernel)
    is_inside = (index >= 0) & (index < length)
    is_counted = {"all": index >= index.min(), "padded": index < length + padding, "inside": is_inside}[counted]
    return index.clamp(0, length - 1), is_inside.double() / is_counted.sum(1, keepdim=True)


@functools.lru_cache(maxsize=64)
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


class Pad(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        pads, value = self.padding, getattr(self, "value", 0.0)
        num = len(pads) // 2
        out_layout = dict(layout)
        for at in range(num):
            dim, before, after = -1 - at, pads[2 * at], pads[2 * at + 1]
            if dim not in layout:
                if self.boundary == "zeros":
                    tensor = padded(tensor, dim, before, after, value)
                elif before or after:
                    tensor = _continued(tensor, dim, before, after, self.boundary)
                continue
            axis = layout[dim]
            _check_padding(self, axis, before, after, self.boundary)
            out_layout[dim] = axis.resized(axis.length + before + after)
            bounds = [(start - before, end - before) for start, end in out_layout[dim].intervals]
            if self.boundary == "zeros":
                tensor = clipped_window(tensor, dim, axis, bounds, value)
            else:
                tensor = window(tensor, dim, axis, bounds, self.boundary)
        return tensor, out_layout


class PixelShuffle(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        self.spatial(layout, 2)
        factor, fits, out_layout, emptied = self.upscale_factor, [], {}, _Emptied()
        for dim, axis in layout.items():
            out = axis.resized(axis.length * factor)
            bounds = [(start // factor, -(-end // factor)) if start < end else (0, 0) for start, end in out.intervals]
            start, end = out.intervals[rank_in(axis)]
            tensor = emptied.fill(window(tensor, dim, axis, bounds), dim, end - start, 1)
            fits.append((dim, start - bounds[rank_in(axis)][0] * factor if start < end else 0, end - start))
            out_layout[dim] = out
        tensor = functional.pixel_shuffle(tensor, factor)
        for fit in fits:
            tensor = tensor.narrow(*fit)
        return tensor, out_layout


class PixelUnshuffle(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        self.spatial(layout, 2)
        factor, out_layout, emptied = self.downscale_factor, {}, _Emptied()
        for dim, axis in layout.items():
            if axis.length % factor:
                raise self.refuse(f"must divide the field, got length {axis.length} and factor {factor}. Crop it")
            out_layout[dim] = axis.resized(axis.length // factor)
            bounds = [(start * factor, end * factor) for start, end in out_layout[dim].intervals]
            tensor = window(tensor, dim, axis, bounds)
            tensor = emptied.fill(tensor, dim, out_layout[dim].sizes[rank_in(axis)], factor)
        return emptied.drop(functional.pixel_unshuffle(tensor, factor)), out_layout


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
