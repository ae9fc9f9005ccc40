"""The random number generators of Python, NumPy and torch: the global ones, and those of loaders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from distman._torch_internals import tree_map
from distman.manager import DistributedManager

_GLOBAL = {"python": random, "numpy": np.random, "torch": torch.default_generator}
"""The global generators; the modules of Python and NumPy have the methods of theirs."""


def generators_state() -> dict[str, Any]:
    state = {name: _state_of(generator) for name, generator in _GLOBAL.items()}
    if DistributedManager().cuda:
        state["cuda"] = torch.cuda.get_rng_state(DistributedManager().device)
    return state


def set_generators_state(state: Mapping[str, Any]) -> None:
    for name, generator in _GLOBAL.items():
        _set_state_of(generator, state[name])
    if "cuda" in state and DistributedManager().cuda:
        torch.cuda.set_rng_state(state["cuda"].cpu(), DistributedManager().device)


@contextmanager
def generators_preserved() -> Iterator[None]:
    state = generators_state()
    try:
        yield
    finally:
        set_generators_state(state)


Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def seed_generators_of(holder: object, seed: int) -> None:
    """Seed the generators that a sampler holds, and those of its own samplers and dataset."""
    for _, generator in _generators_of(holder, "", set()):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        else:
            generator.seed(seed % 2**32)


def states_of(holder: object) -> dict[str, Any]:
    """Return the states of the generators that a loader, its samplers and its dataset hold, by where they are."""
    return {path: _state_of(generator) for path, generator in _generators_of(holder, "", set())}


def set_states_of(holder: object, states: Mapping[str, Any]) -> None:
    """Restore such states, of the generators that are still there."""
    for path, generator in _generators_of(holder, "", set()):
        if path in states:
            _set_state_of(generator, states[path])


def _generators_of(holder: object, path: str, seen: set[int]) -> Iterator[tuple[str, Generator]]:
    for name, value in getattr(holder, "__dict__", {}).items():
        if id(value) in seen or not isinstance(value, Generator | DataLoader | Dataset | Sampler):
            continue
        seen.add(id(value))
        if isinstance(value, Generator):
            yield f"{path}{name}", value
        else:
            yield from _generators_of(value, f"{path}{name}.", seen)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):  # Python's
        return generator.getstate()
    is_new = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_new else generator.get_state(legacy=False)
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf, state)


def _set_state_of(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif hasattr(generator, "setstate"):
        version, words, gauss_next = state
        generator.setstate((version, tuple(words), gauss_next))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
