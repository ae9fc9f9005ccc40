"""Pickles of data, read without making anything but plain values: no class is looked up, and nothing is called."""

from __future__ import annotations

import dataclasses
import pickle
import pickletools
from collections.abc import Iterator
from typing import IO, Any


@dataclasses.dataclass(eq=False, slots=True)
class Name:
    """What a pickle calls by module and name; only the two texts."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False, slots=True)
class Made:
    """What a pickle says to make by a name, and what is to be set in it."""

    of: Name
    args: tuple[Any, ...]
    state: Any = None


def read_inert(data: bytes) -> tuple[Any, int]:
    """Return what a pickle of data classes says, and where it ends. Whatever else is in it is a ValueError.

    The value consists of None, bools, numbers, strings, tuples, lists and dicts of these, Name and Made.
    """
    walk, end = _Walk(), 0
    try:
        for opcode, argument, place in pickletools.genops(data):
            walk.step(opcode, argument)
            end = place or 0
        return walk.stack.pop(), end + 1
    except IndexError:
        raise ValueError("the pickle takes more from its stack than is there") from None


def names_in(file: IO[bytes], num_pickles: int = 1) -> Iterator[str]:
    """Return the names in pickles that follow each other, whatever else they hold; nothing in them is run.

    They are of protocol 2, which spells out each name. The file is read to their end.
    """
    for _ in range(num_pickles):
        start = file.tell()
        if not file.read(1):
            return
        file.seek(start)
        for opcode, argument, _place in pickletools.genops(file):
            if opcode.code == pickle.GLOBAL.decode():
                yield str(argument).replace(" ", ".")


class _Walk:
    """The stack of a pickle since its last mark, the stacks before, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._before: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:  # the most frequent opcodes first
        """Do what an opcode says that a pickle of data needs; any other one is a ValueError."""
        push, pop = self.stack.append, self.stack.pop
        match code := opcode.code.encode("latin-1"):
            case pickle.BININT1 | pickle.BININT2 | pickle.BININT | pickle.LONG1 | pickle.BINFLOAT:
                push(argument)
            case pickle.SHORT_BINUNICODE | pickle.BINUNICODE | pickle.BINUNICODE8:
                push(argument)
            case pickle.BINGET | pickle.LONG_BINGET:
                if argument not in self._memo:
                    raise ValueError(f"the pickle uses number {argument} of its memo before it is there")
                push(self._memo[argument])
            case pickle.MEMOIZE:
                self._memo[len(self._memo)] = self.stack[-1]
            case pickle.BINPUT | pickle.LONG_BINPUT:
                self._memo[argument] = self.stack[-1]
            case pickle.MARK:
                self._before.append(self.stack)
                self.stack = []
            case pickle.TUPLE1 | pickle.TUPLE2 | pickle.TUPLE3:
                values = [pop() for _ in range(int(opcode.name[-1]))]
                push(tuple(reversed(values)))
            case pickle.TUPLE:
                values = self._pop_to_mark()
                self.stack.append(tuple(values))
            case pickle.REDUCE | pickle.NEWOBJ:
                args = _checked(pop(), tuple)
                push(Made(_checked(pop(), Name), args))
            case pickle.BUILD:
                state = pop()
                self._top(Made).state = state
            case pickle.EMPTY_TUPLE | pickle.EMPTY_LIST | pickle.EMPTY_DICT:
                push({pickle.EMPTY_TUPLE: tuple, pickle.EMPTY_LIST: list, pickle.EMPTY_DICT: dict}[code]())
            case pickle.SETITEM:
                value, key = pop(), pop()
                self._top(dict)[_key(key)] = value
            case pickle.SETITEMS:
                items = self._pop_to_mark()
                self._top(dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))
            case pickle.APPEND:
                value = pop()
                self._top(list).append(value)
            case pickle.APPENDS:
                values = self._pop_to_mark()
                self._top(list).extend(values)
            case pickle.GLOBAL:
                module, _, name = argument.partition(" ")
                push(Name(module, name))
            case pickle.STACK_GLOBAL:
                name = _checked(pop(), str)
                push(Name(_checked(pop(), str), name))
            case pickle.NONE | pickle.NEWTRUE | pickle.NEWFALSE:
                push({pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False}[code])
            case pickle.PROTO | pickle.FRAME | pickle.STOP:
                pass
            case _:
                raise ValueError(f"a pickle of data does not need {opcode.name}")

    def _pop_to_mark(self) -> list[Any]:
        values, self.stack = self.stack, self._before.pop()
        return values

    def _top(self, kind: type) -> Any:
        return _checked(self.stack[-1], kind)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"the pickle uses a {type(value).__name__} as a {kind.__name__}")
    return value


def _key(key: Any) -> Any:
    """Return a key; to hash a tuple of tuples of tuples may end the process."""
    if type(key) not in (str, int, Made):
        raise ValueError(f"the pickle has a {type(key).__name__} for a key")
    return key
