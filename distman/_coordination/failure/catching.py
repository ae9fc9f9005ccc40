"""Which handler of a program caught an error, and whether it names the error or catches whatever comes.

An error's traceback begins with the frame that caught it last. The code of that frame says which handlers lie around
the place, and its variables say what they catch; the source is not needed, which may have been edited meanwhile.
"""

from __future__ import annotations

import builtins
import dis
import enum
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import cast

from distman.errors import DistmanError

_RUNNERS = {
    "IPython": "run_code",
    "_pytest": "from_call",
    "code": "runcode",
    "distman.testing._tracebacks": "attempt",
    "doctest": "__run",
    "unittest": "testPartExecutor",
}
"""The function, by package, that runs a program and shows its errors, as the interpreter does with those that leave the
main program."""

_WAITING = {"IPython": "IPython", "ipykernel": "IPython", "_pytest": "_pytest"}
"""Packages that wait for programs to run in the main thread, and which of those above then runs them."""

_MAX_CHAINED = 100  # errors that are looked through for one: a chain may be a ring

_GET_CONTEXT = vars(BaseException)["__context__"].__get__  # a program's class may have properties of these names
_GET_CAUSE = vars(BaseException)["__cause__"].__get__

_NEUTRAL = frozenset({"BUILD_LIST", "CACHE", "COPY", "DUP_TOP", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "SWAP"})
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OPERATORS = ("BINARY_", "UNARY_", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "FORMAT_", "CONVERT_VALUE")
_IN_CALLS = ("LOAD_", "CALL", "PRECALL", "PUSH_NULL", "KW_NAMES", "BUILD_", "BEFORE_", *_OPERATORS, *_NEUTRAL)
_MATCHES = frozenset({"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
_ENTERS = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")
_LEAVES = ("JUMP_FORWARD", "JUMP_ABSOLUTE", "RETURN_VALUE", "RAISE_VARARGS", "RERAISE")


class Handler(enum.Enum):
    """Who caught an error."""

    NAMES_IT = enum.auto()
    """A handler that names the error's own class, or the base class of the package's errors."""

    SHOWS_IT = enum.auto()
    """What runs the program and reports its errors, such as a notebook's kernel or pytest."""

    CATCHES_ALL = enum.auto()
    """A handler of a wider class or of everything, or code that is not Python; also where that cannot be known."""


def handler_of(error: BaseException) -> Handler:
    """Return who caught an error last."""
    trace = error.__traceback__
    if trace is None:
        return Handler.CATCHES_ALL
    try:
        return _handler_at(trace, type(error))
    except Exception:  # noqa: BLE001 - what compiles and runs code by itself, or a program's own mapping of variables
        return Handler.CATCHES_ALL


def _handler_at(trace: TracebackType, kind: type[BaseException]) -> Handler:
    frame = trace.tb_frame
    if _is_runner(frame):
        return Handler.SHOWS_IT
    is_named = _Frame(frame).names(kind, trace.tb_lasti)
    if is_named is None and frame.f_back is not None and _is_runner(frame.f_back):
        return Handler.SHOWS_IT  # since Python 3.13 a console leaves itself out of the tracebacks
    return Handler.NAMES_IT if is_named else Handler.CATCHES_ALL


def _is_runner(frame: FrameType) -> bool:
    return _RUNNERS.get(_package(frame)) == frame.f_code.co_name


def is_program_running(frame: FrameType | None) -> bool:
    """Return whether a stack is that of a program, not of a kernel or a session of pytest that is between two."""
    packages, runners = set(), set()
    while frame is not None:
        package = _package(frame)
        packages.add(package)
        if _is_runner(frame):
            runners.add(package)
        frame = frame.f_back
    return all(runner in runners for package, runner in _WAITING.items() if package in packages)


def errors_in(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those during whose handling it was raised."""
    for _ in range(_MAX_CHAINED):
        if error is None or not issubclass(type(error), BaseException):
            return
        yield error
        context = _GET_CONTEXT(error)
        error = context if context is not None else _GET_CAUSE(error)


def error_in_hand(thread: int | None) -> BaseException | None:
    """Return the error that a thread is handling, the innermost one."""
    found = sys._current_exceptions().get(thread or 0)
    return found[1] if isinstance(found, tuple) else found


def _package(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    if type(name) is not str:
        return ""
    return name if name.startswith("distman.") else name.partition(".")[0]


class _Frame:
    """A frame that an error came to."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._instructions = list(dis.get_instructions(frame.f_code))
        self._index = {instruction.offset: index for index, instruction in enumerate(self._instructions)}
        self._handlers = _handlers(frame.f_code, self._instructions)

    def names(self, kind: type[BaseException], offset: int) -> bool | None:
        """Return whether the handler that stopped an error of this kind, raised at an offset, names it.

        None if no handler of this frame did.
        """
        is_named = None
        offset = max(self._index.keys() & range(offset + 1), default=0)  # it may point behind an instruction
        while (handler := self._handlers.get(offset)) is not None:
            verdict = self._judge(handler, kind)
            if verdict is not None:
                is_named, may_raise_again = verdict
                if not may_raise_again:
                    break
            offset = handler
        return is_named

    def _judge(self, handler: int, kind: type[BaseException]) -> tuple[bool, bool] | None:
        """Return whether a handler names the error, and whether it may raise it again; None if it lets it pass."""
        index = self._index[handler]
        if self._instructions[index].opname == "PUSH_EXC_INFO":
            index += 1
        elif _has_table(self._frame.f_code):
            return None  # the end of another handler
        operands: list[object] = []
        while True:
            instruction = self._instructions[index]
            name = instruction.opname
            if name in _MATCHES:
                index, end = self._clause(index)
                classes = _classes(operands[-1:], kind)
                if classes:
                    body = self._instructions[index : self._index[end]]
                    return _is_named(classes), any(part.opname == "RAISE_VARARGS" and not part.arg for part in body)
                index, operands = self._index[end], []
                continue
            if name == "POP_TOP" and not operands:
                return False, False  # `except:`, or a `finally` that does not go on with the error
            if name == "WITH_EXCEPT_START":
                classes = _classes(self._operands_of_with(handler), kind)
                return (_is_named(classes), False) if classes else None
            if not self._evaluate(instruction, operands):
                return (False, False) if self._may_swallow(index) else None
            index += 1

    def _clause(self, index: int) -> tuple[int, int]:
        """Return where the body of an ``except`` clause begins, as an index, and where it ends, as an offset."""
        while not _jumps(self._instructions[index]):
            index += 1
        return index + 1, int(self._instructions[index].argval)

    def _may_swallow(self, index: int) -> bool:
        """Return whether a ``finally`` has a way out, such as ``return``, on which the error is forgotten."""
        for instruction in itertools.islice(self._instructions, index, None):
            if instruction.opname in ("RERAISE", "PUSH_EXC_INFO", *_ENTERS):
                return False
            if instruction.opname == "POP_EXCEPT":
                return True
        return False

    def _operands_of_with(self, handler: int) -> list[object]:
        """Return what stands in the head of the ``with`` statement that a handler belongs to."""
        first = min(offset for offset, one in self._handlers.items() if one == handler)
        end = begin = self._index[first]
        while begin > 0 and self._instructions[begin - 1].opname.startswith((*_IN_CALLS, *_ENTERS)):
            begin -= 1
        operands: list[object] = []
        for instruction in self._instructions[begin:end]:
            self._evaluate(instruction, operands)
        return operands

    def _evaluate(self, instruction: dis.Instruction, operands: list[object]) -> bool:
        """Do what an instruction does to the operands, and return whether it is one that an expression is made of."""
        name, value = instruction.opname, instruction.argval
        if name in _NEUTRAL:
            return True
        if name.startswith(_VARIABLES):
            operands += map(self._value_of, value if isinstance(value, tuple) else (value,))
        elif name == "LOAD_CONST":
            operands.append(value)
        elif name.startswith(_ATTRIBUTES) and operands:
            operands.append(inspect.getattr_static(operands.pop(), str(value), None))
        elif name == "BUILD_TUPLE":
            number = int(value)
            operands[len(operands) - number :] = [tuple(operands[len(operands) - number :])]
        else:
            return False
        return True

    def _value_of(self, name: str) -> object:
        for variables in (self._frame.f_locals, self._frame.f_globals, vars(builtins)):
            if name in variables:
                return variables[name]
        return None


def _jumps(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


def _classes(operands: Sequence[object], kind: type[BaseException]) -> list[type[BaseException]]:
    """Return the classes among some values, and within tuples, by which an error of this kind is caught.

    The values are a program's: to compare them, or to ask what they are, might run its code. They are only looked for.
    """
    values = [part for value in operands for part in _parts(value)]
    return [one for one in kind.__mro__[:-1] if any(value is one for value in values)]


def _parts(value: object) -> Iterator[object]:
    return tuple.__iter__(cast("tuple[object, ...]", value)) if issubclass(type(value), tuple) else iter((value,))


def _is_named(classes: Sequence[type[BaseException]]) -> bool:
    return any(issubclass(one, DistmanError) for one in classes)


def _has_table(code: CodeType) -> bool:
    return hasattr(code, "co_exceptiontable")


def _handlers(code: CodeType, instructions: Sequence[dis.Instruction]) -> dict[int, int]:
    """Return, for the offset of each instruction, the offset of its handler, if it has one."""
    if not _has_table(code):
        return _handlers_of_blocks(instructions)
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed lacks it
    ranges = [(entry.start, entry.end, entry.target) for entry in entries]
    offsets = [instruction.offset for instruction in instructions]
    return {offset: target for start, end, target in ranges for offset in offsets if start <= offset < end}


def _handlers_of_blocks(instructions: Sequence[dis.Instruction]) -> dict[int, int]:
    """Return the same for Python 3.10, whose code enters and leaves blocks."""
    index = {instruction.offset: place for place, instruction in enumerate(instructions)}
    blocks: dict[int, tuple[int | None, ...]] = {}
    ways: list[tuple[int, tuple[int | None, ...]]] = [(0, ())]
    while ways:
        offset, stack = ways.pop()
        if offset in blocks:
            continue
        blocks[offset] = stack
        instruction = instructions[index[offset]]
        name, following = instruction.opname, stack
        if name in _ENTERS:
            ways.append((instruction.argval, (*stack, None)))  # None: a handler that runs
            following = (*stack, instruction.argval)
        elif name in ("POP_BLOCK", "POP_EXCEPT"):
            following = stack[:-1]
        elif _jumps(instruction):
            ways.append((instruction.argval, stack))
        if name not in _LEAVES and index[offset] + 1 < len(instructions):
            ways.append((instructions[index[offset] + 1].offset, following))
    around = {offset: [block for block in stack if block is not None] for offset, stack in blocks.items()}
    return {offset: stack[-1] for offset, stack in around.items() if stack}
