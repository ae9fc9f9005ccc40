"""Layers that compute with all positions of the field: norms, and a convolution by Fourier's transform."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from distman._torch_internals import EagerFunction
from distman.collectives import all_gather_v, fused_all_reduce
from distman.domain._axes import Layout, axes_of
from distman.domain._halo import computable
from distman.mappings import copy_to_parallel_region, reduce_from_parallel_region


def moments(tensor: torch.Tensor, dims: tuple[int, ...], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance, of the full field, along dims that are counted from the end."""
    if tensor.numel():
        mean = tensor.mean(dims, keepdim=True)  # torch.var_mean takes ten times as long on CPUs
        variance = (tensor - mean).square().mean(dims, keepdim=True)
    else:  # with weight 0, but in the graph
        variance = mean = tensor.sum(dims, keepdim=True)
    for axis in (layout[dim] for dim in dims if dim in layout):
        both = all_gather_v(torch.stack([mean, variance])[None], [1] * len(axis.sizes), group=axis.group)
        weights = torch.tensor(axis.sizes, dtype=both.dtype, device=both.device) / max(axis.length, 1)
        weights = weights.view(-1, *[1] * mean.ndim)
        mean = (weights * both[:, 0]).sum(0)
        variance = (weights * (both[:, 1] + (both[:, 0] - mean) ** 2)).sum(0)
    return mean, variance


def _normalized(
    tensor: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float, weight: Any = None, bias: Any = None
) -> torch.Tensor:
    scale = (variance + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return torch.addcmul(shift if bias is None else shift + bias, tensor, scale)


class _Norm(EagerFunction):
    """Normalize by the moments of the full field, in few passes over the block; returns these, too."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, weight: Any, bias: Any, dims: tuple[int, ...], layout: Layout, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance = moments(tensor, dims, layout)
        ctx.save_for_backward(tensor, weight, bias, mean, variance)
        ctx.arguments = dims, layout, eps
        ctx.mark_non_differentiable(mean, variance)
        return _normalized(tensor, mean, variance, eps, weight, bias), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        tensor, weight, bias, mean, variance = ctx.saved_tensors
        dims, layout, eps = ctx.arguments
        if torch.is_grad_enabled():  # for gradients of gradients, by what autograd follows
            given = [one for one in (tensor, weight, bias) if one is not None and one.requires_grad]
            result = _normalized(tensor, *moments(tensor, dims, layout), eps, weight, bias)
            grads = iter(torch.autograd.grad(result, given, grad, create_graph=True))
            return *(
                next(grads) if one is not None and one.requires_grad else None for one in (tensor, weight, bias)
            ), *(None,) * 3
        scale = (variance + eps).rsqrt()
        # First over those dims along which the weight is the same.
        alike = [dim for dim in dims if weight is None or -dim > weight.ndim or weight.shape[dim] == 1]
        change = tensor - mean
        sums = [grad.sum(alike, keepdim=True), change.mul_(grad).sum(alike, keepdim=True) * scale]
        of_bias, of_weight = (
            one if one is None else part.sum_to_size(one.shape) for one, part in zip((bias, weight), sums, strict=True)
        )
        total = torch.stack([(one if weight is None else one * weight).sum(dims, keepdim=True) for one in sums])
        for axis in (layout[dim] for dim in dims if dim in layout):
            total = fused_all_reduce(total, group=axis.group)
        axes = axes_of(tensor, layout, -min(dims))
        num = math.prod(axes[dim].length for dim in dims)
        slope = -(scale**2) * total[1] / num
        torch.addcmul(-scale * total[0] / num - slope * mean, tensor, slope, out=change)
        change.addcmul_(grad, scale if weight is None else scale * weight)
        return change, of_weight, of_bias, None, None, None


def _of_channels(parameter: torch.Tensor, num_spatial: int) -> torch.Tensor:
    return parameter.view(-1, *[1] * num_spatial)


def running_norm(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    """BatchNorm, of this rank's samples, and InstanceNorm: over all positions, with statistics that follow batches."""
    num_spatial = tensor.ndim - 2 if layer.is_over_batch else layer.num_dims
    axes = layer.axes(tensor, layout, num_spatial)
    given = computable(tensor)
    parameters = [one if one is None else _of_channels(one, num_spatial) for one in (layer.weight, layer.bias)]
    if layer.training or layer.running_mean is None:
        dims = (*([-tensor.ndim] if layer.is_over_batch else []), *range(-num_spatial, 0))
        num = math.prod(axis.length for axis in axes.values()) * (len(tensor) if layer.is_over_batch else 1)
        if num == 1:
            raise layer.refuse("must have more than one value for each channel, got one. Use a larger field or batch")
        result, mean, variance = _Norm.apply(given, *parameters, dims, layout, layer.eps)
        if layer.running_mean is not None:
            _follow(layer, mean, variance * (num / (num - 1)))
    else:
        mean, variance = (_of_channels(one, num_spatial) for one in (layer.running_mean, layer.running_var))
        result = _normalized(given, mean, variance, layer.eps, *parameters)
    return result.to(tensor.dtype), layout


@torch.no_grad()
def _follow(layer: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Let running statistics move towards those of this batch, as torch does."""
    factor = layer.momentum or 0.0
    if layer.is_over_batch:
        layer.num_batches_tracked.add_(1)
        factor = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
    for running, found in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.lerp_(found.reshape(-1, layer.num_features).mean(0).to(running.dtype), factor)


def group_norm(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    num_spatial = tensor.ndim - 2
    layer.axes(tensor, layout, num_spatial)
    groups = (layer.num_groups, layer.num_channels // layer.num_groups)
    grouped = computable(tensor).unflatten(1, groups)
    parameters = [one if one is None else one.view(*groups, *[1] * num_spatial) for one in (layer.weight, layer.bias)]
    result, *_ = _Norm.apply(grouped, *parameters, tuple(range(-num_spatial - 1, 0)), layout, layer.eps)
    return result.flatten(1, 2).to(tensor.dtype), layout


def layer_norm(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    """Take statistics over the last dims; of weights for each position this rank uses those of its block."""
    dims = tuple(range(-len(layer.normalized_shape), 0))
    lengths = tuple(axis.length for axis in axes_of(tensor, layout, len(dims)).values())
    if lengths != tuple(layer.normalized_shape):
        raise layer.refuse(f"must get fields of {tuple(layer.normalized_shape)}, got {lengths}. Resize it")
    given = computable(tensor)
    result, *_ = _Norm.apply(given, None, None, dims, layout, layer.eps)
    for parameter, combine in ((layer.weight, torch.mul), (layer.bias, torch.add)):
        if parameter is not None:
            for dim, axis in layout.items():
                if dim in dims:
                    parameter = axis.part(parameter, dim)
            result = combine(result, parameter)
    return result.to(tensor.dtype), layout


class SpectralConv(torch.nn.Module):
    """Multiply the lowest frequencies of a field by matrices over its channels, and drop the others.

    Collective, where :func:`distman.domain.decompose` was given the model that it is in; else local. The layer of a
    Fourier neural operator, for real fields of shape ``(samples, in_channels, *)``. Of a split field the ranks exchange
    the frequencies that are kept, and no more.

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
        return _convolved(self, input, {})


def spectral_conv(layer: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    layer.axes(tensor, layout, len(layer.modes))
    return _convolved(layer, tensor, layout), layout


def _convolved(layer: Any, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    num = len(layer.modes)
    axes = axes_of(tensor, layout, tensor.ndim - 2).values()
    places = [(*axis.intervals[axis.rank], axis.length) for axis in axes]  # of the block in the field
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
