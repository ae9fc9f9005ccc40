"""Anything that can be pickled, from one rank to all, or from all to one or all."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import operator
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import encode
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman._torch_internals import despite_traces
from distman._workers.tensor_pickling import StoragePickler, memory_of
from distman.collectives import _debug
from distman.collectives._border import pickled
from distman.collectives._exchange import (
    all_gather_numbers,
    all_gather_texts,
    broadcast,
    broadcast_numbers,
    broadcast_parts,
    control_device,
    exchange,
)
from distman.collectives._result_memory import new_empty
from distman.collectives._transport import reaches_all
from distman.collectives._validation import GroupLike, check_member, resolve_group
from distman.errors import DistmanError
from distman.manager import DistributedManager

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LEAST_IN_PARTS = 2**20  # bytes: from here on memory goes to ranks of this host in parts
_LARGE_BYTES = 65_536  # from here on memory travels by itself: copying it into the message would cost more
_LACKS_NAME = 2  # what a rank brings in place of 1, which stands for an error


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
    _debug.compare_calls("broadcast_data", members, src=src)
    check_member("src", src, members)
    return data if members.size == 1 else cast("T", _broadcast(data, src, members))


def _broadcast(data: object, src: int, group: Group, *, by_value: bool = False) -> object:
    device = control_device(group)
    is_source = group.rank == src
    seal = Seal(group)
    packed, error = _attempt(_pack, data, seal, by_value=by_value) if is_source else (None, None)
    text, memories = packed or (b"", [])
    goes_in_parts = is_source and reaches_all(group, torch.device("cpu"))
    length, in_parts = broadcast_numbers([len(text), goes_in_parts], src, group)
    message = _to_bytes(text, device) if is_source else _room(length, device)
    broadcast(message, src, group)
    if not is_source and length:
        opened, error = _attempt(_open, _to_text(message), seal, src)
        text, memories = opened or (b"", [])
    _raise_everywhere(error, group)
    for memory in memories:
        if in_parts and memory.device.type == "cpu" and memory.numel() >= _LEAST_IN_PARTS:
            broadcast_parts(memory, src, group)
        elif memory.device.type in group.device_types:
            broadcast(memory, src, group)
        else:  # by way of a device that the group can reach
            staged = memory.to(device)
            broadcast(staged, src, group)
            memory.copy_(staged)
    received, error = (data, None) if is_source else _attempt(_unpickle, text, memories)
    if _raise_everywhere(error, group, may_repeat=not by_value):
        return _broadcast(data, src, group, by_value=True)
    return received


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
    _debug.compare_calls("gather_objects", members, dst=dst)
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
    _debug.compare_calls("all_gather_objects", members)
    return _collect(data, members, range(members.size)) or []


def _collect(data: T, group: Group, receivers: Sequence[int], *, by_value: bool = False) -> list[T] | None:
    if group.size == 1:
        return [data]
    device = control_device(group)
    seal = Seal(group)
    packed, error = _attempt(_pack, data, seal, is_whole=True, by_value=by_value)
    mine = _to_bytes(packed[0] if packed else b"", device)
    lengths = [length for (length,) in all_gather_numbers([len(mine)], group)]
    receives = group.rank in receivers
    buffers = [_room(length if receives else 0, device) for length in lengths]
    exchange([mine if rank in receivers else mine[:0] for rank in range(group.size)], buffers, group)
    found: list[Any] = [data] * group.size if receives else []
    for rank, buffer in enumerate(buffers if receives else ()):
        if error is None and rank != group.rank and buffer.numel():
            found[rank], error = _attempt(_unseal, _to_text(buffer), seal, rank)
    if _raise_everywhere(error, group, may_repeat=not by_value):
        return _collect(data, group, receivers, by_value=True)
    return found if receives else None


class _Pickler(StoragePickler):
    """Leaves large memories of tensors out unless it is whole, and takes small ones off their accelerator.

    Unless ``by_value``, what the script defines goes by name, as in a plain pickle: ranks run the same script, and a
    copy of another rank's class would be foreign, with the globals of that rank.
    """

    def __init__(self, file: io.BytesIO, *, is_whole: bool, by_value: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.memories: list[torch.Tensor] = []
        self._is_whole = is_whole
        self._by_value = by_value
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
        elif not self._by_value and isinstance(obj, type | FunctionType) and _is_of_script(obj):
            return NotImplemented
        return super().reducer_override(obj)


def _is_of_script(obj: type | FunctionType) -> bool:
    """Return whether the script of this rank has a class or function under its name."""
    if obj.__module__ != "__main__":
        return False
    with contextlib.suppress(AttributeError):
        return operator.attrgetter(obj.__qualname__)(sys.modules["__main__"]) is obj
    return False


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

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            error.obj = sys.modules.get(module)
            raise


def _attempt(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R | None, Exception | None]:
    """Return what a function returns, or else its error: whatever a program's object raises is raised on all ranks."""
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - as above
        return None, error


