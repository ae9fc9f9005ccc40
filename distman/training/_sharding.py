"""A model of whose parameters each rank has a part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import WaitScope
from distman._torch_internals import has_been_called, is_distributed_tensor, reset_step

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# The imports from torch.distributed take a second, so they are done where a model is sharded.


def units(module: torch.nn.Module) -> list[FSDPModule]:
    """Return what is gathered by itself of a sharded module, the outer ones first."""
    from torch.distributed.fsdp import FSDPModule

    return [one for one in module.modules() if isinstance(one, FSDPModule)]


def forget_step(module: torch.nn.Module) -> None:
    if has_been_called(module):
        reset_step(units(module)[0])


def compile_parts(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Compile what is gathered by itself of a sharded module, without the calls that gather it."""
    outer, *inner = units(module)
    for part in inner or [outer]:
        part.forward = torch.compile(part.forward, **options)  # type: ignore[attr-defined]


@contextmanager
def without_reduction(module: torch.nn.Module) -> Iterator[None]:
    root = units(module)[0]
    root.set_requires_gradient_sync(requires_gradient_sync=False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(requires_gradient_sync=True)


@contextmanager
def gathered(module: torch.nn.Module, *, reshards: bool | None) -> Iterator[None]:
    """Let each rank have all weights of a sharded module within a ``with`` block. Collective."""
    parts = units(module)
    root = parts[0]
    forget_step(module)
    root.set_reshard_after_forward(reshard_after_forward=False)
    root.set_reshard_after_backward(reshard_after_backward=False)
    try:
        with WaitScope("gathering the weights"):
            for part in parts:
                part.unshard()
        with without_reduction(module):
            yield
    finally:
        for part in parts:
            part.reshard()
            is_again = part is not root if reshards is None else reshards
            part.set_reshard_after_forward(reshard_after_forward=is_again, recurse=False)
        root.set_reshard_after_backward(reshard_after_backward=True)


def norm_over_shards(own_norm: torch.Tensor, tensor: Any) -> torch.Tensor:
    """Return the 2-norm over all ranks, from that of this rank's parts of such tensors. Collective."""
    if not is_distributed_tensor(tensor):
        return own_norm
    square = own_norm.to(tensor.device_mesh.device_type).double().square()  # weights may be offloaded to the host
    with WaitScope("the norm of the gradient"):
        for group, placement in zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True):
            if placement.is_shard():
                dist.all_reduce(square, group=group)
    return square.sqrt().to(own_norm)


@torch.no_grad()
def copy_into(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@contextmanager
def put_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let tensors have their present values again after a ``with`` block."""
    changed = [*tensors]
    values = [one.detach().clone() for one in changed]
    try:
        yield
    finally:
        copy_into(changed, values)


def own_part(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if is_distributed_tensor(tensor) else tensor
    return part


def placed_as(own: Any, value: Any) -> Any:
    """Return a value sharded as another tensor is; as it is if that one is not. Collective for sharded values."""
    if not is_distributed_tensor(own) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(value, DTensor):
        return value.redistribute(placements=own.placements)
    # Each rank takes its part of what all of them have.
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def place_parts(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    own = module.state_dict()
    return {name: placed_as(own[name], value) if name in own else value for name, value in state.items()}


def place_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    found = dict(zip(indices, parameters, strict=False))  # the optimizer refuses another number itself

    def place(index: int, value: Any) -> Any:
        is_like = index in found and isinstance(value, torch.Tensor) and value.shape == found[index].shape
        return placed_as(found[index], value) if is_like else value

    placed = {index: {key: place(index, one) for key, one in own.items()} for index, own in state["state"].items()}
    return {**state, "state": placed}
