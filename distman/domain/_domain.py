"""What the layers of a decomposed model share, and the guard that refuses functions between them that mix positions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distman._coordination.wait_scope import collective
from distman._torch_internals import is_in_backward, tree_map
from distman.collectives import GroupLike, all_gather_numbers, check_call, linear, resolve_group
from distman.domain._axes import (
    Axis,
    Boundary,
    Layout,
    Stretch,
    Windows,
    axes_of,
    find_layout,
    layout_of,
    places,
    plan,
    set_layout,
)
from distman.domain._halo import deposit, fetch
from distman.errors import DistmanError

# Functions that compute along a dim, at this place among their arguments, with this default, and keep its length.
_ALONG = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "index_select"), (1, None)),
    "normalize": (2, 1),
}
_INSTEAD = {
    "pad": "Use a module such as torch.nn.ZeroPad2d, ReflectionPad2d or CircularPad2d",
    **dict.fromkeys(("interpolate", "upsample"), "Use the module torch.nn.Upsample"),
    "roll": "Use the module distman.domain.Roll",
    "fft": "Use the module distman.domain.SpectralConv",
    **dict.fromkeys(("conv", "max_pool", "avg_pool", "pixel_", "adaptive"), "Use the module of torch.nn for {name}"),
    **dict.fromkeys(("batch_", "group_", "layer_", "instance_"), "Use the module of torch.nn for {name}"),
    "mean": "Use the module torch.nn.AdaptiveAvgPool2d(1), or its like of other dims",
    **dict.fromkeys(("max", "amax"), "Use the module torch.nn.AdaptiveMaxPool2d(1), or its like of other dims"),
    "einsum": "Use a module such as torch.nn.Conv2d with kernels of one entry",
    "flatten": "Pool the field with torch.nn.AdaptiveAvgPool2d(1) before",
    "": "Put it in front of the decomposed module or behind it, on the field that gather_domain returns",
}


OF_UNKNOWN = (
    "of a tensor nobody knows how it is split, since neither the model has it nor a function of torch has made it. "
    "Register it as a buffer, or pass it to the model; put functions of other kinds, such as scripted ones, before the "
    "model or behind it"
)


class Domain:
    """The state of a decomposed model, which its layers share and which is no part of its state dict."""

    def __init__(self, dims: Mapping[int, GroupLike]) -> None:
        self.dims = dict(dims)
        self.guard: Guard | None = None  # while the model runs
        self.seen: dict[tuple[Any, ...], Layout | None] = {}  # by layer and shape; None: split in several ways

    @contextlib.contextmanager
    def guarded(self, guard: Guard | None) -> Iterator[None]:
        """Let a guard look at functions, or none."""
        outer, self.guard = self.guard, guard
        try:
            yield
        finally:
            self.guard = outer

    def lay_out(self, module: torch.nn.Module, tensors: list[torch.Tensor]) -> None:
        """Find out how the inputs of a call are split."""
        ndim = tensors[0].ndim if tensors else 0
        if ndim < max(-dim for dim in self.dims):
            raise ValueError(
                f"the first tensor given to a decomposed {type(module).__name__} must have the dims {list(self.dims)}, "
                f"got one of {ndim} dims. Pass the block of a field."
            )
        fields = [one for one in tensors if one.ndim == ndim]
        found: list[Layout] = [{} for _ in fields]
        for dim, group in self.dims.items():
            cuts: tuple[int, ...] = ()
            rows = all_gather_numbers([field.shape[dim] for field in fields], resolve_group(group))
            for layout, sizes in zip(found, zip(*rows, strict=True), strict=True):
                cuts = cuts or tuple(itertools.accumulate(sizes))
                layout[dim] = Axis(group, sum(sizes), cuts, dim)
                if layout[dim].sizes != sizes:
                    raise ValueError(
                        f"fields of length {sum(sizes)} along dim {dim} must be split into {list(layout[dim].sizes)} "
                        f"where the first one is into shards that end at {list(cuts)}, got {list(sizes)}. Split them "
                        "alike."
                    )
        for tensor in tensors:
            set_layout(tensor, {})
        for field, layout in zip(fields, found, strict=True):
            set_layout(field, layout)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Domain:
        return Domain(self.dims)  # groups are not copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Domain, (self.dims,)


class OnBlocks:
    """A layer of torch, with the same parameters, that computes on blocks what that one does on the full field."""

    _domain: Domain
    compute: Callable[..., tuple[torch.Tensor, Layout]]  # of an input and how it is split: the result, and how that is
    boundary: Boundary = "zeros"  # what is beyond the ends of the field
    value: float = 0  # where that is "zeros"

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs:
            own: Callable[..., torch.Tensor] = super().forward  # type: ignore[misc]  # that of torch's layer
            given = inspect.signature(own).bind(input, *args, **kwargs).arguments
            if given.get("output_size") is not None:
                raise self.refuse(
                    f"must be called without output_size, got {given['output_size']}: that of a block says nothing of "
                    "the field. Give the layer an output_padding"
                )
        guard = self._domain.guard
        with self._domain.guarded(None):
            layout = self._layout(input, guard)
            output: torch.Tensor
            if not layout:
                output, out_layout = super().forward(input), layout  # type: ignore[misc]  # that of torch's layer
            else:
                output, out_layout = self.compute(input, layout)
            set_layout(output, {dim: axis for dim, axis in out_layout.items() if axis.cuts})
        return output

    def _layout(self, input: torch.Tensor, guard: Guard | None) -> Layout:
        """Return how the input is split; where it is computed once more for its gradient, as it was before."""
        domain, shape = self._domain, tuple(input.shape)
        if guard is not None:
            layout = guard.find(input)
            if layout is None:
                raise self.refuse(f"must know how its input is split, got a tensor of shape {shape}: {OF_UNKNOWN}")
            domain.seen[self, shape] = layout if domain.seen.get((self, shape), layout) == layout else None
            return layout
        found = layout_of(input) or domain.seen.get((self, shape))
        if found is None or not is_in_backward():
            raise DistmanError(
                f"a decomposed {type(self).__name__} must be called within its model, got a call for a tensor of shape "
                f"{shape} outside of it. Call the module that was given to decompose."
            )
        return found

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{type(self).__bases__[-1].__name__} in a decomposed model {why}.")

    def axes(self, tensor: torch.Tensor, layout: Layout, num_dims: int) -> Layout:
        """Return how each of the last dims is cut; refuse a tensor that is split along another one."""
        others = [dim for dim in layout if dim < -num_dims]
        if others:
            raise self.refuse(
                f"must get fields that are split along some of their last {num_dims} dims, got one split along dim "
                f"{others[0]}. Move its dims"
            )
        return axes_of(tensor, layout, num_dims)


@collective
def window(
    tensor: torch.Tensor, dim: int, axis: Axis, bounds: list[Stretch], boundary: Boundary = "zeros", value: Any = 0
) -> torch.Tensor:
    """Return this rank's window of a field, each rank's being given by its bounds in the full field.

    Beyond the ends of the field the boundary "zeros" has the value.
    """
    if bounds == axis.intervals:
        return tensor
    if axis.cuts:
        group = resolve_group(axis.group)
        windows = Windows(axis.sizes, tuple(bounds), boundary)
        tensor = check_call("a layer of a decomposed model", tensor, group, free_dim=dim, dim=dim, windows=windows.text)
        result = linear(tensor, fetch, deposit, dim % tensor.ndim, windows, group)
        if value:
            with torch.no_grad():  # it has no part in the linear map, whose adjoint drops the gradients there
                result.index_fill_(dim, plan(windows, group.rank, tensor.device).beyond, value)
        return result
    (start, end), *_ = bounds
    if start >= 0 and end <= axis.length:
        return tensor.narrow(dim, start, end - start)
    if boundary == "zeros" and not tensor.numel():  # which torch 2.8 refuses to pad
        shape = list(tensor.shape)
        shape[dim] = end - start
        return tensor.new_full(shape, value) + tensor.sum()
    if boundary == "zeros":
        return functional.pad(tensor, [0] * (2 * (-dim - 1)) + [-start, end - axis.length], value=value)
    # By indices, since torch refuses to pad what is empty along another dim.
    entries = places(start, end, axis.length, boundary)
    return tensor.index_select(dim, torch.from_numpy(entries).to(tensor.device))


class Guard(TorchFunctionMode):
    """Lets functions compute on blocks that treat each position alone, and knows how their results are split."""

    def __init__(self, module: torch.nn.Module, domain: Domain) -> None:
        super().__init__()
        self._module, self._domain = module, domain

    def find(self, tensor: torch.Tensor) -> Layout | None:
        """Return how a tensor is split, {} if it is whole, as what belongs to the model is; None if nobody knows."""
        found = find_layout(tensor)
        if found is None and (isinstance(tensor, torch.nn.Parameter) or id(tensor) in self._own):
            found = {}
            set_layout(tensor, found)  # to be found at once from now on
        return found

    @functools.cached_property
    def _own(self) -> set[int]:
        return {id(tensor) for module in self._module.modules() for tensor in tensors_in(vars(module))}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._domain.guard is not self:  # within a layer
            return func(*args, **kwargs)
        given = [self.find(tensor) for tensor in tensors_in((args, kwargs))]
        layout: Layout | None = None if None in given else {}
        if any(given):
            call = Call(_name_of(func), func, args, kwargs)
            rule = _rule_of(call.name)
            if rule is None or (call.name == "where" and len(args) + len(kwargs) < 3):  # which is nonzero
                raise call.refusal("it is not known to treat each position alone")
            if None in given:
                raise call.refusal(OF_UNKNOWN)
            layout = rule(call)
        result = func(*args, **kwargs)
        if layout is not None:
            for tensor in tensors_in(result):
                set_layout(tensor, layout)
        return result


class Call(NamedTuple):
    """A call of a function on blocks."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*tensors_in((self.args, self.kwargs))]

    def refusal(self, why: str) -> ValueError:
        remedy = next(text for key, text in _INSTEAD.items() if self.name.startswith(key)).format(name=self.name)
        return ValueError(
            f"functions in a decomposed module must not mix positions of a field, got {self.name}: {why}. {remedy}."
        )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):  # quicker than torch's own functions for nested data
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def _name_of(func: Any) -> str:
    name: str = func.__name__
    if str(getattr(func, "__module__", "")).startswith("torch.autograd"):
        return f"autograd_{name}"  # which attributes of tensors may be called, too
    if name in ("__get__", "__set__"):
        name = func.__self__.__name__
    return name.strip("_") or name


