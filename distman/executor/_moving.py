"""Nested tensors on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_WITHOUT_PARTS = frozenset({type(None), bool, int, float, complex, str, bytes})


def as_cpu(obj: T) -> T:
    """Return the object with every tensor in it detached and on the CPU.

    Local. Looks into lists, tuples, named tuples, sets, dictionaries and dataclasses, and at their subclasses.

    Args:
        obj: Anything. Neither it nor its tensors are changed.

    Returns:
        A new container, of the same type, where a tensor in it had to be moved or detached; otherwise the same object.
        What is neither a tensor nor one of those containers is passed on as it is. What is shared stays shared.

    Example:
        >>> as_cpu({"loss": torch.ones(2, requires_grad=True)})
        {'loss': tensor([1., 1.])}
    """
    contents = _contents(obj)
    moved: Any = _moved(obj, contents, _changing(contents), {})
    return moved  # type: ignore[no-any-return]


Contents = dict[int, tuple[Any, dict[Any, Any]]]
"""Each object that is there, by its identity, and what it holds by key, index or name."""


def _contents(obj: Any) -> Contents:
    contents: Contents = {}
    waiting = [obj]
    while waiting:
        part = waiting.pop()
        if type(part) not in _WITHOUT_PARTS and id(part) not in contents:
            held = _held(part)
            contents[id(part)] = part, held
            waiting.extend(held.values())
    return contents


def _held(obj: Any) -> dict[Any, Any]:
    if isinstance(obj, torch.Tensor):  # of which there may be many, and the next line takes long
        return {}
    if isinstance(obj, MutableMapping):
        return dict(obj.items())
    if isinstance(obj, list | tuple | set | frozenset):
        return dict(enumerate(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if hasattr(obj, field.name)}
    return {}


def _changing(contents: Contents) -> set[int]:
    """Return the identities of the tensors to be moved or detached, and of all that they are in."""
    waiting = [
        place
        for place, (part, _) in contents.items()
        if isinstance(part, torch.Tensor) and (part.device.type != "cpu" or part.requires_grad)
    ]
    holders: dict[int, list[int]] = {place: [] for place in contents} if waiting else {}
    for place, (_, held) in contents.items():
        for value in held.values():
            if id(value) in holders:
                holders[id(value)].append(place)
    changing: set[int] = set()
    while waiting:
        place = waiting.pop()
        if place not in changing:
            changing.add(place)
            waiting += holders[place]
    return changing


def _moved(obj: Any, contents: Contents, changing: set[int], copies: dict[int, Any]) -> Any:
    """Return the one copy of what changes; ``copies`` has it before it is filled, since what it holds may hold it."""
    place = id(obj)
    if place not in changing or place in copies:
        return copies.get(place, obj)
    held = contents[place][1]
    if isinstance(obj, torch.Tensor):
        copies[place] = obj.detach().cpu()
    elif isinstance(obj, tuple | set | frozenset):  # which is made of what it holds
        values = [_moved(value, contents, changing, copies) for value in held.values()]
        if place not in copies:  # else what holds it was in there
            copies[place] = obj._make(values) if hasattr(obj, "_make") else type(obj)(values)
    else:
        copies[place] = copy.copy(obj)
        _fill(copies[place], {key: _moved(value, contents, changing, copies) for key, value in held.items()})
    return copies[place]


def _fill(new: Any, held: dict[Any, Any]) -> None:
    if isinstance(new, list):
        new[:] = held.values()
    elif isinstance(new, MutableMapping):
        for key, value in held.items():
            new[key] = value
    else:
        for name, value in held.items():  # without ``__init__``, which may want other arguments
            object.__setattr__(new, name, value)
