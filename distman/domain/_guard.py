"""What a decomposed model may compute between its layers: where a function mixes positions, it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distman.domain._axes import Layout, layout_of, set_layout

Rule = Callable[[str, Sequence[Any], dict[str, Any], Any], Layout | None]


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
# Functions that compute along a dim, at this place among their arguments, with this default, and keep the others.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "narrow", "index_select"), (1, None)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), (2, 0)),
    **{"cat": (1, 0), "concat": (1, 0), "concatenate": (1, 0), "glu": (1, -1), "normalize": (2, 1)},
}
_REDUCING = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "any", "all", "max", "min"), 1),
    **{"argmax": 1, "argmin": 1, "unbind": 1, "select": 1, "norm": 2, "vector_norm": 2},
}
_INSTEAD = {
    "pad": "Use a module such as torch.nn.ZeroPad2d, ReflectionPad2d or CircularPad2d",
    "interpolate": "Use the module torch.nn.Upsample",
    "upsample": "Use the module torch.nn.Upsample",
    "roll": "Use the module distman.domain.Roll",
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
        self, func: Callable[..., Any], _types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or not any(map(layout_of, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        name = _name_of(func)
        rule = _rule_of(name)
        if rule is None:
            raise _refusal(name, "it is not known to treat each position alone")
        result = func(*args, **kwargs)
        layout = rule(name, args, kwargs, result)
        if layout is not None:
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
        return lambda *_: None
    if name in _RULES:
        return _RULES[name]
    packet = getattr(torch.ops.aten, name, None)
    is_tagged = packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
    return _pointwise if is_tagged or name in _POINTWISE else None


def _pointwise(name: str, args: Sequence[Any], kwargs: dict[str, Any], _: Any = None) -> Layout:
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


def _argument(args: Sequence[Any], kwargs: dict[str, Any], place: int, default: Any, *names: str) -> Any:
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return args[place] if len(args) > place else default


def _along(name: str, args: Sequence[Any], kwargs: dict[str, Any], _: Any) -> Layout:
    layout = _pointwise(name, args[:1], kwargs)
    dims = _argument(args, kwargs, _ALONG[name][0], _ALONG[name][1], "dim", "dims", "axis")
    _check_whole(name, dims, layout, next(_tensors(args)).ndim)
    return layout


def _check_whole(name: str, dims: Any, layout: Layout, ndim: int) -> list[int]:
    """Return the dims, counted from the end, none of which is split."""
    if dims is None or any(isinstance(dim, str | bool) for dim in (dims if isinstance(dims, list | tuple) else [dims])):
        raise _refusal(name, "it computes along all dims")
    whole = [dim if dim < 0 else dim - ndim for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    split = [dim for dim in whole if dim in layout]
    if split or not whole:
        raise _refusal(name, f"it computes along dim {split[0] if split else 'all'}, which is split")
    return whole


def _reducing(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Layout:
    place = _REDUCING[name]
    dims = _argument(args, kwargs, place, None, "dim", "axis")
    if isinstance(dims, torch.Tensor) or "other" in kwargs:
        return _pointwise(name, args, kwargs)
    layout = layout_of(args[0])
    whole = _check_whole(name, dims, layout, args[0].ndim)
    first = next(_tensors(result))
    return layout if first.ndim == args[0].ndim else {d + sum(w > d for w in whole): a for d, a in layout.items()}


def _moving(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> Layout:
    """Follow the dims of a view that reorders, adds or drops dims, by what it makes of a small tensor."""
    tensor = args[0]
    if result is tensor:
        raise _refusal(name, "it changes the dims of a tensor in place")
    if name == "squeeze" and len(args) + len(kwargs) < 2:
        raise _refusal(name, "which dims it drops depends on the rank; name the dim")
    # Of lengths that tell the dims apart, but 1 where it was: what squeeze drops.
    lengths = [
        1 if tensor.shape[d] == 1 and d - tensor.ndim not in layout_of(tensor) else d + 2 for d in range(tensor.ndim)
    ]
    probe = getattr(torch.empty(lengths, device="meta"), name)(*args[1:], **kwargs)
    places = {length: d - probe.ndim for d, length in enumerate(probe.shape)}
    layout = layout_of(tensor)
    return {places[lengths[d]]: axis for d, axis in layout.items()}


def _reshaping(name: str, args: Sequence[Any], _kwargs: dict[str, Any], result: torch.Tensor) -> Layout:
    """Follow the dims of a reshaped tensor: a dim is the same where it and all behind it have kept their lengths."""
    tensor, layout = args[0], {}
    for dim, axis in layout_of(tensor).items():
        behind = tensor.shape[tensor.ndim + dim + 1 :].numel()
        same = [d for d in range(-result.ndim, 0) if result.shape[d] == tensor.shape[dim]]
        same = [d for d in same if result.shape[result.ndim + d + 1 :].numel() == behind]
        if dim not in same and (len(same) != 1 or tensor.shape[dim] < 2):
            raise _refusal(name, f"it does not keep dim {dim}, which is split")
        layout[dim if dim in same else same[0]] = axis
    return layout


def _linear(name: str, args: Sequence[Any], kwargs: dict[str, Any], _: Any) -> Layout:
    layout = layout_of(args[0])
    others = [*args[1:], *kwargs.values()]
    if -1 in layout or any(map(layout_of, _tensors(others))) or any(one.ndim > 2 for one in _tensors(others)):
        raise _refusal(name, "it adds up along dim -1, which is split, or multiplies fields")
    return layout


def _indexing(_name: str, args: Sequence[Any], _kwargs: dict[str, Any], result: torch.Tensor) -> Layout:
    tensor, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(one, torch.Tensor | list) for one in index):
        raise _refusal("indexing by tensors", "where its entries come from is not known")
    num_given = sum(one is not None and one is not Ellipsis for one in index)
    filled: list[Any] = []
    for one in index if Ellipsis in index else (*index, Ellipsis):
        filled += [slice(None)] * (tensor.ndim - num_given) if one is Ellipsis else [one]
    layout, dim, place = {}, -tensor.ndim, -result.ndim
    for one in filled:
        if one is not None and dim in layout_of(tensor):
            if one != slice(None):
                raise _refusal("indexing", f"it takes a part of dim {dim}, which is split")
            layout[place] = layout_of(tensor)[dim]
        dim += one is not None
        place += one is None or isinstance(one, slice)
    return layout


def _stacking(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor) -> Layout:
    given = _argument(args, kwargs, 1, 0, "dim")
    dim = given if given < 0 else given - result.ndim
    layout = _pointwise(name, args[:1], kwargs)
    return {one - (one <= dim): axis for one, axis in layout.items()}


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_REDUCING, _reducing),
    **dict.fromkeys(
        ("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze", "squeeze"), _moving
    ),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "expand", "expand_as", "repeat"), _reshaping),
    **dict.fromkeys(("linear", "matmul"), _linear),
    **{"getitem": _indexing, "stack": _stacking},
}