def _reading(_call: Call) -> None:
    """Leave what is known of tensors as it is."""


def _made(_call: Call) -> Layout:
    return {}


def _gradient(call: Call) -> Layout:
    """Return how the inputs are split, by which torch.autograd.grad differentiates; those of whole ones are sums."""
    inputs = call.kwargs.get("inputs", call.args[1] if len(call.args) > 1 else ())
    found = [layout_of(one) for one in tensors_in(inputs)]
    if not found or not all(one and one == found[0] for one in found):
        raise call.refusal("it differentiates by what is not split as its other inputs are")
    return found[0]


def _pointwise(call: Call) -> Layout:
    """Return the common layout of all arguments; all that extend along a split dim must be split there alike."""
    merged: Layout = {}
    given = [(tensor, layout_of(tensor)) for tensor in call.tensors]
    for _, layout in given:
        for dim, axis in layout.items():
            other = merged.setdefault(dim, axis)
            if other is not axis and other != axis:  # to compare two takes longer than the rest
                raise call.refusal(f"its fields are split unlike along dim {dim}")
    for tensor, layout in given:
        for dim in merged.keys() - layout.keys():
            if tensor.ndim >= -dim and tensor.shape[dim] != 1:
                raise call.refusal(
                    f"a tensor of shape {tuple(tensor.shape)}, which was made in the module or belongs to it, is not "
                    f"known to be split along dim {dim}; pass it to the module as a block"
                )
    return merged


