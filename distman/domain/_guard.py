"""What a decomposed model may compute between its layers: where a function mixes positions, it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distman.domain._axes import Axis, Layout, layout_of, set_layout

Function = Callable[..., Any]
Rule = Callable[[str, Function, Sequence[Any], dict[str, Any]], Layout]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    "shape size dtype device dim ndim numel nelement stride is_contiguous requires_grad is_floating_point is_complex "
    "is_cuda layout data_ptr element_size itemsize is_leaf grad_fn names storage_offset len is_sparse is_quantized "
    "get_device repr hash is_nested version grad is_meta is_cpu register_hook retain_grad nbytes is_signed output_nr "
    "is_mkldnn is_inference is_shared is_pinned new_zeros new_ones new_full new_empty"
)
# Beside those that torch itself calls pointwise.
_POINTWISE = _words(
    "truediv floordiv rsub rdiv radd rmul rtruediv rpow iadd isub imul itruediv and or xor invert dropout relu6 "
    "hardtanh alpha_dropout rrelu elu celu selu logsigmoid tanhshrink softsign softshrink hardshrink softplus prelu "
    "threshold clone contiguous detach to float double half bfloat16 type cpu cuda type_as zeros_like ones_like "
    "empty_like full_like rand_like randn_like copy data real imag view_as_real leaky_relu gelu silu mish hardswish "
    "hardsigmoid relu sigmoid tanh"
)
# Functions that compute along a dim, at this place among their arguments, with this default, and keep its length.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "index_select"), (1, None)),
    "normalize": (2, 1),
}
# Functions whose result no longer has a dim that they compute along, take a part of, or join with another.
_TELLING = _words(
    "sum mean amax amin var std prod logsumexp any all max min argmax argmin norm vector_norm unbind select narrow "
    "chunk split tensor_split cat concat concatenate stack glu permute transpose movedim moveaxis swapaxes swapdims "
    "unsqueeze squeeze flatten unflatten repeat linear matmul mm bmm einsum getitem"
)
_RESHAPING = _words("reshape view expand expand_as")
_INSTEAD = {
    "pad": "Use a module such as torch.nn.ZeroPad2d, ReflectionPad2d or CircularPad2d",
    "interpolate": "Use the module torch.nn.Upsample",
    "upsample": "Use the module torch.nn.Upsample",
    "roll": "Use the module distman.domain.Roll",
    "fft": "Use the module distman.domain.SpectralConv",
    "pixel_shuffle": "Use the module torch.nn.PixelShuffle",
    "pixel_unshuffle": "Use the module torch.nn.PixelUnshuffle",
    "mean": "Use the module torch.nn.AdaptiveAvgPool2d(1), or its like of other dims",
    "max": "Use the module torch.nn.AdaptiveMaxPool2d(1), or its like of other dims",
    "amax": "Use the module torch.nn.AdaptiveMaxPool2d(1), or its like of other dims",
    "einsum": "Use a module such as torch.nn.Conv2d with kernels of one entry",
    "flatten": "Pool the field with torch.nn.AdaptiveAvgPool2d(1) before",
}
_LAYERS = ("conv", "max_pool", "avg_pool", "adaptive", "batch_norm", "group_norm", "layer_norm", "instance_norm")


class Guard(TorchFunctionMode):
    """Lets functions compute on blocks that treat each position alone, and knows how their results are split."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    def __torch_function__(
        self, func: Function, _types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or not any(map(layout_of, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        name = _name_of(func)
        rule = _rule_of(name)
        if rule is None:
            raise _refusal(name, "it is not known to treat each position alone")
        layout = rule(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if layout:
            for tensor in _tensors(result):
                set_layout(tensor, layout)
        return result


def _refusal(name: str, why: str) -> ValueError:
    module = next((text for key, text in _INSTEAD.items() if name.startswith(key)), "")
    if name.startswith(_LAYERS):
        module = f"Use the module of torch.nn for {name}"
    remedy = module or "Put it in front of the decomposed module or behind it, on the field that gather_domain returns"
    return ValueError(
        f"functions in a decomposed module must not mix positions of a field, got {name}: {why}. {remedy}."
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _name_of(func: Any) -> str:
    name: str = func.__name__
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name.strip("_") or name


@functools.lru_cache(maxsize=1024)
def _rule_of(name: str) -> Rule | None:
    if name in _READ:
        return lambda *_: {}
    for rule, names in ((_along, _ALONG), (_telling, _TELLING), (_reshaping, _RESHAPING)):
        if name in names:
            return rule
    packet = getattr(torch.ops.aten, name, None)
    is_tagged = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
    return _pointwise if is_tagged or name in _POINTWISE else None


def _pointwise(name: str, _func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout:
    """Return the common layout of all arguments; all that extend along a split dim must be split there alike."""
    merged: Layout = {}
    everything = list(_tensors((args, kwargs)))
    for tensor in everything:
        for dim, axis in layout_of(tensor).items():
            if merged.setdefault(dim, axis) != axis:
                raise _refusal(name, f"its fields are split unlike along dim {dim}")
    for tensor in everything:
        for dim in merged:
            if dim not in layout_of(tensor) and tensor.ndim >= -dim and tensor.shape[dim] != 1:
                raise _refusal(
                    name,
                    f"a tensor of shape {tuple(tensor.shape)}, which was made in the module or belongs to it, is not "
                    f"known to be split along dim {dim}; pass it to the module as a block",
                )
    return merged


def _along(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout:
    place, default = _ALONG[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    layout, ndim = _pointwise(name, func, args[:1], kwargs), next(_tensors((args, kwargs))).ndim
    if not isinstance(dim, int) or (dim if dim < 0 else dim - ndim) in layout:
        raise _refusal(name, f"it computes along dim {dim}, which is split")
    return layout


def _telling(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout:
    """Follow the dims by what a function makes of tensors without data, whose split dims have lengths of their own."""
    if name in ("max", "min") and ("other" in kwargs or (isinstance(args[-1], torch.Tensor) and len(args) > 1)):
        return _pointwise(name, func, args, kwargs)
    if name == "getitem" and any(
        isinstance(one, torch.Tensor | list) for one in (args[1] if isinstance(args[1], tuple) else args[1:])
    ):
        raise _refusal("indexing by tensors", "where its entries come from is not known")
    fields = [tensor for tensor in _tensors((args, kwargs)) if layout_of(tensor)]
    if name == "einsum" and len(fields) > 1:
        raise _refusal(name, "it multiplies fields")
    longest = 1 + max(max(tensor.shape) for tensor in _tensors((args, kwargs)) if tensor.ndim)
    axes = dict.fromkeys(axis for tensor in fields for axis in layout_of(tensor).values())
    # Odd multiples: what is left of one of them is no other one.
    lengths = {axis: longest * (2 * at + 3) for at, axis in enumerate(axes)}
    shape = _shape_of_result(name, func, args, kwargs, lengths)
    if name == "squeeze" and len(shape) != len(_shape_of_result(name, func, args, kwargs, dict.fromkeys(axes, 1))):
        raise _refusal(name, "which dims it drops depends on the rank; name the dim")
    for tensor in fields:
        for dim, axis in layout_of(tensor).items():
            if shape.count(lengths[axis]) != 1:
                raise _refusal(name, f"it does not keep dim {dim}, which is split")
    return {shape.index(length) - len(shape): axis for axis, length in lengths.items()}


def _reshaping(name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Layout:
    """Follow the dims of a reshaped tensor: a dim is the same where it and all behind it have kept their lengths."""
    tensor, layout = args[0], {}
    shape = torch.Size(_shape_of_result(name, func, args, kwargs, {}))
    for dim, axis in layout_of(tensor).items():
        behind = tensor.shape[tensor.ndim + dim + 1 :].numel()
        same = [d for d in range(-len(shape), 0) if shape[d] == tensor.shape[dim]]
        same = [d for d in same if shape[len(shape) + d + 1 :].numel() == behind]
        if dim not in same and (len(same) != 1 or tensor.shape[dim] < 2):
            raise _refusal(name, f"it does not keep dim {dim}, which is split")
        layout[dim if dim in same else same[0]] = axis
    return layout


def _shape_of_result(
    name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any], lengths: dict[Axis, int]
) -> list[int]:
    """Return the shape that the result would have if the split dims had these lengths."""

    def without_data(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = list(value.shape)
            for dim, axis in layout_of(value).items():
                shape[dim] = lengths.get(axis, shape[dim])
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple) and next(_tensors(value), None) is not None:
            return type(value)(map(without_data, value))
        return value

    try:
        result = func(*map(without_data, args), **{key: without_data(value) for key, value in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise _refusal(name, f"it needs the lengths of a block, {str(error).splitlines()[0]}") from error
    return list(next(_tensors(result)).shape)
