"""Which device a rank computes on, and which backend carries its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from distman._base.log import logger
from distman.environments import LAUNCHERS, detect, read_flag
from distman.errors import LaunchEnvironmentError

_ALLOW_SHARED = "DISTMAN_ALLOW_SHARED_GPU"
_BACKENDS = {"cpu": "cpu:gloo", "cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}
_ACCELERATORS: Mapping[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu}
"""torch's modules for them, of equal functions; a GPU of ROCm is a CUDA device to torch."""


def pick_device(local_rank: int = 0, local_world_size: int | None = None) -> torch.device:
    """Return the device of the rank with this place on its host: a CUDA, ROCm or XPU device, or the CPU.

    Local.

    Args:
        local_rank: Index of the rank on its host.
        local_world_size: Number of ranks on this host, where known.

    Raises:
        ValueError: More ranks than visible devices, with more than one visible.

    Example:
        >>> pick_device(local_rank=1, local_world_size=2)  # without a GPU; with two of them cuda:1
        device(type='cpu')
    """
    device_type, count = _accelerator()
    if device_type == "cpu":
        return torch.device("cpu")
    if _has_own_devices():
        local_rank, local_world_size = 0, 1
    index = pick_index(count, local_rank, local_world_size, shared=is_sharing_allowed(os.environ))
    return torch.device(device_type, index)


def pick_index(visible: int, local_rank: int, local_world_size: int | None = None, *, shared: bool = False) -> int:
    """Return the index, among the devices this process sees, of the one this rank computes on.

    With one visible device it is 0 whatever the local rank: the launcher has bound it. More ranks than devices, of
    which several are visible, are a ValueError unless they may share.
    """
    if visible == 1:
        return 0
    needed = max(local_rank + 1, local_world_size or 1)
    if needed > visible and not shared:
        raise ValueError(
            f"local_world_size must be at most the number of visible GPUs, got {needed} ranks on this host "
            f"and {visible} GPUs. Start fewer ranks per host, give each rank its own GPU "
            f"(srun --gpus-per-task=1), or set {_ALLOW_SHARED}=1 to let ranks share."
        )
    return local_rank % visible


def _has_own_devices() -> bool:
    try:
        launcher = LAUNCHERS[detect(os.environ).environment.launcher]
    except (LaunchEnvironmentError, ValueError):  # initialize() says what is wrong
        return False
    return launcher.has_own_gpus(os.environ)


def is_sharing_allowed(environ: Mapping[str, str]) -> bool:
    return read_flag(environ, _ALLOW_SHARED)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device that a specification names, or the CPU where a GPU is asked for and there is none at all.

    Local.

    Args:
        device: ``"cuda"``, ``"cuda:1"``, ``"xpu"``, ``"cpu"`` and the like, ``"gpu"`` for whatever accelerator is
            there, or a :class:`torch.device`.

    Raises:
        TypeError: ``device`` is neither a string nor a :class:`torch.device`.
        ValueError: The string names no device, or a GPU beyond those that are visible.

    Example:
        >>> resolve_device("gpu")  # without a GPU, of which a warning tells; with one cuda
        device(type='cpu')
    """
    device, visible = _named_device(device)
    if not visible:
        logger.warning("device %s is not available (no GPU is visible): using the CPU instead", device)
        return torch.device("cpu")
    if device.type in _ACCELERATORS and (device.index or 0) >= visible:
        here = ", ".join(f"{device.type}:{index}" for index in range(visible))
        raise ValueError(
            f"device must be one of {here}, got {device}. Pass one of these, or leave it out: the rank's place on its "
            "host decides."
        )
    return device


def _named_device(device: str | torch.device) -> tuple[torch.device, int]:
    """Return the device that a specification names, and how many of its type this process sees: one for others."""
    if isinstance(device, str):
        text = device.strip().lower()
        if text == "gpu" or text.startswith("gpu:"):
            found, _ = _accelerator()
            text = ("cuda" if found == "cpu" else found) + text[3:]
        try:
            device = torch.device(text)
        except RuntimeError as error:
            raise ValueError(
                f"device must be a string such as 'cuda', 'cuda:1' or 'cpu', got {device!r}. Pass one of these."
            ) from error
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a str or a torch.device, got {type(device).__name__}. Pass 'cuda' or 'cpu'.")
    return device, _ACCELERATORS[device.type].device_count() if device.type in _ACCELERATORS else 1


def requested_device(device: str | torch.device | None) -> torch.device | None:
    """Return the device that the program asked for, or None where the rank's place on its host decides.

    So it does, too, among the accelerators of a type that was named without an index.
    """
    if device is None:
        return None
    asked, visible = _named_device(device)
    if asked.type not in _BACKENDS:
        raise ValueError(
            f"device must be one of {', '.join(_BACKENDS)}, got {device!r}. Leave it out to compute on what is there."
        )
    if not visible:
        raise ValueError(
            f"device must be one that this process sees, got {device!r} where no GPU is visible. Ask the scheduler for "
            "a GPU and install a torch that is built for it; or leave it out to compute on what is there."
        )
    resolved = resolve_device(asked)
    return None if resolved.type != "cpu" and resolved.index is None else resolved


def backend_for(device: str | torch.device) -> str:
    return _BACKENDS[torch.device(device).type]


def is_pure_gloo(backend: str) -> bool:
    """Return whether gloo serves all devices of a group, whose backends are told as in ``"cpu:gloo,cuda:nccl"``."""
    return {part.rpartition(":")[2] for part in backend.split(",")} == {"gloo"}


def check_backend(backend: str) -> None:
    """Check that a process group can have a backend here: one name, or a text such as ``"cpu:gloo,cuda:nccl"``."""
    devices, _, names = zip(*(part.rpartition(":") for part in backend.split(",")), strict=True)
    is_told_apart = len({*devices}) == len(devices) and (len(devices) == 1 or all(devices))
    if not (is_told_apart and all(map(dist.is_backend_available, names))):
        known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
        here = ", ".join(filter(dist.is_backend_available, known))
        raise ValueError(
            f"backend must be one that this torch supports ({here}), got {backend!r}. Leave it out: the device decides."
        )


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given; the CPU has."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).synchronize(device)


def visible_devices(device_type: str | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the type of device this process computes on, and the UUIDs of those it sees; ``("cpu", ())`` without.

    Two processes that see the same UUID on one host see the same piece of hardware.
    """
    found, count = _accelerator()
    if found == "cpu" or device_type not in (None, found):
        return device_type or "cpu", ()
    properties = _ACCELERATORS[found].get_device_properties
    return found, tuple(str(getattr(properties(index), "uuid", "")) for index in range(count))


def _accelerator() -> tuple[str, int]:
    for name, module in _ACCELERATORS.items():
        if module.is_available():
            return name, module.device_count()
    return "cpu", 0