def _of_first(call: Call) -> Layout:
    return _pointwise(call._replace(args=call.args[:1], kwargs={}))


def _along(call: Call) -> Layout:
    place, default = _ALONG[call.name]
    dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else default)
    layout, ndim = _pointwise(call._replace(args=call.args[:1])), call.tensors[0].ndim
    if not isinstance(dim, int) or (dim if dim < 0 else dim - ndim) in layout:
        raise call.refusal(f"it computes along dim {dim}, which is split")
    return layout


def _telling(call: Call) -> Layout:
    """Follow the dims by what a function makes of tensors without data, whose split dims have lengths of their own."""
    if call.name == "getitem":
        index = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:]
        if any(isinstance(one, torch.Tensor | list) for one in index):
            raise call._replace(name="indexing by tensors").refusal("where its entries come from is not known")
    fields = [tensor for tensor in call.tensors if layout_of(tensor)]
    if call.name == "einsum" and len(fields) > 1:
        raise call.refusal("it multiplies fields")
    axes = dict.fromkeys(axis for tensor in fields for axis in layout_of(tensor).values())
    shapes = [tensor.shape for tensor in call.tensors if tensor.ndim]
    longest = 1 + max(max(map(max, shapes)), *(axis.length for axis in axes))  # beyond any part that is taken
    # Odd multiples: what is left of one of them is no other one.
    lengths = {axis: longest * (2 * at + 3) for at, axis in enumerate(axes)}
    shape = _shape_of_result(call, lengths)
    if call.name == "squeeze" and len(shape) != len(_shape_of_result(call, dict.fromkeys(axes, 1))):
        raise call.refusal("which dims it drops depends on the rank; name the dim")
    for tensor in fields:
        for dim, axis in layout_of(tensor).items():
            if shape.count(lengths[axis]) != 1:
                raise call.refusal(f"it does not keep dim {dim}, which is split")
    return {shape.index(length) - len(shape): axis for axis, length in lengths.items()}


