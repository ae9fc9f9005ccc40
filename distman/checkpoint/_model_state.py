"""The state of a model under the names of the bare model, whatever is wrapped around it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
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

    Example:
        >>> saved = {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}  # of a wrapped model
        >>> model = torch.nn.Linear(2, 1)
        >>> load_model_state(model, saved)
        ([], [])
        >>> model.weight.tolist()
        [[1.0, 1.0]]
    """
    wrapped_of = {_bare(module, name): name for name in module.state_dict()}
    bare_of = max(_candidates(module, list(state)), key=lambda names: len(wrapped_of.keys() & names.values()))
    fitting: OrderedDict[str, Any] = OrderedDict(
        (wrapped_of.get(bare_of[name], bare_of[name]), value) for name, value in state.items()
    )
    _pass_versions_on(module, state, fitting)
    result = module.load_state_dict(fitting, strict=strict)
    return [_bare(module, name) for name in result.missing_keys], list(result.unexpected_keys)


def _pass_versions_on(module: torch.nn.Module, state: Mapping[str, Any], fitting: OrderedDict[str, Any]) -> None:
    """Tell the modules which versions of themselves a state was saved by."""
    versions = versions_in(state)
    if not versions:
        return
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    bare_of = max(
        _candidates(module, list(filter(None, versions))),
        key=lambda names: len({_bare(module, name) for name in modules} & set(names.values())),
    )
    bare_versions = {"": versions.get("", {}), **{bare: versions[name] for name, bare in bare_of.items()}}
    known = ((name, _bare(module, name)) for name in modules)
    set_versions(fitting, OrderedDict((name, bare_versions[bare]) for name, bare in known if bare in bare_versions))


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


def _candidates(module: torch.nn.Module, names: list[str]) -> Iterator[dict[str, str]]:
    """Return what names may stand for, the most likely first: themselves, the model's own, without common prefixes."""
    yield {name: name for name in names}
    yield {name: _bare(module, name) for name in names}
    shorter = names
    while True:
        yield dict(zip(names, map(without_compiled, shorter), strict=True))
        prefix = next((prefix for prefix in _PREFIXES if names and all(one.startswith(prefix) for one in shorter)), "")
        if not prefix:
            return
        shorter = [one.removeprefix(prefix) for one in shorter]
        yield dict(zip(names, shorter, strict=True))


def without_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)
