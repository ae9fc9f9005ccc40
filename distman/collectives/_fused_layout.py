"""Out of lists, tuples, mappings and TensorDicts, in an order that all ranks share, into one buffer, and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from distman._torch_internals import unbind_apart
from distman.collectives._result_memory import new_empty

Rebuild = Callable[[Iterator[torch.Tensor]], Any]
"""Makes a structure of the same kind with other tensors, in the order of the first ones."""


def flatten(structure: Any, path: str = "") -> tuple[tuple[str, ...], list[torch.Tensor], Rebuild]:
    """Return the paths of the tensors of a structure, the tensors, and what makes the like of it with others.

    Mappings go in the order of their sorted keys. Rebuilt they are dicts with their keys in the old order; named tuples
    and TensorDicts stay what they are.
    """
    if isinstance(structure, torch.Tensor):
        return (path,), [structure], next
    paths, items, assemble = _take_apart(structure, path)
    if False not in [isinstance(item, torch.Tensor) for item in items]:
        return paths, items, lambda values: assemble(list(islice(values, len(items))))
    parts = [flatten(item, place) for place, item in zip(paths, items, strict=True)]
    rebuilds = [rebuild for _, _, rebuild in parts]
    return (
        tuple(chain.from_iterable([places for places, _, _ in parts])),
        list(chain.from_iterable([tensors for _, tensors, _ in parts])),
        lambda values: assemble([rebuild(values) for rebuild in rebuilds]),
    )


def _take_apart(structure: Any, path: str) -> tuple[tuple[str, ...], list[Any], Callable[[list[Any]], Any]]:
    """Return the paths of what a structure holds, that itself, and what puts others into the like of it."""
    if isinstance(structure, Mapping) or _is_tensor_dict(structure):
        keys, paths = _in_order(tuple(structure.keys()), path)
        return paths, [structure[key] for key in keys], functools.partial(_mapping_like, structure, keys)
    is_text = isinstance(structure, (str, bytes))  # a tuple, since torch.compile follows no union up to 2.9
    if isinstance(structure, Sequence) and not is_text:
        places: Callable[[int, str], tuple[str, ...]] = (
            _places.__wrapped__ if torch.compiler.is_compiling() else _places
        )
        return places(len(structure), path), list(structure), functools.partial(_sequence_like, structure)
    raise TypeError(
        "tensors must be a tensor, or a list, tuple, mapping or TensorDict of tensors, got "
        f"{type(structure).__name__} at {path or 'the top'}. Convert it with torch.as_tensor()."
    )


def _mapping_like(mapping: Any, keys: tuple[Any, ...], items: list[Any]) -> Any:
    parts = dict(zip(keys, items, strict=True))
    return mapping.empty().update(parts) if _is_tensor_dict(mapping) else {key: parts[key] for key in mapping}


def _sequence_like(sequence: Any, items: list[Any]) -> Any:
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return tuple(items) if isinstance(sequence, tuple) else items


def _is_tensor_dict(structure: Any) -> bool:
    return hasattr(structure, "batch_size") and hasattr(structure, "keys")


def _in_order(keys: tuple[Any, ...], path: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return the keys of a mapping in an order that all ranks share, and the paths of what they stand for."""
    if set(map(type, keys)) == {str} and not torch.compiler.is_compiling():  # else equal keys may differ: 1 and True
        return _names_in_order(keys, path)
    if all(isinstance(key, str) for key in keys):
        return _with_paths(sorted(keys), path)
    return _with_paths(sorted(keys, key=lambda key: (type(key).__name__, str(key))), path)


