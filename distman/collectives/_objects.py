"""Anything that can be pickled, from one rank to all, or from all to one or all."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import MalformedMessageError, decode
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman._torch_internals import despite_traces
from distman._workers.tensor_pickling import StoragePickler, memory_of
from distman.collectives import _debug
from distman.collectives._border import pickled
from distman.collectives._exchange import exchange
from distman.collectives._numbers import (
    all_gather_numbers,
    broadcast,
    broadcast_numbers,
    broadcast_parts,
    control_device,
)
from distman.collectives._result_memory import new_empty
from distman.collectives._sealing import ForeignPickleError, Seal
from distman.collectives._transport import reaches_all
from distman.collectives._validation import GroupLike, check_member, resolve_group
from distman.manager import DistributedManager

T = TypeVar("T")
_LEAST_IN_PARTS = 2**20  # bytes: from here on memory goes to ranks of this host in parts
_LENGTH_BYTES = 8  # of how long the specs are
_LARGE_BYTES = 65_536  # from here on memory travels by itself: copying it into the message would cost more


@collective
@despite_traces
def broadcast_data(data: T, src: int = 0, group: GroupLike = None) -> T:
    """Return one rank's data on all ranks of the group.

    Collective. Blocking. Not differentiable. Large tensors travel beside the pickle, without a copy into it. A view
    takes the whole tensor along that it shares its memory with; pass a clone to send less.

    Args:
        data: On ``src`` anything that cloudpickle takes; elsewhere it is ignored.
        src: The rank in the group whose data it is.
        group: A process group, the name of one, or None for the world.

    Returns:
        On ``src`` the data itself; elsewhere an equal object, as a pickle would give it, with the types, strides and
        attributes of its tensors. They are on the CPU where they were on the CPU, and on this rank's device where
        they were on an accelerator.

    Raises:
        ValueError: The group has no rank ``src``.
        TypeError: On ``src``: there is a tensor in the data of which each rank has a part.
        Exception: On the rank where pickling or unpickling failed: its error.
        RankFailedError: On the other ranks: that error.
        PlanMismatchError: In debug mode, on every rank: the ranks call differently.

    Example on two ranks:
        >>> broadcast_data({"run": "a7", "lr": 0.1} if rank == 0 else None)
        {'run': 'a7', 'lr': 0.1}
    """
    members = resolve_group(group)
    _debug.compare("broadcast_data", members, src=src)
    check_member("src", src, members)
    if members.size == 1:
        return data
    device = control_device(members, DistributedManager().device)
    is_source = members.rank == src
    seal = Seal(members)
    payload, error = _pack(data) if is_source else (_Payload(), None)
    text = seal.put_on(payload.to_bytes()) if payload.pickle else b""
    goes_in_parts = is_source and reaches_all(members, torch.device("cpu"))
    length, in_parts = broadcast_numbers([len(text), goes_in_parts], src, members, device)
    message = _to_bytes(text, device) if is_source else _room(length, device)
    broadcast(message, src, members)
    if not is_source and length:
        payload, error = _open(message, seal, src)
    _raise_everywhere(error, members, device)
    for memory in payload.memories:
        if in_parts and memory.device.type == "cpu" and memory.numel() >= _LEAST_IN_PARTS:
            broadcast_parts(memory, src, members)
        else:
            _broadcast_memory(memory, src, members, device)
    if not is_source:
        data, error = _unpickle(payload.pickle, payload.memories)
    _raise_everywhere(error, members, device)
    return data


def broadcast_if_ddp(data: T, src: int = 0) -> T:
    """Return rank ``src``'s data on all ranks; the data itself where there is no job.

    Collective if the manager is initialized; local in a process that is alone.

    Args:
        data: As of :func:`broadcast_data`.
        src: The rank whose data it is.

    Raises:
        NotInitializedError: The manager is not initialized, though a launcher or a process group says that there is a
            job.
        Exception: As of :func:`broadcast_data`.

    Example:
        >>> broadcast_if_ddp("a7")  # alone, and the manager is not initialized
        'a7'
    """
    return data if DistributedManager.find() is None else broadcast_data(data, src)


@collective
@despite_traces
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

    Example on two ranks:
        >>> lengths = gather_objects(10 + rank)
        >>> all_gather_objects(lengths)
        [[10, 11], None]
    """
    members = resolve_group(group)
    _debug.compare("gather_objects", members, dst=dst)
    check_member("dst", dst, members)
    return _collect(data, members, [dst])


