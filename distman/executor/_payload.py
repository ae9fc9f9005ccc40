"""An object as a pickle, with the contents of its tensors and arrays beside it, to be laid into shared memory."""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from distman._torch_internals import with_type, without_type

INLINE_BYTES = 64 * 1024
_BESIDE_BYTES = 16 * 1024
_ALIGNMENT = 64
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class Parcel:
    """A packed object.

    Attributes:
        stream: Its pickle.
        buffers: What the pickle refers to: the memory of large tensors and arrays, not yet copied.
    """

    stream: bytes
    buffers: tuple[memoryview, ...] = ()

    @property
    def is_inline(self) -> bool:
        """Whether it is small enough to travel in a message."""
        return not self.buffers and len(self.stream) <= INLINE_BYTES

    @property
    def total_bytes(self) -> int:
        """What ``write`` needs."""
        head = 8 * len(self.buffers) + len(self.stream)
        return _aligned(head) + sum(_aligned(buffer.nbytes) for buffer in self.buffers)

    def write(self, region: npt.NDArray[np.uint8]) -> None:
        """Lay it into memory: the sizes of the buffers, the pickle, the buffers.

        Args:
            region: At least ``total_bytes`` bytes.
        """
        head = struct.pack(f"<{len(self.buffers)}Q", *(buffer.nbytes for buffer in self.buffers)) + self.stream
        region[: len(head)] = np.frombuffer(head, np.uint8)
        start = _aligned(len(head))
        for buffer in self.buffers:
            region[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
            start += _aligned(buffer.nbytes)


def pack(value: object) -> Parcel:
    """Return the object as a parcel; tensors of other devices come out on the CPU.

    Lambdas, closures and what a notebook defines travel by value.

    Args:
        value: Anything that cloudpickle can pickle. It must not change before the parcel is written.
    """
    if type(value) in _PLAIN_TYPES:
        return Parcel(pickle.dumps(value))
    buffers: list[memoryview] = []

    def is_in_stream(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _BESIDE_BYTES:
            return True
        buffers.append(raw)
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=is_in_stream).dump(value)
    return Parcel(file.getvalue(), tuple(buffers))


def unpack(region: memoryview, stream_bytes: int, num_buffers: int) -> Any:
    """Return the object that ``Parcel.write`` laid there; its tensors and arrays live in that memory.

    Args:
        region: The memory; the tensors keep it alive.
        stream_bytes: Length of the pickle.
        num_buffers: Number of buffers.
    """
    sizes = struct.unpack_from(f"<{num_buffers}Q", region)
    start = 8 * num_buffers
    stream = region[start : start + stream_bytes]
    start = _aligned(start + stream_bytes)
    buffers = []
    for size in sizes:
        buffers.append(region[start : start + size])
        start += _aligned(size)
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - written by a process of ours


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Hands the memory of tensors out, once for each storage, so that views stay views."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            return _untyped_storage, (pickle.PickleBuffer(_memory_of(obj).data),)
        if isinstance(obj, torch.TypedStorage):
            return with_type, (without_type(obj), obj.dtype)
        return super().reducer_override(obj)


def _memory_of(storage: Any) -> npt.NDArray[np.uint8]:
    with torch.no_grad():
        array: npt.NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu()).numpy()
    return array


def _untyped_storage(buffer: bytearray | memoryview) -> torch.UntypedStorage:
    if len(buffer) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