@functools.lru_cache(maxsize=64)
def _names_in_order(names: tuple[str, ...], path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the same of names; a program brings a few mappings, again and again."""
    return _with_paths(sorted(names), path)


@functools.lru_cache(maxsize=64)
def _places(number: int, path: str) -> tuple[str, ...]:
    """Return the paths of what a sequence holds; a program brings a few lengths, again and again."""
    return tuple([f"{path}[{index}]" for index in range(number)])


def _with_paths(keys: Sequence[Any], path: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    return tuple(keys), tuple([f"{path}[{key!r}]" for key in keys])


OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
Kind = tuple[torch.Size, torch.dtype, torch.device]
"""What is known of a tensor: shape, dtype and device."""
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # dtype.to_real() cannot be compiled
_BUFFER_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
"""What all backends reduce."""
_MOST_TOGETHER = 512
"""Elements of results that may share memory, which stays as long as one of them does; copies take longer than that."""
_LARGE_BYTES = 2**23  # of which copies are worth avoiding
_SHIFTS = (0, 22, 44)  # bits; float64 adds up 22 of them exactly over 2**31 ranks
_LOW_BITS = 2**22 - 1


@dataclass(frozen=True)
class Layout:
    operation: str
    dtype: torch.dtype  # of the buffer; complex numbers are pairs of it
    device: torch.device
    rows: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]  # path, shape, dtype and device of each tensor
    lengths: list[int]  # elements of the buffer that each takes
    is_uniform: bool  # all are of one shape and one real dtype, and on one device
    is_large: bool  # copies of the data are worth avoiding; not in a graph of torch.compile

    @functools.cached_property
    def text(self) -> str:
        """What must be equal on all ranks, as JSON."""
        rows = [[path, shape, str(dtype)] for path, shape, dtype, _ in self.rows]
        place = "" if self.device.type == "cpu" else f" on {self.device.type}"  # another backend would carry it
        return json.dumps([self.operation, f"{self.dtype}{place}", rows])

    @property
    def is_sum(self) -> bool:
        return self.operation in ("sum", "avg")

    @property
    def reduce_op(self) -> Any:
        return dist.ReduceOp.SUM if self.is_sum else OPERATIONS[self.operation]

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the buffer with these values, a new one unless it is sent as it is."""
        if self.is_sent_as_it_is:
            return values[0].reshape(-1)
        if torch.is_autocast_enabled(self.device.type):  # it refuses to put 16-bit floats of two kinds together
            with torch.autocast(self.device.type, enabled=False):
                return self.pack(values)
        if self.is_uniform and not self.is_large:
            return self.flat(torch.stack(list(values)))
        real = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in values]
        flat = [one.reshape(-1).to(self.device, self.dtype) for one in real]
        if self.is_large:
            return torch.cat(flat, out=new_empty(flat[0], (sum(self.lengths),)))
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.device)

    def flat(self, stacked: torch.Tensor) -> torch.Tensor:
        return stacked.to(self.device, self.dtype).reshape(-1)

    @property
    def is_sent_as_it_is(self) -> bool:
        """Whether the buffer is a large tensor itself, so that two copies are spared."""
        return self.is_large and [row[2:] for row in self.rows] == [(self.dtype, self.device)]

    @functools.cached_property
    def num_words(self) -> int:
        """How many numbers in float64 stand for the buffer in the first message."""
        return sum(self.lengths) * (1 if self.dtype.is_floating_point else len(_SHIFTS))

    def to_words(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer in such numbers; an integer is cut into several."""
        if self.dtype.is_floating_point:
            return buffer
        low, middle, high = (buffer.long() >> shift for shift in _SHIFTS)
        return torch.cat([low & _LOW_BITS, middle & _LOW_BITS, high])

    def from_words(self, words: torch.Tensor) -> torch.Tensor:
        """Return the buffer that numbers in float64 stand for, the sums of all ranks' for example."""
        if self.dtype.is_floating_point:
            return words.to(self.dtype)
        low, middle, high = words.long().view(len(_SHIFTS), -1)
        whole: torch.Tensor = low + (middle << _SHIFTS[1]) + (high << _SHIFTS[2])
        return whole.to(self.dtype)

    def unpack(self, buffer: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
        """Return new tensors with what the ranks' buffers were reduced to, or that itself if it is sent as it is."""
        if self.operation == "avg" and num_ranks > 1:
            buffer = buffer / num_ranks
        if self.is_sent_as_it_is:
            return [buffer.view(self.rows[0][1]).detach()]  # no view, so that it may be changed in place
        if self.is_uniform:
            _, shape, dtype, device = self.rows[0]
            stacked = buffer.to(device, dtype).view(len(self.rows), *shape)
            if self.is_large:
                return [new_empty(part, part.shape).copy_(part) for part in stacked]
            if len(buffer) <= _MOST_TOGETHER and not torch.compiler.is_compiling():
                return unbind_apart(stacked)
            parts: Any = torch.unbind_copy(stacked)  # type: ignore[func-returns-value]  # typed as None
            return list(parts)
        pieces = zip(buffer.split(self.lengths), self.rows, strict=True)
        return [_restore(part, shape, dtype, device) for part, (_, shape, dtype, device) in pieces]


def kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.shape, tensor.dtype, tensor.device


def stack_alike(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of one kind that is not complex, along a new first dim; None for others.

    Where they are many, to stack them takes less time than to look at the shape of each.
    """
    dtypes = [value.dtype for value in values]
    if not dtypes or dtypes.count(dtypes[0]) < len(dtypes) or dtypes[0].is_complex:
        return None
    if len(values) * values[0].numel() * values[0].itemsize >= _LARGE_BYTES:
        return None
    try:
        if values[0].shape != values[-1].shape:  # to be told by an error takes long
            return None
        stacked = torch.stack(list(values))
    except RuntimeError:  # of other shapes or none, on other devices, or of a dtype that autocast refuses
        return None
    return stacked if stacked.dtype == dtypes[0] else None


def _restore(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(part.to(device, _REAL[dtype], copy=True).view(*shape, 2))
    return part.to(device, dtype, copy=True).view(shape)


def find_layout(
    operation: str,
    buffer_dtype: torch.dtype | None,
    device: torch.device,
    paths: tuple[str, ...],
    kinds: tuple[Kind, ...],
) -> Layout:
    """Return the layout for tensors of these kinds, or of the one kind; a program asks for a few, again and again."""
    make = _make_layout.__wrapped__ if torch.compiler.is_compiling() else _make_layout
    layout: Layout = make(operation, buffer_dtype, device, paths, kinds)
    return layout


@functools.lru_cache(maxsize=64)
def _make_layout(
    operation: str,
    buffer_dtype: torch.dtype | None,
    device: torch.device,
    paths: tuple[str, ...],
    kinds: tuple[Kind, ...],
) -> Layout:
    if len(kinds) == 1:
        kinds *= len(paths)
    dtype = _buffer_dtype([kind for _, kind, _ in kinds], operation, buffer_dtype)
    lengths = [shape.numel() * (2 if kind.is_complex else 1) for shape, kind, _ in kinds]
    is_uniform = len(set(kinds)) == 1 and not kinds[0][1].is_complex
    rows = tuple([(path, *kind) for path, kind in zip(paths, kinds, strict=True)])
    is_large = not torch.compiler.is_compiling() and sum(lengths) * dtype.itemsize >= _LARGE_BYTES
    return Layout(operation, dtype, device, rows, lengths, is_uniform, is_large)


def _buffer_dtype(dtypes: Sequence[torch.dtype], operation: str, wish: torch.dtype | None) -> torch.dtype:
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if any(dtype.is_complex for dtype in dtypes) and operation not in ("sum", "avg"):
        raise ValueError(
            f"complex tensors must be summed or averaged, got op {operation}. Reduce their real and imaginary parts."
        )
    if wish is not None and wish not in _BUFFER_DTYPES:
        raise ValueError(
            f"buffer_dtype must be a float or integer dtype that the backends reduce, got {wish}. Choose one such as "
            "torch.float64."
        )
    # Whatever the buffer, each comes back in its own dtype, which would cut a mean off.
    if operation == "avg" and (len(floats) < len(dtypes) or not (wish is None or wish.is_floating_point)):
        beside = f" with buffer_dtype {wish}" if wish is not None else ""
        raise ValueError(
            f"integers must not be averaged, got op avg of {_names(dtypes)}{beside}. Convert them to floats, or sum "
            "them."
        )
    if wish is not None:
        return wish
    if floats and len(floats) < len(dtypes):
        raise ValueError(
            "tensors must be all integers or all floats unless buffer_dtype says what to convert them to, got "
            f"{_names(dtypes)}. Reduce the integers separately, or set buffer_dtype."
        )
    if not floats:
        return torch.int64
    return functools.reduce(torch.promote_types, [_REAL.get(dtype, dtype) for dtype in floats], torch.float32)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(sorted({str(dtype) for dtype in dtypes}))
