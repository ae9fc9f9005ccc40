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


def generators_state() -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if DistributedManager().cuda:
        state["cuda"] = torch.cuda.get_rng_state(DistributedManager().device)
    return state


def set_generators_state(state: Mapping[str, Any]) -> None:
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
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


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.bit_generator.state
    )
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray | np.generic) else leaf, state)


def _set_state_of(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        version, words, gauss_next = state
        generator.setstate((version, tuple(words), gauss_next))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
