"""Seeds of random numbers, and the generators that programs use."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_of(*numbers: int) -> int:
    """Return a seed that depends on all the numbers; neighbours are as different as any."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators of this process by an integer that is not negative."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)  # it takes no larger one, nor does NumPy, as Python does
