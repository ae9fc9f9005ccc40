"""The state of a training whose model is sharded: gathered into a file, or written in parts into a folder."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from distman import checkpoint
from distman._coordination.wait_scope import WaitScope
from distman._torch_internals import is_distributed_tensor
from distman.checkpoint import (
    CheckpointFolder,
    check_state,
    is_sharded,
    locate,
    map_state,
    read_latest,
    read_plain,
    without_unused_memory,
)
from distman.decorators import _on_all_ranks as on_all_ranks, on_rank
from distman.errors import CheckpointError
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler

_REST = "rest"
_PARTS = "parts"
_MARK = "part of a sharded state"
"""First of the two values that stand in the rest of a state for a tensor; the second one is the tensor's name."""


@dataclasses.dataclass(frozen=True)
class Unread:
    """A tensor that has yet to be read: how a model is sharded says which part of it."""

    path: str | os.PathLike[str]
    name: str
    shape: torch.Size
    dtype: torch.dtype


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with sharded tensors made whole, in rank 0's host memory; elsewhere empty. Collective."""
    is_main = DistributedManager().is_main

    def gather(value: Any, _: str) -> Any:
        if not is_distributed_tensor(value):
            return value
        full = value.full_tensor()  # one after another: a device has room for one
        return full.cpu() if is_main else full.new_empty(0, device="cpu")

    with WaitScope("gathering the state"):
        return cast("dict[str, Any]", map_state(state, gather))


def save_in(folder: CheckpointFolder, handler: NNHandler, **options: Any) -> None:
    """Save a training in a folder of checkpoints, whole or in parts. Collective."""
    state = parts_of(handler.state_dict()) if folder.sharded else handler.whole_state_dict()
    folder.save(state, handler.num_steps, **options)


def load_latest(folder: CheckpointFolder, module: torch.nn.Module) -> Any:
    """Return the latest training in a folder of checkpoints; None if there is none. Collective."""
    if not folder.sharded:
        return folder.load_latest(device="cpu")

    return read_latest(folder, lambda location: read_parts(read_rest(location.path), module))


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of sharded tensors, and the rest, for :func:`save_sharded`. Collective."""
    parts: dict[str, torch.Tensor] = {}

    def take(value: Any, name: str) -> Any:
        if not is_distributed_tensor(value):
            return value
        parts[name] = value.detach()
        return [_MARK, name]

    rest = map_state(state, take)
    on_all_ranks(check_state, rest)
    contents: dict[str, Any] = {_PARTS: parts}
    if DistributedManager().is_main:
        file = io.BytesIO()
        torch.save(without_unused_memory(rest), file)
        contents[_REST] = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    return contents


def read_rest(path: str | os.PathLike[str]) -> Any:
    """Return what such a folder holds, :class:`Unread` for what is sharded; None if it is not one. Collective."""
    if not on_rank(0, broadcast=True)(is_sharded)(path):
        return None
    location = locate(path)
    found = checkpoint.saved_tensors(location)
    if _REST not in found:
        raise CheckpointError(
            f"{path} holds no training, but other tensors: {', '.join(found)}. Load it with load_sharded()."
        )
    file = torch.empty(found[_REST][0], dtype=torch.uint8)
    checkpoint.load_sharded({_REST: file}, path)
    rest = on_all_ranks(read_plain, io.BytesIO(file.numpy().tobytes()), location)

    def mark(value: Any, _: str) -> Any:
        if type(value) is list and len(value) == 2 and value[0] == _MARK:
            return Unread(path, value[1], *found[f"{_PARTS}.{value[1]}"])
        return value

    return map_state(rest, mark)


def read_parts(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a state in which what was unread is there: this rank's part, or the whole. Collective."""
    tensors: dict[str, torch.Tensor] = {}
    paths = set()

    def make_room(value: Any, _: str) -> Any:
        if not isinstance(value, Unread):
            return value
        paths.add(value.path)
        return tensors.setdefault(value.name, _empty_like_parts(value, module))

    made = map_state(state, make_room)
    for path in paths:  # one, if any
        checkpoint.load_sharded({_PARTS: tensors}, path)
    return cast("dict[str, Any]", made)


def _empty_like_parts(unread: Unread, module: torch.nn.Module) -> torch.Tensor:
    like: Any = next(module.parameters(), None)
    if not is_distributed_tensor(like):
        return torch.empty(unread.shape, dtype=unread.dtype, device=DistributedManager().device)
    from torch.distributed import tensor as dtensors

    return dtensors.empty(*unread.shape, dtype=unread.dtype, device_mesh=like.device_mesh, placements=like.placements)
