"""Layers that divide by what is computed of all positions: each rank's moments are united with the others'."""

from __future__ import annotations

import math
from typing import Any

import torch

from distman.collectives import all_gather_v
from distman.domain._axes import Layout
from distman.domain._domain import OnBlocks, rank_in

_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def moments(tensor: torch.Tensor, dims: tuple[int, ...], layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance, of the full field, along dims that are counted from the end."""
    if tensor.numel():
        variance, mean = torch.var_mean(tensor, dims, correction=0, keepdim=True)
    else:  # with weight 0, but in the graph
        variance = mean = tensor.sum(dims, keepdim=True)
    for dim in dims:
        if dim in layout:
            axis = layout[dim]
            both = all_gather_v(torch.stack([mean, variance])[None], [1] * len(axis.sizes), group=axis.group)
            weights = torch.tensor(axis.sizes, dtype=both.dtype, device=both.device) / max(axis.length, 1)
            weights = weights.view(-1, *[1] * mean.ndim)
            mean = (weights * both[:, 0]).sum(0)
            variance = (weights * (both[:, 1] + (both[:, 0] - mean) ** 2)).sum(0)
    return mean, variance


def computable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _IN_FLOAT32 else tensor


def normalized(tensor: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float) -> torch.Tensor:
    return (tensor - mean) * (variance + eps).rsqrt()


def _of_channels(parameter: torch.Tensor, num_spatial: int) -> torch.Tensor:
    return parameter.view(-1, *[1] * num_spatial)


def _affine(layer: Any, tensor: torch.Tensor, num_spatial: int) -> torch.Tensor:
    if layer.weight is not None:
        tensor = tensor * _of_channels(layer.weight, num_spatial)
    return tensor if layer.bias is None else tensor + _of_channels(layer.bias, num_spatial)


def _follow(layer: Any, mean: torch.Tensor, variance: torch.Tensor, num: int) -> None:
    """Let running statistics move towards those of this batch, as torch does."""
    factor = layer.momentum or 0.0
    if layer.is_over_batch:
        layer.num_batches_tracked.add_(1)
        factor = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
    with torch.no_grad():
        for running, found in ((layer.running_mean, mean), (layer.running_var, variance * (num / (num - 1)))):
            running.lerp_(found.reshape(-1, layer.num_features).mean(0).to(running.dtype), factor)


class RunningNorm(OnBlocks):
    """BatchNorm, of this rank's samples, and InstanceNorm: over all positions, with statistics that follow batches."""

    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num_spatial = tensor.ndim - 2 if self.is_over_batch else self.num_dims
        self.spatial(layout, num_spatial)
        given = computable(tensor)
        if self.training or self.running_mean is None:
            dims = tuple(range(-num_spatial, 0))
            dims = (-tensor.ndim, *dims) if self.is_over_batch else dims
            num = math.prod(layout[dim].length if dim in layout else tensor.shape[dim] for dim in dims)
            if num == 1:
                raise self.refuse(
                    "must have more than one value for each channel, got one. Use a larger field or batch"
                )
            mean, variance = moments(given, dims, layout)
            if self.running_mean is not None:
                _follow(self, mean, variance, num)
        else:
            mean, variance = (_of_channels(one, num_spatial) for one in (self.running_mean, self.running_var))
        result = _affine(self, normalized(given, mean, variance, self.eps), num_spatial)
        return result.to(tensor.dtype), layout


class GroupNorm(OnBlocks):
    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        num_spatial = tensor.ndim - 2
        self.spatial(layout, num_spatial)
        grouped = computable(tensor).unflatten(1, (self.num_groups, self.num_channels // self.num_groups))
        mean, variance = moments(grouped, tuple(range(-num_spatial - 1, 0)), layout)
        result = normalized(grouped, mean, variance, self.eps).flatten(1, 2)
        return _affine(self, result, num_spatial).to(tensor.dtype), layout


class LayerNorm(OnBlocks):
    """Statistics over the last dims; of weights for each position this rank uses those of its block."""

    def compute(self: Any, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        dims = tuple(range(-len(self.normalized_shape), 0))
        lengths = tuple(layout[dim].length if dim in layout else tensor.shape[dim] for dim in dims)
        if lengths != tuple(self.normalized_shape):
            raise self.refuse(f"must get fields of {tuple(self.normalized_shape)}, got {lengths}. Resize it")
        given = computable(tensor)
        result = normalized(given, *moments(given, dims, layout), self.eps)
        if self.weight is not None:
            result = result * _block(self.weight, layout)
        if self.bias is not None:
            result = result + _block(self.bias, layout)
        return result.to(tensor.dtype), layout


def _block(parameter: torch.Tensor, layout: Layout) -> torch.Tensor:
    for dim, axis in layout.items():
        if -dim <= parameter.ndim:
            start, end = axis.intervals[rank_in(axis)]
            parameter = parameter.narrow(dim, start, end - start)
    return parameter
