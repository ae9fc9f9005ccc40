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

from distman._coordination.failure.record import FailureRecord
from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman.collectives import _debug
from distman.collectives._exchange import all_gather_numbers, broadcast_numbers, control_device, exchange
from distman.collectives._validation import GroupLike, check_member, resolve_group
from distman.errors import RankFailedError
from distman.manager import DistributedManager

T = TypeVar("T")
_LARGE_BYTES = 65_536  # from here on a tensor travels by itself: copying it into the message would cost more


@collective
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
    _debug.compare("broadcast_data", members, src=src)
    check_member("src", src, members)
    if members.size == 1:
        return data
    device = control_device(members, DistributedManager().device)
    is_source = members.rank == src
    payload, error = _pack(data) if is_source else (_Payload(), None)
    specs_length, pickle_length = broadcast_numbers([len(payload.specs), len(payload.pickle)], src, members, device)
    message = (
        _to_bytes(payload.specs + payload.pickle, device) if is_source else _room(specs_length + pickle_length, device)
    )
    dist.broadcast(message, group=members.process_group, group_src=src)
    if not is_source and pickle_length:
        payload, error = _open(message, specs_length)
    _raise_everywhere(error, members, device)
    for tensor in payload.tensors:
        _broadcast_memory(tensor, src, members, device)
    if not is_source:
        data, error = _unpickle(payload.pickle, payload.tensors)
    _raise_everywhere(error, members, device)
    return data


def broadcast_if_ddp(data: T, src: int = 0) -> T:
    """Return rank ``src``'s data on all ranks; the data itself where there is no job of several processes.

    Collective if the manager is initialized; local in a process that is alone. See :func:`broadcast_data`.

    Raises:
        NotInitializedError: The manager is not initialized, though a launcher or a process group says that there is a
            job.
    """
    return data if DistributedManager.find() is None else broadcast_data(data, src)


@collective
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
    _debug.compare("gather_objects", members, dst=dst)
    check_member("dst", dst, members)
    return _collect(data, members, [dst])


@collective
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
    _debug.compare("all_gather_objects", members)
    return _collect(data, members, range(members.size)) or []


def _collect(data: T, group: Group, receivers: Sequence[int]) -> list[T] | None:
    if group.size == 1:
        return [data]
    device = control_device(group, DistributedManager().device)
    payload, error = _pack(data, is_whole=True)
    lengths = [length for (length,) in all_gather_numbers([len(payload.pickle)], group, device)]
    mine = _to_bytes(payload.pickle, device)
    receives = group.rank in receivers
    buffers = [_room(length if receives else 0, device) for length in lengths]
    exchange([mine if rank in receivers else mine[:0] for rank in range(group.size)], buffers, group)
    found: list[Any] = []
    for rank, buffer in enumerate(buffers if receives and error is None else ()):
        is_here = rank == group.rank or not buffer.numel()
        item, failed = (data, None) if is_here else _unpickle(_to_text(buffer), [])
        error = error or failed
        found.append(item)
    _raise_everywhere(error, group, device)
    return found if receives else None


