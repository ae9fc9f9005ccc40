"""Weights in a file that other programs read: a table of contents as JSON, and then the tensors' bytes.

Source:
    https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import torch

from distman.checkpoint._location import Location

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes, to which the table of contents is filled up by spaces


def write_safetensors(state: Mapping[str, Any], location: Location) -> None:
    """Write tensors of data types that the format has; where that fails, what was there before is as it was."""
    for name, one in state.items():
        if not isinstance(one, torch.Tensor) or one.dtype not in _NAMES:
            got = one.dtype if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise ValueError(f"{name} must be a tensor of a type that safetensors has, got {got}. Save a file.pt.")
    ordered = dict(sorted(state.items(), key=lambda one: (-one[1].element_size(), one[0])))  # all of them aligned
    contents, end = {}, 0
    for name, one in ordered.items():
        begin, end = end, end + one.numel() * one.element_size()
        contents[name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [begin, end]}
    table = json.dumps({"__metadata__": {"format": "pt"}, **contents}).encode()
    table += b" " * (-len(table) % _ALIGNMENT)
    with location.storage.create(location.place) as file:
        _write(file, len(table).to_bytes(8, "little"))
        _write(file, table)
        for one in ordered.values():
            _write(file, one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
