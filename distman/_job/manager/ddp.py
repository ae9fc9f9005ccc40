"""A module as a DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distman._base.arguments import check_options
from distman._coordination.step_times import time_reductions


def wrap(module: torch.nn.Module, options: dict[str, Any], device: torch.device) -> DistributedDataParallel:
    """Return the module as a DistributedDataParallel on a device.

    On a GPU it is made on a stream of its own, as torch wants it for CUDA graphs.
    """
    wrapped = _made(module, options, device)
    time_reductions(wrapped)
    return wrapped


def _made(module: torch.nn.Module, options: dict[str, Any], device: torch.device) -> DistributedDataParallel:
    if device.type != "cuda":
        return DistributedDataParallel(module, **options)
    side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        wrapped = DistributedDataParallel(module, **{"device_ids": [device.index], "output_device": device, **options})
    torch.cuda.current_stream(device).wait_stream(side_stream)
    return wrapped


def check_wrappable(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Refuse, on any number of ranks, what DistributedDataParallel would on several."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got a {type(module).__name__}. Pass the model.")
    check_options(options, [*inspect.signature(DistributedDataParallel).parameters][1:], "wrap_ddp")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            "module must have a parameter that requires a gradient, got none. Call the module as it is: there is no "
            "gradient to average."
        )
