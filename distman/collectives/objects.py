"""Anything that can be pickled, from one rank to all, or from all to one or all."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import cloudpickle
import torch
import torch.distributed as dist

from distman.collectives import debug
from distman.collectives.border import GroupLike, check_member, resolve_group
from distman.collectives.exchange import all_gather_numbers, broadcast_numbers, control_device, exchange
from distman.control.failure import FailureNotice
from distman.errors import RankFailedError
from distman.groups import Group
from distman.manager import DistributedManager

__all__ = ["all_gather_objects", "broadcast_data", "broadcast_if_ddp", "gather_objects"]

T = TypeVar("T")
_LARGE_BYTES = 65_536


def broadcast_data(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return one rank's data on all ranks of the group.

    Collective. Blocking. Not differentiable. Large tensors travel beside the pickle, without a copy into it.

    Args:
        data: On ``src`` anything that cloudpickle takes; elsewhere it is ignored.
        src: The rank in the group whose data it is.
        group: A process group, the name of one, or None for the world.

    Returns:
        On ``src`` the data itself; elsewhere an equal object, whose tensors are on the CPU where they were on the
        CPU, and on this rank's device where they were on an accelerator.

    Raises:
        ValueError: The group has no rank ``src``.
        Exception: On the rank where pickling or unpickling failed: its error.
        RankFailedError: On the other ranks: that error.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    members = resolve_group(group)
    check_member("src", src, members)
    debug.compare("broadcast_data", members, src=src)
    if members.size == 1:
        return data
    device = control_device(members, DistributedManager().device)
    text, tensors, error = _pack(data) if members.rank == src else (b"", [], None)
    (length,) = broadcast_numbers([len(text)], src, members, device)
    message = _to_bytes(text, device) if members.rank == src else torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(message, group=members.process_group, group_src=src)
    if members.rank != src and length:
        data, tensors, error = _unpack(message)
    _raise_everywhere(error, members, device)
    for tensor in tensors:
        dist.broadcast(_as_bytes(tensor), group=members.process_group, group_src=src)
    return data


def broadcast_if_ddp(data: T, src: int = 0) -> T:
    """Return rank ``src``'s data on all ranks; the data itself where there is no job of several processes.

    Collective if the manager is initialized; else local. See :func:`broadcast_data`.
    """
    return broadcast_data(data, src) if DistributedManager.is_initialized() else data


def gather_objects(data: T, dst: int = 0, group: GroupLike = None) -> list[T] | None:
    """Return the data of all ranks on one of them, in rank order.

    Collective. Blocking. Not differentiable.

    Args:
        data: Anything that cloudpickle takes.
        dst: The rank in the group that gets the list.
        group: A process group, the name of one, or None for the world.

    Returns:
        On ``dst`` the list, with this rank's data itself at its own place; elsewhere None.

    Raises:
        ValueError: The group has no rank ``dst``.
        Exception: On the rank where pickling or unpickling failed: its error.
        RankFailedError: On the other ranks: that error.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    members = resolve_group(group)
    check_member("dst", dst, members)
    debug.compare("gather_objects", members, dst=dst)
    return _collect(data, members, [dst])


def all_gather_objects(data: T, group: GroupLike = None) -> list[T]:
    """Return the data of all ranks on all of them, in rank order.

    Collective. Blocking. Not differentiable.

    Args:
        data: Anything that cloudpickle takes.
        group: A process group, the name of one, or None for the world.

    Returns:
        The list, with this rank's data itself at its own place.

    Raises:
        Exception: On the rank where pickling or unpickling failed: its error.
        RankFailedError: On the other ranks: that error.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.
    """
    members = resolve_group(group)
    debug.compare("all_gather_objects", members)
    return _collect(data, members, range(members.size)) or []