def _reshaping(call: Call) -> Layout:
    """Follow the dims of a reshaped tensor: a dim is the same where it and all behind it have kept their lengths."""
    tensor, layout = call.args[0], {}
    shape = _shape_of_result(call, {})
    for dim, axis in layout_of(tensor).items():
        behind = math.prod(tensor.shape[tensor.ndim + dim + 1 :])
        same = [d for d in range(-len(shape), 0) if shape[d] == tensor.shape[dim]]
        same = [d for d in same if math.prod(shape[len(shape) + d + 1 :]) == behind]
        if dim not in same and (len(same) != 1 or tensor.shape[dim] < 2):
            raise call.refusal(f"it does not keep dim {dim}, which is split")
        layout[dim if dim in same else same[0]] = axis
    return layout


def _shape_of_result(call: Call, lengths: dict[Axis, int]) -> list[int]:
    """Return the shape that the result would have if the split dims had these lengths."""

    def without_data(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(value.shape)
        for dim, axis in layout_of(value).items():
            shape[dim] = lengths.get(axis, shape[dim])
        return torch.empty(shape, dtype=value.dtype, device="meta")

    try:
        args, kwargs = tree_map(without_data, (tuple(call.args), call.kwargs))
        result = call.function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise call.refusal(f"it needs the lengths of a block, {str(error).splitlines()[0]}") from error
    return list(next(tensors_in(result)).shape)


_RULES: dict[str, Callable[[Call], Layout | None]] = {
    name: rule
    for rule, names in {
        _reading: (
            "shape size dtype device dim ndim numel nelement stride is_contiguous requires_grad is_floating_point "
            "is_complex is_cuda layout data_ptr element_size itemsize is_leaf grad_fn names storage_offset len "
            "is_sparse is_quantized get_device repr hash is_nested version is_meta is_cpu register_hook "
            "retain_grad nbytes is_signed output_nr is_mkldnn is_inference is_shared is_pinned base"
        ),
        _made: "new_zeros new_ones new_full new_empty",
        _gradient: "autograd_grad",
        _pointwise: (  # beside those that torch itself calls so
            "truediv floordiv rsub rdiv radd rmul rtruediv rpow iadd isub imul itruediv and or xor invert dropout "
            "relu6 hardtanh alpha_dropout rrelu elu celu selu logsigmoid tanhshrink softsign softshrink hardshrink "
            "softplus threshold clone contiguous detach to float double half bfloat16 type cpu cuda type_as "
            "zeros_like ones_like empty_like full_like rand_like randn_like copy data grad real imag complex polar "
            "leaky_relu gelu silu mish hardswish hardsigmoid relu sigmoid tanh"
        ),
        _of_first: "prelu",  # whose weights are those of channels
        _along: " ".join(_ALONG),
        _telling: (  # the result no longer has a dim that they compute along, take a part of, or join with another
            "sum mean amax amin var std prod logsumexp any all max min argmax argmin norm vector_norm unbind select "
            "narrow chunk split tensor_split cat concat concatenate stack glu permute transpose movedim moveaxis "
            "swapaxes swapdims unsqueeze squeeze flatten unflatten repeat linear matmul mm bmm einsum getitem "
            "view_as_real view_as_complex"
        ),
        _reshaping: "reshape reshape_as view view_as expand expand_as",
    }.items()
    for name in names.split()
}


@functools.cache
def _rule_of(name: str) -> Callable[[Call], Layout | None] | None:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    # torch.equal, which has one answer for all positions, is tagged, too.
    is_tagged = name != "equal" and any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return _RULES.get(name, _pointwise if is_tagged else None)
