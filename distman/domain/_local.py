"""Layers whose results depend on a window of each position: convolutions, pooling, resizing, padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from distman.collectives import all_gather_v
from distman.domain._axes import Axis, Layout, Stretch, axes_of, longest_halo
from distman.domain._domain import window
from distman.domain._halo import computable
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region

# What each entry of a result is made of, and the weights; None where each is taken as it is.
Taps = tuple[torch.Tensor, torch.Tensor | None]


def _repeated(value: Any, num: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * num


def _padded(layer: Any, tensor: torch.Tensor, dim: int, axis: Axis, bounds: list[Stretch]) -> torch.Tensor:
    beyond = -min(start for start, _ in bounds), max(end for _, end in bounds) - axis.length
    if max(beyond) > longest_halo(layer.boundary, axis.length):
        raise layer.refuse(
            f"must pad by {layer.boundary} less than the field is long, got {beyond} for {axis.length}. Pad less"
        )
    return window(tensor, dim, axis, bounds, layer.boundary, layer.value)


def _strided(
    layer: Any, tensor: torch.Tensor, dim: int, axis: Axis, out: Axis, stride: int, before: int, reach: int
) -> torch.Tensor:
    """Return what a result is made of whose entries take ``reach`` entries each, ``stride`` apart."""
    if out.length < 1:
        raise layer.refuse("must have a kernel that fits into the field, got a smaller field. Use a larger one")
    bounds = [(start * stride - before, (end - 1) * stride - before + reach) for start, end in _entries(out)]
    return _padded(layer, tensor, dim, axis, bounds)


def _entries(out: Axis) -> list[Stretch]:
    """Return the entries that each rank computes: its own, or one that it drops."""
    return [(start, end) if start < end else (0, 1) for start, end in out.intervals]


def cropped(tensor: torch.Tensor, layout: Layout, firsts: Mapping[int, int] | None = None) -> torch.Tensor:
    """Keep this rank's entries of a result."""
    for dim, axis in layout.items():
        num = axis.sizes[axis.rank]
        if num != tensor.shape[dim]:
            tensor = tensor.narrow(dim, (firsts or {}).get(dim, 0), num)
    return tensor


