"""What other processes wrote, decoded: a message is JSON, and its fields are checked before anybody uses them."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import reprlib
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from distman._base.text import printable
from distman.errors import DistmanError

if TYPE_CHECKING:
    from torch.distributed import Store


_MOST_BYTES = 32 << 20  # more than where 100,000 ranks are, which is the longest honest message; read within a second
_ADDRESS = re.compile(r"[\w.:%-]{1,253}", re.ASCII)  # what a resolver takes without raising of its own
_MOST_ADDRESSES = 32  # of a host; each may take seconds to try
_PORTS = range(1, 1 << 16)
_NOTHING = "-"  # no value of the protocol

Kind = TypeVar("Kind")
_Reader = Callable[[Any], Any]


def _checked_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if len(addresses) > _MOST_ADDRESSES or not all(map(_ADDRESS.fullmatch, addresses)):
        raise ValueError(f"it must be {_MOST_ADDRESSES} names or addresses of a host at most")
    return addresses


def _checked_port(port: int) -> int:
    if port not in _PORTS:
        raise ValueError("it must be a port")
    return port


Addresses = Annotated[tuple[str, ...], _checked_addresses]
"""A field of a message: names or addresses of one host."""

Port = Annotated[int, _checked_port]
"""A field of a message."""


class MalformedMessageError(DistmanError):
    """What another process wrote is not what it should be."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"reading {what} failed: {printable(reason)}. See that all hosts have one release of distman, and that "
            "nothing else writes to this job."
        )


def encode(message: Any) -> str:
    return json.dumps(dataclasses.asdict(message))


def decode(data: str | bytes, kind: type[Kind], what: str) -> Kind:
    """Return a message: a number, a text, a dataclass, a list, tuple or dict of such things, or one or None."""
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        value = json.loads(data if isinstance(data, str) else data.decode())  # else json guesses the encoding
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested too deeply
        raise MalformedMessageError(what, f"{error}") from None
    return checked(value, kind, what)


def checked(value: object, kind: type[Kind], what: str) -> Kind:
    """Return what a message holds that is decoded already; the arguments are those of :func:`decode`."""
    wanted: Any = kind  # mypy holds no type for hashable
    try:
        message: Kind = _reader(wanted)(value)
    except ValueError as error:
        raise MalformedMessageError(what, f"{error}") from None
    return message


def decode_index(data: str | bytes, size: int, what: str) -> int:
    """Return a number from 0 on and below a size, such as a rank."""
    index = decode(data, int, what)
    if not 0 <= index < size:
        raise MalformedMessageError(what, f"it must be below {size}, got {index}")
    return index


def decode_text(data: bytes) -> str:
    return data[:_MOST_BYTES].decode(errors="backslashreplace")


def read_at_once(store: Store, key: str) -> str | None:
    """Return what a key holds, or None where there is none now: another rank may delete it at any moment."""
    # ``check`` and then ``get`` would wait for the store's timeout if the key was deleted in between. Comparing with a
    # value that is never there leaves the store as it is, and a key that is not there gives back that value.
    found = decode_text(store.compare_set(key, _NOTHING, _NOTHING))
    return found if found != _NOTHING else None


def read_numbers(store: Store, key: str) -> list[int]:
    """Return the list at a key, to which ranks append numbers, each with a comma; empty where there is none now."""
    return decode(f"[{(read_at_once(store, key) or '')[:-1]}]", list[int], f"the list {key!r}")


def claim(store: Store, key: str, mine: str | bytes, read: Callable[[bytes], Kind]) -> Kind:
    """Set a key unless there is a message already, and return the one that is there."""
    return read(store.compare_set(key, "", mine))  # type: ignore[arg-type]  # torch's stubs lack bytes


def is_first(store: Store, key: str, rank: int) -> bool:
    """Return whether a key names this rank, which it does unless another one was first."""
    return decode_text(store.compare_set(key, "", str(rank))) == str(rank)


def decode_at_once(store: Store, key: str, kind: type[Kind], what: str) -> Kind | None:
    """Return the message at a key; None where there is none now."""
    found = read_at_once(store, key)
    return decode(found, kind, what) if found is not None else None


def count(store: Store, key: str, amount: int = 0) -> int:
    try:
        return store.add(key, amount)
    except (ValueError, IndexError) as error:  # what stores say of a text, and of a number of more than 64 bits
        raise no_counter(key, error) from None


def no_counter(key: str, error: Exception) -> MalformedMessageError:
    return MalformedMessageError(f"the counter {key!r}", f"it is not a number ({error})")


@functools.cache
def _reader(kind: Any) -> _Reader:
    """Return what checks a value of JSON, and makes of it what is wanted; it raises ValueError."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is object:
        return lambda value: value
    if origin is None:
        return _fields_of(kind) if dataclasses.is_dataclass(kind) else _scalar(kind)
    if origin is dict:
        read_name, read = map(_reader, parts)
        return lambda value: {read_name(name): read(one) for name, one in _of_type(dict, value).items()}
    if origin is tuple and Ellipsis not in parts:
        return _row_of([*map(_reader, parts)])
    read = _reader(parts[0])
    if origin is Annotated:
        make: _Reader = parts[1]
        return lambda value: make(read(value))
    if origin is list:
        return lambda value: [*map(read, _of_type(list, value))]
    if origin is tuple:
        return lambda value: tuple(map(read, _of_type(list, value)))
    return lambda value: None if value is None else read(value)  # ``kind | None``


def _scalar(kind: Any) -> _Reader:
    wanted = {int: (int,), float: (int, float)}.get(kind, (kind,))  # JSON may leave out the point of a number

    def read(value: Any) -> Any:
        if type(value) not in wanted:  # not isinstance: True is not a number
            raise _misfit(kind.__name__, value)
        return value

    return read


def _row_of(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if len(_of_type(list, value)) != len(readers):
            raise _misfit(f"{len(readers)} values", value)
        return tuple(reader(one) for reader, one in zip(readers, value, strict=True))

    return read


def _fields_of(kind: Any) -> _Reader:
    hints: Mapping[str, Any] = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}

    def read(value: Any) -> Any:
        found = {}
        for name, reader in readers.items():
            if name in _of_type(dict, value):
                try:
                    found[name] = reader(value[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
            elif name in needed:
                raise ValueError(f"it lacks {name}")
        return kind(**found)

    return read


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _misfit(kind.__name__, value)
    return value


def _misfit(wanted: str, value: object) -> ValueError:
    return ValueError(f"it must be {wanted}, got {reprlib.repr(value)}")
