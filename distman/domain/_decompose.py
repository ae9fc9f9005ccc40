"""Models for split fields: layers of torch turned into ones that compute on blocks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distman._torch_internals import outside_graphs, tree_leaves
from distman.collectives import all_gather_objects, resolve_group
from distman.domain import _global, _local
from distman.domain._axes import layout_of
from distman.domain._blocks import Dims, check_dims
from distman.domain._domain import OF_UNKNOWN, Domain, Guard, OnBlocks, tensors_in

_MIXING = (
    *("RNNBase", "MultiheadAttention", "Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer", "Unfold"),
    *("Fold", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d", "FractionalMaxPool2d", "FractionalMaxPool3d", "LPPool1d"),
    *("LPPool2d", "SyncBatchNorm", "Bilinear", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout"),
)


def _made(
    layer: type[nn.Module], compute: Callable[..., Any], **attributes: Any
) -> tuple[type[nn.Module], type[nn.Module]]:
    name = f"Blocks{layer.__name__}"
    made = type(name, (OnBlocks, layer), {"__module__": __name__, "compute": compute, **attributes})
    globals()[name] = made  # where pickle looks for it
    return layer, made


_LAYERS = dict(
    [
        *(
            _made(getattr(nn, name.format(num)), compute, num_dims=num, **attributes)
            for name, compute, attributes in (
                ("Conv{}d", _local.conv, {}),
                ("ConvTranspose{}d", _local.conv_transpose, {}),
                ("MaxPool{}d", _local.pool, {"is_max": True, "value": -math.inf}),
                ("AvgPool{}d", _local.pool, {"is_max": False}),
                ("AdaptiveMaxPool{}d", _local.adaptive_pool, {"is_max": True}),
                ("AdaptiveAvgPool{}d", _local.adaptive_pool, {"is_max": False}),
                ("BatchNorm{}d", _global.running_norm, {"is_over_batch": True}),
                ("InstanceNorm{}d", _global.running_norm, {"is_over_batch": False}),
                ("ZeroPad{}d", _local.pad, {}),
                ("ConstantPad{}d", _local.pad, {}),
                ("ReflectionPad{}d", _local.pad, {"boundary": "reflect"}),
                ("ReplicationPad{}d", _local.pad, {"boundary": "replicate"}),
                ("CircularPad{}d", _local.pad, {"boundary": "circular"}),
            )
            for num in (1, 2, 3)
        ),
        *(_made(one, _local.upsample) for one in (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)),
        _made(nn.GroupNorm, _global.group_norm),
        _made(nn.LayerNorm, _global.layer_norm),
        _made(nn.PixelShuffle, _local.pixel_shuffle),
        _made(nn.PixelUnshuffle, _local.pixel_unshuffle),
        _made(_local.Roll, _local.roll),
        _made(_global.SpectralConv, _global.spectral_conv),
    ]
)


def decompose(module: nn.Module, dims: Dims, *, check: torch.Tensor | None = None) -> nn.Module:
    """Let a model compute on blocks of a field what it computes on the full field.

    Local, unless ``check`` is given; each call of the model becomes collective over the groups of ``dims``, forward and
    backward. Convolutions, pooling, norms, ``Upsample``, padding, pixel shuffles, :class:`Roll` and
    :class:`SpectralConv` become subclasses of theirs with the same parameters and state dicts, which exchange what they
    need with the neighbours. Functions called between them may treat each position alone; those that mix positions of
    a split dim, such as ``torch.nn.functional.interpolate`` or a mean over it, are refused with what to write instead.

    The blocks may have any sizes. Fields of other lengths, after a stride say, are cut in proportion. What
    ``AdaptiveAvgPool2d(1)`` and its like return is whole, and the same on all ranks. The gradients on each rank are
    those of the sum of all ranks' losses by this rank's use of the parameters: average them over all ranks, as
    ``manager.wrap_ddp`` does, where each rank's loss is ``num_ranks / num_positions`` times the sum over its block.

    Args:
        module: The model, changed in place. Give it to ``wrap_ddp`` and the like afterwards.
        dims: For each split dim, counted from the end, its group: ``{-2: "rows", -1: "columns"}``. The first tensor
            that the model is called with has these dims, and so have others with as many dims; the rest is whole.
        check: A full field, equal on all ranks, on which the model is compared once with its decomposed form.

    Returns:
        The module itself.

    Raises:
        TypeError: ``dims`` is not a mapping.
        ValueError: A dim is not negative, or two have one group. A layer mixes positions and is not known, named with
            what to do. In a later call: a function mixes positions, or blocks do not fit.
            On every rank, with ``check``: outputs differ, or the decomposed form cannot compute this model.
        DistmanError: In a later call: a layer is called outside of its model.

    Example on two ranks:
        >>> model = decompose(torch.nn.Conv1d(1, 1, 3, padding=1, bias=False), {-1: "world"})
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> all_gather_objects(model(torch.ones(1, 1, 2)).tolist())
        [[[[2.0, 3.0]]], [[[3.0, 2.0]]]]
    """
    check_dims(dims)
    groups = [resolve_group(group) for group in dims.values()]
    wide = [group.ranks for group in groups if group.size > 1]
    if not dims or max(dims) > -1 or len(set(wide)) < len(wide):
        raise ValueError(
            f"dims must name dims, counted from the end, each with a group of its own, got {dict(dims)}. Pass "
            "{-2: 'rows', -1: 'columns'}, say."
        )
    _refuse_unknown(module)
    if check is not None:
        _compare(copy.deepcopy(module), decompose(copy.deepcopy(module), dims), dims, check)
    domain = Domain(dims)
    for layer in module.modules():
        if type(layer) in _LAYERS:
            layer.__class__ = _LAYERS[type(layer)]
            layer._domain = domain  # type: ignore[assignment]  # no module, nor parameter
    module.__class__ = _root(type(module))
    module._domain = domain  # type: ignore[assignment]  # no module, nor parameter
    return module


class Root(nn.Module):
    """A decomposed model, in front of the class that it had."""

    _domain: Domain

    @outside_graphs  # of torch.compile, which does not see how fields are split
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._domain.lay_out(self, [*tensors_in((args, kwargs))])
        guard = Guard(self, self._domain)
        with self._domain.guarded(guard), guard:
            result = super().forward(*args, **kwargs)
        for tensor in tensors_in(result):
            if guard.find(tensor) is None:
                raise ValueError(
                    f"a decomposed {type(self).__name__} must return tensors that torch has made, got one of shape "
                    f"{tuple(tensor.shape)}: {OF_UNKNOWN}."
                )
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        _, (_, *args), *state = made
        return _new_root, (type(self).__bases__[-1], *args), *state


_roots: dict[type[nn.Module], type[nn.Module]] = {}


def _root(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _roots:
        _roots[cls] = type(cls.__name__, (Root, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _roots[cls]


def _new_root(cls: type[nn.Module], *args: Any) -> nn.Module:
    made = _root(cls)
    return made.__new__(made, *args)


def _refuse_unknown(module: nn.Module) -> None:
    again = [type(one).__name__ for one in module.modules() if isinstance(one, (Root, OnBlocks))]
    if again:
        raise ValueError(
            f"module must not be decomposed yet, got a decomposed {again[0]} in it. Decompose the whole once."
        )
    kinds = tuple(getattr(nn, name) for name in _MIXING)
    found = [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, kinds) or getattr(layer, "return_indices", False)
    ]
    if found:
        raise ValueError(
            f"layers must be ones that decompose knows, got {', '.join(found)}. Decompose the parts before and behind, "
            "and give the layer the field that gather_domain(..., everywhere=True) returns."
        )


def _compare(whole: nn.Module, split: nn.Module, dims: Dims, batch: torch.Tensor) -> None:
    """Compare both forms of a model, copies, on a full field."""
    for layer in (*whole.modules(), *split.modules()):
        if "Dropout" in type(layer).__name__:
            layer.eval()
    block = batch
    for dim, group in dims.items():
        members = resolve_group(group)
        block = block.tensor_split(members.size, dim)[members.rank]
    problem = ""
    with torch.no_grad():
        expected = _tensors_of(whole(batch))
        try:
            for result, full in zip(_tensors_of(split(block.contiguous())), expected, strict=True):
                for dim, axis in layout_of(result).items():
                    full = axis.part(full, dim)
                most = float(full.abs().max()) if full.numel() else 0
                torch.testing.assert_close(result, full, rtol=0, atol=1e-3 * most)
        except (ValueError, AssertionError) as error:
            problem = str(error)
    for group in dims.values():
        problem = next(filter(None, all_gather_objects(problem, group=group)), "")
    if problem:
        raise ValueError(f"the decomposed model must compute what the model did, got another result.\n{problem}")


def _tensors_of(output: Any) -> list[torch.Tensor]:
    found = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
    if not found:
        raise ValueError(f"its output must hold tensors, to be compared, got a {type(output).__name__}")
    return found
