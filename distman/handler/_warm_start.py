"""Weights of other trainings and of other libraries, for a training that begins with them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from distman._base.arguments import require
from distman._base.text import printable
from distman.checkpoint import load, load_model_state, model_state, without_compiled
from distman.decorators import _on_all_ranks as on_all_ranks
from distman.errors import CheckpointError
from distman.handler._archive import read_parts, read_rest
from distman.training import place_parts

_HOLDERS = ("module", "state_dict", "model_state_dict", "model")
"""Names of the weights in checkpoints: of a handler, within ``model``; of Lightning; of torch's tutorials; of many."""

_MOST_SHOWN = 5


def take_weights(module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool) -> dict[str, list[str]]:
    """Load weights into a model, see :meth:`NNHandler.load`. Collective."""
    found = _find_weights(_read(path, module), path)
    weights = {without_compiled(name): value for name, value in found.items()}
    own = model_state(module)
    prefix = _prefix_of(weights, own)
    named = {name.removeprefix(prefix): value for name, value in weights.items()}
    common = [name for name in own if name in named]
    taken = [name for name in common if _shape(named[name]) == _shape(own[name])]
    result = {
        "taken": taken,
        "missing": [name for name in own if name not in named],
        "misshapen": [name for name in common if name not in taken],
        "unexpected": [name for name in weights if name.removeprefix(prefix) not in own],
    }
    if not taken or (strict and any(result[what] for what in result if what != "taken")):
        raise CheckpointError(
            f"the file must hold the weights of the model, got {as_text(result)} in {os.fspath(path)}. "
            + ("Pass strict=False to take those that fit." if taken else "Load it into the model that it is of.")
        )
    load_model_state(module, place_parts(module, {name: named[name] for name in taken}), strict=False)
    return result


def _read(path: str | os.PathLike[str], module: torch.nn.Module) -> Any:
    """Return what is in a file; of a sharded training the model alone, in parts if it is sharded here. Collective."""
    if not os.fspath(path).endswith(".safetensors"):
        saved = read_rest(path)
        return load(path, device="cpu") if saved is None else read_parts({"model": saved["model"]}, module)

    return on_all_ranks(lambda: require("safetensors.torch", os.fspath(path)).load_file(path))


def _find_weights(state: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the weights in a checkpoint: itself, or what it has under one of the usual names."""
    while isinstance(state, Mapping):
        inner = next((state[name] for name in _HOLDERS if isinstance(state.get(name), Mapping)), None)
        if inner is None:
            break
        state = inner
    is_named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not is_named or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(
            f"the file must hold weights, by themselves or as one of {', '.join(_HOLDERS)}, got none in "
            f"{os.fspath(path)}. Take them out of it, and load them with handler.module.load_state_dict()."
        )
    named: Mapping[str, Any] = state
    return named


def _prefix_of(weights: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return what stands before the model's names in the file; of several possible ones, that of most names."""
    found = Counter(name.removesuffix(one) for name in weights for one in _ends(name) if one in own)
    return max(found, key=lambda prefix: found[prefix], default="")


def _ends(name: str) -> Iterator[str]:
    """Yield a name, and what is left of it without its first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def _shape(value: Any) -> object:
    return value.shape if isinstance(value, torch.Tensor) else type(value)


def as_text(result: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{what}: {_some(names)}" for what, names in result.items() if names)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_SHOWN
    return f"{', '.join(map(printable, names[:_MOST_SHOWN]))}{f' and {rest} more' if rest > 0 else ''}"
