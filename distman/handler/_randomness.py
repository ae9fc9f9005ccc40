"""The global random number generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distman.manager import DistributedManager


def generators_state() -> dict[str, Any]:
    """Return the state of all generators, as plain values and tensors."""
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
    """Restore such a state."""
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and DistributedManager().cuda:
        torch.cuda.set_rng_state(state["cuda"].cpu(), DistributedManager().device)


@contextmanager
def generators_preserved() -> Iterator[None]:
    """Restore the state of the generators at the end of a ``with`` block."""
    state = generators_state()
    try:
        yield
    finally:
        set_generators_state(state)
