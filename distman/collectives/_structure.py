"""Tensors in lists, tuples, mappings and TensorDicts: out of them in an order that all ranks share, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def leaves(structure: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a structure with their paths; mappings in the order of their sorted keys.

    Raises:
        TypeError: Something in it is neither a tensor nor one of the structures.
    """
    if isinstance(structure, torch.Tensor):
        return [(path, structure)]
    if _is_mapping(structure):
        return [leaf for key in _sorted_keys(structure) for leaf in leaves(structure[key], f"{path}[{key!r}]")]
    if _is_sequence(structure):
        return [leaf for index, item in enumerate(structure) for leaf in leaves(item, f"{path}[{index}]")]
    raise TypeError(
        "tensors must be a tensor, or a list, tuple, mapping or TensorDict of tensors, got "
        f"{type(structure).__name__} at {path or 'the top'}. Convert it with torch.as_tensor()."
    )


def rebuild(structure: Any, values: Iterator[torch.Tensor]) -> Any:
    """Return a structure of the same kind with other tensors, given in the order of :func:`leaves`.

    Mappings become dicts with their keys in the old order; named tuples and TensorDicts stay what they are.
    """
    if isinstance(structure, torch.Tensor):
        return next(values)
    if _is_mapping(structure):
        parts = {key: rebuild(structure[key], values) for key in _sorted_keys(structure)}
        return structure.empty().update(parts) if _is_tensor_dict(structure) else {key: parts[key] for key in structure}
    items = [rebuild(item, values) for item in structure]
    if hasattr(structure, "_fields"):
        return type(structure)(*items)
    return tuple(items) if isinstance(structure, tuple) else items


def _is_tensor_dict(structure: Any) -> bool:
    return hasattr(structure, "batch_size") and hasattr(structure, "keys")


def _is_mapping(structure: Any) -> bool:
    return isinstance(structure, Mapping) or _is_tensor_dict(structure)


def _is_sequence(structure: Any) -> bool:
    return isinstance(structure, Sequence) and not isinstance(structure, str | bytes)


def _sorted_keys(mapping: Any) -> list[Any]:
    keys = list(mapping.keys())
    if all(isinstance(key, str) for key in keys):
        return sorted(keys)
    return sorted(keys, key=lambda key: (type(key).__name__, str(key)))
