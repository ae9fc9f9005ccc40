"""Pickles of data, read without making anything but plain values: no class is looked up, and nothing is called."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple


class Name:
    """What a pickle calls by module and name; only the two texts."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """What a pickle says to make by a name, and what is to be set in it."""

    __slots__ = ("args", "of", "state")

    def __init__(self, of: Name, args: tuple[Any, ...]) -> None:
        self.of, self.args, self.state = of, args, None


class Read(NamedTuple):
    """What a pickle held, and at which byte it ended."""

    value: Any  # None, bools, numbers, strings, tuples, lists and dicts of these, Name and Made
    end: int


def read_inert(data: bytes) -> Read:
    """Return what a pickle of data classes says; more may follow it. Whatever else is in it is a ValueError."""
    walk, end = _Walk(), 0
    try:
        for opcode, argument, place in pickletools.genops(data):
            step = _STEP_OF.get(opcode.code)
            if step is None:
                raise ValueError(f"a pickle of data does not need {opcode.name}")
            step(walk, argument)
            end = place or 0
        return Read(walk.stack.pop(), end + 1)
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

    __slots__ = ("before", "memo", "stack")

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.before: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def pop(self, kind: type) -> Any:
        return _checked(self.stack.pop(), kind)

    def top(self, kind: type) -> Any:
        return _checked(self.stack[-1], kind)

    def pop_to_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.before.pop()
        return values


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"the pickle uses a {type(value).__name__} as a {kind.__name__}")
    return value


def _push_argument(walk: _Walk, argument: Any) -> None:
    walk.stack.append(argument)


def _constant(value: Any) -> Callable[[_Walk, Any], None]:
    return lambda walk, _: walk.stack.append(value)


def _mark(walk: _Walk, _: Any) -> None:
    walk.before.append(walk.stack)
    walk.stack = []


def _tuple_of(length: int) -> Callable[[_Walk, Any], None]:
    def step(walk: _Walk, _: Any) -> None:
        values = [walk.stack.pop() for _ in range(length)]
        walk.stack.append(tuple(reversed(values)))

    return step


def _tuple(walk: _Walk, _: Any) -> None:
    values = walk.pop_to_mark()
    walk.stack.append(tuple(values))


def _append(walk: _Walk, _: Any) -> None:
    value = walk.stack.pop()
    walk.top(list).append(value)


def _appends(walk: _Walk, _: Any) -> None:
    values = walk.pop_to_mark()
    walk.top(list).extend(values)


def _set_item(walk: _Walk, _: Any) -> None:
    value, key = walk.stack.pop(), walk.stack.pop()
    walk.top(dict)[_key(key)] = value


def _set_items(walk: _Walk, _: Any) -> None:
    items = walk.pop_to_mark()
    walk.top(dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))


def _key(key: Any) -> Any:
    """Return a key; to hash a tuple of tuples of tuples may end the process."""
    if type(key) not in (str, int, Made):
        raise ValueError(f"the pickle has a {type(key).__name__} for a key")
    return key


def _name(walk: _Walk, argument: str) -> None:
    module, _, name = argument.partition(" ")
    walk.stack.append(Name(module, name))


def _name_from_stack(walk: _Walk, _: Any) -> None:
    name = walk.pop(str)
    walk.stack.append(Name(walk.pop(str), name))


def _make(walk: _Walk, _: Any) -> None:
    args = walk.pop(tuple)
    walk.stack.append(Made(walk.pop(Name), args))


def _build(walk: _Walk, _: Any) -> None:
    state = walk.stack.pop()
    walk.top(Made).state = state


def _get(walk: _Walk, number: int) -> None:
    if number not in walk.memo:
        raise ValueError(f"the pickle uses number {number} of its memo before it is there")
    walk.stack.append(walk.memo[number])


def _put(walk: _Walk, number: int) -> None:
    walk.memo[number] = walk.stack[-1]


def _memoize(walk: _Walk, _: Any) -> None:
    walk.memo[len(walk.memo)] = walk.stack[-1]


def _nothing(_walk: _Walk, _: Any) -> None:
    """Leave all as it is."""


_STEPS: dict[bytes, Callable[[_Walk, Any], None]] = {
    **dict.fromkeys((pickle.PROTO, pickle.FRAME, pickle.STOP), _nothing),
    **dict.fromkeys((pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT), _push_argument),
    **dict.fromkeys((pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8), _push_argument),
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(value=True),
    pickle.NEWFALSE: _constant(value=False),
    pickle.MARK: _mark,
    pickle.EMPTY_TUPLE: _constant(()),
    pickle.TUPLE1: _tuple_of(1),
    pickle.TUPLE2: _tuple_of(2),
    pickle.TUPLE3: _tuple_of(3),
    pickle.TUPLE: _tuple,
    pickle.EMPTY_LIST: lambda walk, _: walk.stack.append([]),
    pickle.APPEND: _append,
    pickle.APPENDS: _appends,
    pickle.EMPTY_DICT: lambda walk, _: walk.stack.append({}),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _set_items,
    pickle.GLOBAL: _name,
    pickle.STACK_GLOBAL: _name_from_stack,
    pickle.REDUCE: _make,
    pickle.NEWOBJ: _make,
    pickle.BUILD: _build,
    **dict.fromkeys((pickle.BINGET, pickle.LONG_BINGET), _get),
    **dict.fromkeys((pickle.BINPUT, pickle.LONG_BINPUT), _put),
    pickle.MEMOIZE: _memoize,
}
"""What each opcode does that a pickle of data needs."""
_STEP_OF = {code.decode("latin-1"): step for code, step in _STEPS.items()}
