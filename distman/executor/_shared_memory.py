"""Shared memory without a name: nothing of it is left in the file system, whoever dies when."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def create_shared_memory(num_bytes: int) -> int:
    """Return the file descriptor of new shared memory of at least one byte, whatever the size of ``/dev/shm``."""
    descriptor = os.memfd_create("distman-executor")
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared_memory(descriptor: int, num_bytes: int, *, is_private: bool = False) -> npt.NDArray[np.uint8]:
    """Return the memory behind a file descriptor, which may be closed afterwards.

    The mapping lasts as long as the array and its views. What is written to a private one stays unseen by the other
    processes.
    """
    # torch maps without keeping a descriptor open; Python's mmap keeps one for each mapping.
    storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", not is_private, num_bytes)
    array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array
