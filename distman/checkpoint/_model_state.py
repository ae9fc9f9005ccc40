"""The state of a model under the names of the bare model, whatever is wrapped around it."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distman._torch_internals import COMPILED, is_compiled, set_versions, versions_in

_PARALLEL = "module"
_PREFIXES = (f"{_PARALLEL}.", f"{COMPILED}.")


def model_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state of a model, with the names that it has without DistributedDataParallel and ``torch.compile``.

    Local. Wrappers are left out of the names wherever they are, one in another, and around parts of the model.

    Args:
        module: The model.

    Returns:
        Its ``state_dict()``, with the model's own tensors.

    Example on two ranks:
        >>> model = manager.wrap_ddp(torch.nn.Linear(2, 1))
        >>> [*model.state_dict()], [*model_state(model)]
        (['module.weight', 'module.bias'], ['weight', 'bias'])
    """
    wrapped = module.state_dict()
    state = OrderedDict((_bare(module, name), value) for name, value in wrapped.items())
    versions = versions_in(wrapped)
    set_versions(state, OrderedDict((_bare(module, name), version) for name, version in versions.items()))
    return state


def load_model_state(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state into a model, whatever is wrapped around it or was around the model that the state comes from.

    Local.

    Args:
        module: The model.
        state: From :func:`model_state`, or from the ``state_dict()`` of the model, bare or wrapped. A prefix is taken
            off its names only if all have it, and more of them fit the model without it.
        strict: Take no other names than the model's, and all of them.

    Returns:
        The names that the state lacks, and those that the model lacks; bare, and empty if strict.

    Raises:
        RuntimeError: The names do not fit and ``strict`` is True, or a shape does not.
        TypeError: ``state`` is not a mapping.

    Example:
        >>> saved = {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}  # of a wrapped model
        >>> model = torch.nn.Linear(2, 1)
        >>> load_model_state(model, saved)
        ([], [])
        >>> model.weight.tolist()
        [[1.0, 1.0]]
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping of names and tensors, got a {type(state).__name__}. Pass load(path), say."
        )
    wrapped_of = {_bare(module, name): name for name in module.state_dict()}
    bare = max(_candidates(module, list(state)), key=lambda bare: len(wrapped_of.keys() & set(map(bare, state))))
    fitting = OrderedDict((wrapped_of.get(bare(name), bare(name)), value) for name, value in state.items())
    versions = {bare(f"{name}.").rstrip("."): version for name, version in versions_in(state).items()}
    if versions:  # of the modules by which the state was saved
        names = {name: _bare(module, name) for name, _ in module.named_modules(remove_duplicate=False)}
        set_versions(fitting, OrderedDict((name, versions[one]) for name, one in names.items() if one in versions))
    result = module.load_state_dict(fitting, strict=strict)
    return [_bare(module, name) for name in result.missing_keys], list(result.unexpected_keys)


def _bare(module: torch.nn.Module, name: str) -> str:
    """Return the name of something in a model without the wrappers on the way to it."""
    kept = []
    current: torch.nn.Module | None = module
    for part in name.split("."):
        if not ((is_compiled(current) and part == COMPILED) or (_is_parallel(current) and part == _PARALLEL)):
            kept.append(part)
        child = getattr(current, part, None)
        current = child if isinstance(child, torch.nn.Module) else None
    return ".".join(kept)


def _is_parallel(module: torch.nn.Module | None) -> bool:
    return isinstance(module, DistributedDataParallel | DataParallel)


def _candidates(module: torch.nn.Module, names: list[str]) -> Iterator[Callable[[str], str]]:
    """Return what may turn names into a bare model's, the most likely first; all may have prefixes in common."""
    yield lambda name: name
    yield functools.partial(_bare, module)
    yield without_compiled
    prefix = ""
    while longer := [one for one in _PREFIXES if names and all(name.startswith(prefix + one) for name in names)]:
        prefix += longer[0]
        yield functools.partial(_without, prefix)
        yield functools.partial(_without, prefix, and_compiled=True)


def _without(prefix: str, name: str, *, and_compiled: bool = False) -> str:
    return without_compiled(name.removeprefix(prefix)) if and_compiled else name.removeprefix(prefix)


def without_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)