def _collect(data: T, group: Group, receivers: Sequence[int]) -> list[T] | None:
    if group.size == 1:
        return [data]
    device = control_device(group, DistributedManager().device)
    text, _, error = _pack(data, is_whole=True)
    lengths = [length for (length,) in all_gather_numbers([len(text)], group, device)]
    mine = _to_bytes(text, device)
    receives = group.rank in receivers
    buffers = [mine.new_empty(length if receives else 0) for length in lengths]
    exchange([mine if rank in receivers else mine[:0] for rank in range(group.size)], buffers, group)
    found: list[Any] = []
    for rank, buffer in enumerate(buffers if receives and error is None else ()):
        item, _, failed = (data, [], None) if rank == group.rank or not buffer.numel() else _unpack(buffer)
        error = error or failed
        found.append(item)
    _raise_everywhere(error, group, device)
    return found if receives else None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves large tensors out, and takes tensors off their accelerator.

    Args:
        file: Where the pickle goes.
        is_whole: Leave nothing out.
    """

    def __init__(self, file: io.BytesIO, *, is_whole: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._is_whole = is_whole
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if obj.layout != torch.strided or obj.is_quantized:
            return None
        is_parameter = isinstance(obj, torch.nn.Parameter)
        if not self._is_whole and obj.device.type != "meta" and obj.nbytes >= _LARGE_BYTES:
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self.tensors)
                self.tensors.append(obj.detach())
            place = "cpu" if obj.device.type == "cpu" else ""
            return self._numbers[id(obj)], obj.dtype, tuple(obj.shape), place, obj.requires_grad, is_parameter
        if obj.device.type in ("cpu", "meta"):
            return None
        return -1, obj.detach().cpu(), None, None, obj.requires_grad, is_parameter


class _Unpickler(pickle.Unpickler):
    """Makes room for the tensors that were left out, and puts the others on this rank's device."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._room: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._room[number] for number in sorted(self._room)]

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, what, shape, place, needs_grad, is_parameter = pid
        if number < 0:
            return _dress(what.to(DistributedManager().device), needs_grad=needs_grad, is_parameter=is_parameter)
        if number not in self._made:
            self._room[number] = torch.empty(shape, dtype=what, device=place or DistributedManager().device)
            self._made[number] = _dress(self._room[number], needs_grad=needs_grad, is_parameter=is_parameter)
        return self._made[number]


def _dress(tensor: torch.Tensor, *, needs_grad: bool, is_parameter: bool) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.nn.Parameter(tensor, needs_grad) if is_parameter else tensor.requires_grad_(needs_grad)


def _pack(data: object, *, is_whole: bool = False) -> tuple[bytes, list[torch.Tensor], Exception | None]:
    """Return the pickle and the tensors left out of it; no bytes, and why, where pickling failed."""
    file = io.BytesIO()
    pickler = _Pickler(file, is_whole=is_whole)
    try:
        pickler.dump(data)
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return b"", [], error
    return file.getvalue(), pickler.tensors, None


def _unpack(message: torch.Tensor) -> tuple[Any, list[torch.Tensor], Exception | None]:
    """Return the object, and the tensors that still have to be filled; or why unpickling failed."""
    unpickler = _Unpickler(io.BytesIO(message.cpu().numpy().tobytes()))
    try:
        return unpickler.load(), unpickler.tensors, None
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return None, [], error


def _raise_everywhere(error: Exception | None, group: Group, device: torch.device) -> None:
    """Go on only if no rank of the group brings an error; else raise it there, and on the others what it was."""
    failed = [rank for rank, (flag,) in enumerate(all_gather_numbers([error is not None], group, device)) if flag]
    if not failed:
        return
    notice = FailureNotice.of(error, group.ranks[group.rank]) if error is not None else None
    text = json.dumps(dataclasses.asdict(notice)).encode() if notice is not None else b""
    (length,) = broadcast_numbers([len(text)], failed[0], group, device)
    message = torch.empty(length, dtype=torch.uint8, device=device)
    if group.rank == failed[0]:
        message = _to_bytes(text, device)
    dist.broadcast(message, group=group.process_group, group_src=failed[0])
    if error is not None:
        raise error
    raise RankFailedError(**json.loads(message.cpu().numpy().tobytes()))


def _to_bytes(text: bytes, device: torch.device) -> torch.Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, or of a contiguous copy of another."""
    return tensor.contiguous().view(-1).view(torch.uint8)