@dataclasses.dataclass(frozen=True)
class _Payload:
    """An object on its way.

    Attributes:
        pickle: The pickle; empty where pickling failed.
        tensors: Contiguous tensors that were left out of it.
        specs: Dtype, shape and place of these tensors, as JSON.
    """

    pickle: bytes = b""
    tensors: Sequence[torch.Tensor] = ()
    specs: bytes = b""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Leaves large tensors out, and takes tensors off their accelerator.

    Args:
        file: Where the pickle goes.
        is_whole: Leave nothing out.
    """

    def __init__(self, file: io.BytesIO, *, is_whole: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._is_whole = is_whole
        self._ids: dict[int, tuple[Any, ...]] = {}
        self._kept: list[torch.Tensor] = []  # what is gone may lend its id to something else

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if not isinstance(obj, torch.Tensor) or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if obj.layout != torch.strided or obj.is_quantized or obj.device.type == "meta":
            return None
        is_left_out = not self._is_whole and obj.nbytes >= _LARGE_BYTES
        if not is_left_out and obj.device.type == "cpu":
            return None
        if id(obj) not in self._ids:
            kind = obj.requires_grad, isinstance(obj, torch.nn.Parameter)
            plain = obj.detach().resolve_conj().resolve_neg().contiguous()
            if is_left_out:
                self.tensors.append(plain)
            self._ids[id(obj)] = (len(self._ids), *kind, len(self.tensors) - 1 if is_left_out else plain.cpu())
            self._kept.append(obj)
        return self._ids[id(obj)]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors that were left out into their places, and those of accelerators on this rank's device."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        number, needs_grad, is_parameter, content = pid
        if number not in self._made:
            is_left_out = isinstance(content, int)
            tensor = self._tensors[content] if is_left_out else content.to(DistributedManager().device)
            self._made[number] = (
                torch.nn.Parameter(tensor, needs_grad) if is_parameter else tensor.detach().requires_grad_(needs_grad)
            )
        return self._made[number]


def _pack(data: object, *, is_whole: bool = False) -> tuple[_Payload, Exception | None]:
    """Return the payload, empty where pickling failed, and why it did."""
    file = io.BytesIO()
    pickler = _Pickler(file, is_whole=is_whole)
    try:
        pickler.dump(data)
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return _Payload(), error
    specs = [[str(one.dtype), list(one.shape), one.device.type == "cpu"] for one in pickler.tensors]
    return _Payload(file.getvalue(), pickler.tensors, json.dumps(specs).encode()), None


def _open(message: torch.Tensor, specs_length: int) -> tuple[_Payload, Exception | None]:
    """Return the payload with room for its tensors, or why there is none."""
    text = _to_text(message)
    try:
        tensors = [
            torch.empty(
                shape,
                dtype=getattr(torch, dtype.removeprefix("torch.")),
                device="cpu" if is_on_cpu else DistributedManager().device,
            )
            for dtype, shape, is_on_cpu in json.loads(text[:specs_length])
        ]
    except (RuntimeError, MemoryError) as error:
        return _Payload(), error
    return _Payload(text[specs_length:], tensors), None


def _unpickle(text: bytes, tensors: Sequence[torch.Tensor]) -> tuple[Any, Exception | None]:
    """Return the object, or why unpickling failed."""
    try:
        return _Unpickler(io.BytesIO(text), tensors).load(), None
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return None, error


def _broadcast_memory(tensor: torch.Tensor, src: int, group: Group, device: torch.device) -> None:
    """Fill a contiguous tensor with what it holds on ``src``; by way of a device that the group can reach."""
    memory = tensor.view(-1).view(torch.uint8)
    is_reached = tensor.device.type in group.device_types
    staged = memory if is_reached else memory.to(device)
    dist.broadcast(staged, group=group.process_group, group_src=src)
    if not is_reached:
        memory.copy_(staged)


def _raise_everywhere(error: Exception | None, group: Group, device: torch.device) -> None:
    """Go on only if no rank of the group brings an error; else raise it there, and on the others what it was."""
    failed = [rank for rank, (flag,) in enumerate(all_gather_numbers([error is not None], group, device)) if flag]
    if not failed:
        return
    record = FailureRecord.of(error, group.ranks[group.rank]) if error is not None else None
    text = record.to_json().encode() if record is not None else b""
    (length,) = broadcast_numbers([len(text)], failed[0], group, device)
    message = _to_bytes(text, device) if group.rank == failed[0] else _room(length, device)
    dist.broadcast(message, group=group.process_group, group_src=failed[0])
    if error is not None:
        raise error
    raise RankFailedError(**json.loads(_to_text(message)))


def _room(length: int, device: torch.device) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device=device)


def _to_bytes(text: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) if text else _room(0, device)


def _to_text(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