def conv(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    num, out, paddings = layer.num_dims, {}, [0] * layer.num_dims
    layer.boundary = layer.padding_mode  # by torch's names, which are ours
    for dim, axis in layer.axes(tensor, layout, num).items():
        stride, reach = layer.stride[dim], layer.dilation[dim] * (layer.kernel_size[dim] - 1) + 1
        if isinstance(layer.padding, str):  # by torch's rule for "same"
            before, after = ((reach - 1) // 2, reach // 2) if layer.padding == "same" else (0, 0)
        else:
            before = after = layer.padding[dim]
        if layer.boundary == "zeros" and before == after and not axis.cuts:
            paddings[dim] = before
        else:
            out[dim] = axis.resized((axis.length + before + after - reach) // stride + 1)
            tensor = _strided(layer, tensor, dim, axis, out[dim], stride, before, reach)
    convolve = getattr(functional, f"conv{num}d")
    result = convolve(tensor, layer.weight, layer.bias, layer.stride, tuple(paddings), layer.dilation, layer.groups)
    return cropped(result, out), out


def conv_transpose(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    layer.axes(tensor, layout, layer.num_dims)
    out, firsts, paddings, extra = {}, {}, list(layer.padding), list(layer.output_padding)
    for dim, axis in layout.items():
        stride, padding, reach = layer.stride[dim], paddings[dim], layer.dilation[dim] * (layer.kernel_size[dim] - 1)
        length = (axis.length - 1) * stride - 2 * padding + reach + extra[dim] + 1
        if axis.length == 0 or length < 1:
            raise layer.refuse(f"must have a result, got a field of length {axis.length}. Use a larger one")
        paddings[dim] = extra[dim] = 0
        out[dim] = axis.resized(length)
        entries, rank = _entries(out[dim]), axis.rank
        bounds = [((s + padding - reach) // stride, -(-(e + padding) // stride) + 1) for s, e in entries]
        tensor = window(tensor, dim, axis, bounds)
        firsts[dim] = entries[rank][0] + padding - bounds[rank][0] * stride
    convolve = getattr(functional, f"conv_transpose{layer.num_dims}d")
    result = convolve(tensor, layer.weight, layer.bias, layer.stride, paddings, extra, layer.groups, layer.dilation)
    return cropped(result, out, firsts), out


def _pooled_length(length: int, padding: int, reach: int, stride: int, *, rounds_up: bool) -> int:
    num = (length + 2 * padding - reach + (stride - 1 if rounds_up else 0)) // stride + 1
    # torch's rule: the last window starts within the field or its padding in front.
    return num - 1 if rounds_up and (num - 1) * stride >= length + padding else num


def pool(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    num, out = layer.num_dims, {}
    axes = layer.axes(tensor, layout, num)
    kernel, padding, dilation, stride = (
        _repeated(one, num)
        for one in (layer.kernel_size, layer.padding, getattr(layer, "dilation", 1), layer.stride or layer.kernel_size)
    )
    for dim, axis in axes.items():
        reach = dilation[dim] * (kernel[dim] - 1) + 1
        out[dim] = axis.resized(
            _pooled_length(axis.length, padding[dim], reach, stride[dim], rounds_up=layer.ceil_mode)
        )
        tensor = _strided(layer, tensor, dim, axis, out[dim], stride[dim], padding[dim], reach)
    if layer.is_max:
        return cropped(getattr(functional, f"max_pool{num}d")(tensor, kernel, stride, 0, dilation), out), out
    result = cropped(getattr(functional, f"avg_pool{num}d")(tensor, kernel, stride), out)
    if getattr(layer, "divisor_override", None):
        return result * (math.prod(kernel) / layer.divisor_override), out
    for dim, axis in out.items():
        starts = torch.arange(*axis.intervals[axis.rank], dtype=torch.float64) * stride[dim] - padding[dim]
        around = padding[dim] if layer.count_include_pad else 0
        counts = (starts + kernel[dim]).clamp(max=axes[dim].length + around) - starts.clamp(min=-around)
        if (counts != kernel[dim]).any():
            result = result * (kernel[dim] / counts).to(result).view(-1, *[1] * (-dim - 1))
    return result, out


def adaptive_pool(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    sizes, out = _repeated(layer.output_size, layer.num_dims), {}
    for dim, axis in layer.axes(tensor, layout, layer.num_dims).items():
        if sizes[dim] == 1 and axis.cuts:
            tensor = (_maximum if layer.is_max else _mean)(tensor, dim, axis)
        else:
            out[dim] = axis.resized(axis.length if sizes[dim] is None else sizes[dim])
            taps = adaptive_taps(axis.length, out[dim].length)
            tensor = resampled(tensor, dim, out[dim], axis, taps, is_max=layer.is_max)
    return tensor, out


def _mean(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    total = reduce_from_parallel_region(computable(tensor).sum(dim, keepdim=True), axis.group)
    return (copy_to_parallel_region(total, axis.group) / axis.length).to(tensor.dtype)


def _maximum(tensor: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    mine = tensor.amax(dim, keepdim=True) if tensor.shape[dim] else tensor
    sizes = [min(size, 1) for size in axis.sizes]
    return all_gather_v(mine, sizes, dim, group=axis.group).max(dim, keepdim=True).values


def resampled(
    tensor: torch.Tensor, dim: int, out: Axis, axis: Axis, taps: Taps, *, is_max: bool = False
) -> torch.Tensor:
    """Return a field of another length along a dim, each entry a weighted sum, or the maximum, of some entries."""
    parts = [taps[0][start:end] for start, end in out.intervals]
    bounds = [(int(part.min()), int(part.max()) + 1) if len(part) else (0, 0) for part in parts]
    rank = axis.rank
    tensor = window(tensor, dim, axis, bounds)
    index = (parts[rank] - bounds[rank][0]).to(tensor.device)
    if is_max:
        taken: torch.Tensor = tensor.index_select(dim, index.reshape(-1)).unflatten(dim, tuple(index.shape))
        return taken.max(dim).values
    terms = [tensor.index_select(dim, index[:, at]) for at in range(index.shape[1])]
    if taps[1] is not None:
        columns = taps[1][slice(*out.intervals[rank])].to(terms[0]).unbind(1)
        terms = [term * column.view(-1, *[1] * (-dim - 1)) for term, column in zip(terms, columns, strict=True)]
    return functools.reduce(torch.add, terms)


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


def upsample(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    num = tensor.ndim - 2
    axes, out = layer.axes(tensor, layout, num), {}
    sizes, scales = (_repeated(one, num) for one in (layer.size, layer.scale_factor))
    if layer.size is None and not layer.align_corners and all(float(scale).is_integer() for scale in scales):
        more = {"bicubic": 2, "linear": 1, "bilinear": 1, "trilinear": 1}.get(layer.mode, 0)
        options: dict[str, Any] = {"scale_factor": scales, "mode": layer.mode, "align_corners": layer.align_corners}
        resize = functools.partial(functional.interpolate, **options)
        return _multiplied(tensor, layout, [int(scale) for scale in scales], resize, more)
    for dim, axis in axes.items():
        out[dim] = axis.resized(sizes[dim] if layer.size is not None else math.floor(axis.length * scales[dim]))
        scale = None if layer.size is not None or layer.recompute_scale_factor else scales[dim]
        if layer.mode == "area":
            taps = adaptive_taps(axis.length, out[dim].length)
        else:
            taps = resize_taps(axis.length, out[dim].length, scale, layer.mode, aligns=bool(layer.align_corners))
        tensor = resampled(tensor, dim, out[dim], axis, taps)
    return tensor, out


def _multiplied(
    tensor: torch.Tensor, layout: Layout, factors: Sequence[int], function: Callable[..., torch.Tensor], more: int = 0
) -> tuple[torch.Tensor, Layout]:
    """Resize by whole numbers, which torch does alike at each place of the field, by so many entries on each side."""
    out, firsts = {}, {}
    for dim, axis in layout.items():
        factor = factors[dim]
        out[dim] = axis.resized(axis.length * factor)
        entries, rank = _entries(out[dim]), axis.rank
        bounds = [(max(s // factor - more, 0), min(-(-e // factor) + more, axis.length)) for s, e in entries]
        tensor = window(tensor, dim, axis, bounds)
        firsts[dim] = entries[rank][0] - bounds[rank][0] * factor
    return cropped(function(tensor), out, firsts), out


def pad(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    pads, out = layer.padding, dict(layout)
    for dim, axis in axes_of(tensor, layout, len(pads) // 2).items():
        before, after = pads[-2 * dim - 2], pads[-2 * dim - 1]
        out[dim] = axis.resized(axis.length + before + after)
        bounds = [(start - before, end - before) for start, end in out[dim].intervals]
        tensor = _padded(layer, tensor, dim, axis, bounds)
    return tensor, out


def pixel_shuffle(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    layer.axes(tensor, layout, 2)
    factor = layer.upscale_factor
    return _multiplied(tensor, layout, [factor] * 2, lambda one: functional.pixel_shuffle(one, factor))


def pixel_unshuffle(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    layer.axes(tensor, layout, 2)
    factor, out = layer.downscale_factor, {}
    for dim, axis in layout.items():
        if axis.length % factor:
            raise layer.refuse(f"must divide the field, got length {axis.length} and factor {factor}. Crop it")
        out[dim] = axis.resized(axis.length // factor)
        tensor = _strided(layer, tensor, dim, axis, out[dim], factor, 0, factor)
    return cropped(functional.pixel_unshuffle(tensor, factor), out), out


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
        return torch.roll(input, self.shifts, self.dims)


def roll(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    for shift, given in zip(layer.shifts, layer.dims, strict=True):
        dim = given if given < 0 else given - tensor.ndim
        if dim in layout:
            axis = layout[dim]
            step = shift % axis.length if axis.length else 0
            bounds = [(start - step, end - step) for start, end in axis.intervals]
            tensor = window(tensor, dim, axis, bounds, "circular")
        else:
            tensor = tensor.roll(shift, dim)
    return tensor, layout