def _pack(
    data: object, seal: Seal, *, is_whole: bool = False, by_value: bool = False
) -> tuple[bytes, list[torch.Tensor]]:
    """Return the sealed pickle, and the memories that were left out of it."""
    file = io.BytesIO()
    pickler = _Pickler(file, is_whole=is_whole, by_value=by_value)
    pickler.dump(data)
    if is_whole:
        return seal.put_on(file.getvalue()), []
    specs = [(memory.numel(), memory.device.type == "cpu") for memory in pickler.memories]
    return seal.put_on(pickle.dumps((specs, file.getvalue()))), pickler.memories


def _open(sealed: bytes, seal: Seal, src: int) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickle, and room for its memories."""
    specs, text = _unseal(sealed, seal, src)
    devices = [torch.device("cpu") if is_on_cpu else DistributedManager().device for _, is_on_cpu in specs]
    return text, [_room(num_bytes, device) for (num_bytes, _), device in zip(specs, devices, strict=True)]


def _unseal(sealed: bytes, seal: Seal, src: int) -> Any:
    return _unpickle(seal.take_off(sealed, src), [])


def _unpickle(text: bytes, memories: Sequence[torch.Tensor]) -> Any:
    return _Unpickler(io.BytesIO(text), memories).load()


def _raise_everywhere(error: Exception | None, group: Group, *, may_repeat: bool = False) -> bool:
    """Go on only if no rank of the group brings an error; else raise it there, and on the others what it was.

    If it ``may_repeat`` the call, return whether to: nothing is wrong but that the script of a rank lacks a name.
    """
    lacks_name = isinstance(error, AttributeError) and error.obj is sys.modules["__main__"]
    mine = _LACKS_NAME if may_repeat and lacks_name else int(error is not None)
    brought = [number for (number,) in all_gather_numbers([mine], group)]
    failed = [rank for rank, number in enumerate(brought) if number == 1]
    if not failed:
        return _LACKS_NAME in brought
    record = encode(FailureRecord.of(error, group.ranks[group.rank])) if error is not None else ""
    texts = all_gather_texts(record, group)
    if error is not None:
        raise error
    raise FailureRecord.decoded(texts[failed[0]].encode(), f"why rank {group.ranks[failed[0]]} failed").to_error()


def _room(length: int, device: torch.device) -> torch.Tensor:
    return new_empty(torch.empty(0, dtype=torch.uint8, device=device), (length,))


def _to_bytes(text: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) if text else _room(0, device)


def _to_text(message: torch.Tensor) -> bytes:
    return message.cpu().numpy().tobytes()


_SEAL_BYTES = 32


class ForeignPickleError(DistmanError):
    """What was received was not sent by the rank that should have."""


class Seal:
    """Seals the pickles of one call, under a key that only the ranks of the job know; all make one for each call.

    A pickle of an earlier call, or of another rank or group, does not pass for one of this. Where the job has no key,
    since nothing protects it or other code has made its group, nothing is sealed.
    """

    def __init__(self, group: Group) -> None:
        rendezvous = DistributedManager()._state.job.rendezvous
        self._key = rendezvous.key if rendezvous is not None else b""
        self._group = group
        self._call = next(group.seals)

    def put_on(self, text: bytes) -> bytes:
        return self._of(text, self._group.rank) + text if self._key else text

    def take_off(self, sealed: bytes, src: int) -> bytes:
        """Return the pickle of a rank of the group, if that rank has sealed it."""
        if not self._key:
            return sealed
        text = sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:_SEAL_BYTES], self._of(text, src)):
            rank = self._group.ranks[src]
            raise ForeignPickleError(
                f"what came from rank {rank} must be sealed by that rank in the same call, got something else. Let all "
                "ranks make the same calls; if they do, a stranger sends to this job: see who can reach its hosts."
            )
        return text

    def _of(self, text: bytes, src: int) -> bytes:
        what = json.dumps([self._group.name, self._group.ranks, self._call, src]).encode()
        digest = hashlib.blake2b(what, digest_size=_SEAL_BYTES, key=self._key, person=b"distman pickle")
        digest.update(text)
        return digest.digest()