@collective
@despite_traces
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

    Example on two ranks:
        >>> all_gather_objects({"rank": rank, "files": 3 - rank})
        [{'rank': 0, 'files': 3}, {'rank': 1, 'files': 2}]
    """
    members = resolve_group(group)
    _debug.compare("all_gather_objects", members)
    return _collect(data, members, range(members.size)) or []


def _collect(data: T, group: Group, receivers: Sequence[int]) -> list[T] | None:
    if group.size == 1:
        return [data]
    device = control_device(group, DistributedManager().device)
    seal = Seal(group)
    payload, error = _pack(data, is_whole=True)
    text = seal.put_on(payload.pickle) if payload.pickle else b""
    lengths = [length for (length,) in all_gather_numbers([len(text)], group, device)]
    mine = _to_bytes(text, device)
    receives = group.rank in receivers
    buffers = [_room(length if receives else 0, device) for length in lengths]
    exchange([mine if rank in receivers else mine[:0] for rank in range(group.size)], buffers, group)
    found: list[Any] = []
    for rank, buffer in enumerate(buffers if receives and error is None else ()):
        is_here = rank == group.rank or not buffer.numel()
        item, failed = (data, None) if is_here else _unseal_and_unpickle(_to_text(buffer), seal, rank)
        error = error or failed
        found.append(item)
    _raise_everywhere(error, group, device)
    return found if receives else None


@dataclasses.dataclass(frozen=True)
class _Payload:
    pickle: bytes = b""  # empty where pickling failed
    memories: Sequence[torch.Tensor] = ()  # of tensors that were left out of it, as bytes
    specs: bytes = b""  # size and place of these memories, as JSON

    def to_bytes(self) -> bytes:
        """Return the specs and the pickle, which needs to be sealed as one."""
        return len(self.specs).to_bytes(_LENGTH_BYTES, "big") + self.specs + self.pickle


class _Pickler(StoragePickler):
    """Leaves large memories of tensors out unless it is whole, and takes small ones off their accelerator."""

    def __init__(self, file: io.BytesIO, *, is_whole: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memories: list[torch.Tensor] = []
        self._is_whole = is_whole
        self._ids: dict[int, tuple[int, object]] = {}
        self._kept: list[object] = []  # what is gone may lend its id to something else

    def persistent_id(self, obj: object) -> tuple[int, object] | None:
        if not isinstance(obj, torch.UntypedStorage):
            return None
        is_left_out = not self._is_whole and obj.nbytes() >= _LARGE_BYTES
        if not is_left_out and obj.device.type == "cpu":
            return None
        if id(obj) not in self._ids:
            memory = memory_of(obj)
            if is_left_out:
                self.memories.append(memory)
            self._ids[id(obj)] = (len(self._ids), len(self.memories) - 1 if is_left_out else _to_text(memory))
            self._kept.append(obj)
        return self._ids[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            obj = pickled(obj)
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Puts the memories that were left out into their places, and those of accelerators on this rank's device."""

    def __init__(self, file: io.BytesIO, memories: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._memories = memories
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, pid: Any) -> torch.UntypedStorage:
        number, content = pid
        if number not in self._made:
            is_left_out = isinstance(content, int)
            memory = self._memories[content] if is_left_out else _to_bytes(content, DistributedManager().device)
            self._made[number] = memory.untyped_storage()
        return self._made[number]


def _pack(data: object, *, is_whole: bool = False) -> tuple[_Payload, Exception | None]:
    """Return the payload, empty where pickling failed, and why it did."""
    file = io.BytesIO()
    pickler = _Pickler(file, is_whole=is_whole)
    try:
        pickler.dump(data)
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return _Payload(), error
    specs = [[memory.numel(), memory.device.type == "cpu"] for memory in pickler.memories]
    return _Payload(file.getvalue(), pickler.memories, json.dumps(specs).encode()), None


def _open(message: torch.Tensor, seal: Seal, src: int) -> tuple[_Payload, Exception | None]:
    """Return the payload with room for its memories, or why there is none."""
    try:
        text = seal.take_off(_to_text(message), src)
        start = _LENGTH_BYTES + int.from_bytes(text[:_LENGTH_BYTES], "big")
        specs = decode(text[_LENGTH_BYTES:start], list[tuple[int, bool]], f"where tensors of rank {src} are")
        memories = [
            _room(num_bytes, torch.device("cpu") if is_on_cpu else DistributedManager().device)
            for num_bytes, is_on_cpu in specs
        ]
    except (RuntimeError, MemoryError, ForeignPickleError, MalformedMessageError) as error:
        return _Payload(), error
    return _Payload(text[start:], memories), None


def _unseal_and_unpickle(sealed: bytes, seal: Seal, src: int) -> tuple[Any, Exception | None]:
    try:
        text = seal.take_off(sealed, src)
    except ForeignPickleError as error:
        return None, error
    return _unpickle(text, [])


def _unpickle(text: bytes, memories: Sequence[torch.Tensor]) -> tuple[Any, Exception | None]:
    try:
        return _Unpickler(io.BytesIO(text), memories).load(), None
    except Exception as error:  # noqa: BLE001 - whatever a program's object raises is raised on all ranks
        return None, error


def _broadcast_memory(memory: torch.Tensor, src: int, group: Group, device: torch.device) -> None:
    """Fill a tensor of bytes with what it holds on ``src``; by way of a device that the group can reach."""
    is_reached = memory.device.type in group.device_types
    staged = memory if is_reached else memory.to(device)
    broadcast(staged, src, group)
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
    broadcast(message, failed[0], group)
    if error is not None:
        raise error
    raise FailureRecord.decoded(_to_text(message), f"why rank {group.ranks[failed[0]]} failed").to_error()


def _room(length: int, device: torch.device) -> torch.Tensor:
    return new_empty(torch.empty(0, dtype=torch.uint8, device=device), (length,))


def _to_bytes(text: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) if text else _room(0, device)


def _to_text(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()
