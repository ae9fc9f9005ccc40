"""Tensors in lists, tuples, mappings and TensorDicts: out of them in an order that all ranks share, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch

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
    if _is_mapping(structure):
        keys, paths = _in_order(tuple(structure.keys()), path)
        return paths, [structure[key] for key in keys], functools.partial(_mapping_like, structure, keys)
    if _is_sequence(structure):
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


def _is_mapping(structure: Any) -> bool:
    return isinstance(structure, Mapping) or _is_tensor_dict(structure)


def _is_sequence(structure: Any) -> bool:
    is_text = isinstance(structure, (str, bytes))  # a tuple, since torch.compile follows no union up to 2.9
    return isinstance(structure, Sequence) and not is_text


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
