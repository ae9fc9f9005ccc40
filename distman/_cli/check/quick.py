"""``distman check --quick``: whether this host can run ranks, in seconds and without a job."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from distman._base import timing

_SIZE = 512  # of the square matrices that are multiplied
_MEMORY = 256 << 20  # bytes
_SHARED_MEMORY = 64 << 20  # bytes that must be free in /dev/shm, where loaders and backends put batches and buffers


def problems_of_host(*, with_gpus: bool) -> list[str]:
    """Return what is wrong with this host, such as "computes wrong numbers"; other ranks may hold its GPUs."""
    return [*_computing(torch.cuda.device_count() if with_gpus else 0), *_memory(), *_files()]


def _computing(num_gpus: int) -> Iterator[str]:
    """Multiply matrices of small integers, whose product is exact, on the CPU and on GPUs."""
    factor = torch.arange(_SIZE * _SIZE, dtype=torch.float64).remainder(7).reshape(_SIZE, _SIZE)
    expected = (factor.long() @ factor.long()).double()
    for device in ["cpu", *(f"cuda:{index}" for index in range(num_gpus))]:
        began = time.monotonic()
        try:
            product = (factor.to(device) @ factor.to(device)).cpu()
        except RuntimeError as error:
            yield f"cannot compute on {device} ({str(error).splitlines()[0]})"
            continue
        if not torch.equal(product, expected):
            yield f"computes wrong numbers on {device}"
        elif device == "cpu" and time.monotonic() - began > timing.CHECK_SLOW:
            yield f"takes {time.monotonic() - began:.0f} s for a small product of matrices"


def _memory() -> Iterator[str]:
    try:
        torch.ones(_MEMORY, dtype=torch.uint8)  # where the system promises more than there is, it ends this process
    except RuntimeError:
        yield f"has no {_MEMORY >> 20} MiB of memory left"


def _files() -> Iterator[str]:
    shared = Path("/dev/shm")  # noqa: S108 - it is the place itself that is meant
    if not shared.is_dir() or shutil.disk_usage(shared).free < _SHARED_MEMORY:
        yield f"has less than {_SHARED_MEMORY >> 20} MiB free in {shared}"
    for name, folder in (("the temporary folder", None), ("the current folder", ".")):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"distman")
                file.flush()
        except OSError as error:
            yield f"cannot write to {name} ({error.strerror})"
