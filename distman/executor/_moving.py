"""Nested tensors on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def as_cpu(obj: T) -> T:
    """Return the object with every tensor in it detached and on the CPU.

    Local. Looks into lists, tuples, named tuples, sets, dictionaries and dataclasses, and at their subclasses.

    Args:
        obj: Anything. Neither it nor its tensors are changed.

    Returns:
        A new container, of the same type, where a tensor in it had to be moved or detached; otherwise the same object.
        What is neither a tensor nor one of those containers is passed on as it is.

    Example:
        >>> as_cpu({"loss": torch.ones(2, requires_grad=True)})
        {'loss': tensor([1., 1.])}
    """
    moved: Any = _move(obj)
    return moved  # type: ignore[no-any-return]


def _move(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        needs_nothing = obj.device.type == "cpu" and not obj.requires_grad
        return obj if needs_nothing else obj.detach().cpu()
    if isinstance(obj, MutableMapping):
        return _replace_items(obj, {key: _move(value) for key, value in obj.items()})
    if isinstance(obj, list | tuple):
        return _replace_sequence(obj, [_move(value) for value in obj])
    if isinstance(obj, set | frozenset):
        moved = [_move(value) for value in obj]
        return obj if _are_same(moved, obj) else type(obj)(moved)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _replace_fields(obj)
    return obj


def _are_same(moved: Any, values: Any) -> bool:
    return all(new is old for new, old in zip(moved, values, strict=True))


def _replace_sequence(obj: Any, moved: list[Any]) -> Any:
    if _are_same(moved, obj):
        return obj
    if isinstance(obj, list):
        new = copy.copy(obj)
        new[:] = moved
        return new
    return type(obj)._make(moved) if hasattr(obj, "_make") else type(obj)(moved)


def _replace_items(obj: Any, moved: dict[Any, Any]) -> Any:
    if _are_same(moved.values(), obj.values()):
        return obj
    new = copy.copy(obj)
    for key, value in moved.items():
        new[key] = value
    return new


def _replace_fields(obj: Any) -> Any:
    """Replace fields without calling ``__init__``, which may want other arguments."""
    fields = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)}
    moved = {name: _move(value) for name, value in fields.items()}
    if _are_same(moved.values(), fields.values()):
        return obj
    new = copy.copy(obj)
    for name, value in moved.items():
        object.__setattr__(new, name, value)
    return new
