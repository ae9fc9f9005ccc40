"""Pickling that keeps tensors what they are: their memory travels as bytes, the rest as torch pickles it."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from distman._torch_internals import reduce_tensor, with_type, without_type
from distman._workers.pickling import ModulePickler


class StoragePickler(ModulePickler):
    """Hands the memory of tensors out as buffers on the CPU, once for each storage, so that views stay views.

    torch itself pickles a storage by saving it as a file, which it cannot do for all dtypes.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            return storage_of, (pickle.PickleBuffer(memory_of(obj).cpu().numpy().data),)
        if isinstance(obj, torch.TypedStorage):
            return with_type, (without_type(obj), obj.dtype)
        if isinstance(obj, torch.Tensor):
            return reduce_tensor(obj)
        return super().reducer_override(obj)


def memory_of(storage: Any) -> torch.Tensor:
    """Return the memory of a storage as a tensor of bytes, on its device."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_of(buffer: bytes | bytearray | memoryview) -> torch.UntypedStorage:
    """Return a storage on the CPU whose memory is that of the buffer."""
    if len(buffer) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
