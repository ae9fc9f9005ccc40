"""Who caught an error: found out from the frame it was caught in."""

# ruff: noqa: BLE001, E722, S110, SIM105, B012

import asyncio
import code
import contextlib
import sys
import typing
import weakref

import hypothesis
import pytest
from hypothesis import strategies as st

from distman import errors
from distman._coordination.failure.catching import Handler, errors_in, handler_of, is_program_running
from distman.errors import DistmanError, RankFailedError

from ..ranks import failure_on

CASES = {}
raised = []


def caught(by):
    """Make a case of a function: who catches the last error that it raises."""

    def add(function):
        CASES[function.__name__] = (function, by)
        return function

    return add


by_name, by_another = caught(Handler.NAMES_IT), caught(Handler.CATCHES_ALL)


def fail():
    raised.append(failure_on(1).to_error())
    raise raised[-1]


@contextlib.contextmanager
def nothing(*_):
    yield


class Refusing(type):
    """A class of classes of which nothing can be asked."""

    def refuse(cls, *_):
        raise TypeError(object.__repr__(cls))

    __instancecheck__ = __subclasscheck__ = __eq__ = __hash__ = __bool__ = __iter__ = __getattr__ = __call__ = refuse
    __class__ = property(refuse)


class RefusingTuple(tuple):
    __slots__ = ()
    __iter__ = __len__ = __getitem__ = __class__ = property(Refusing.refuse)


class Service(typing.Protocol):
    name: str


RefusingError = Refusing("RefusingError", (Exception,), {})
Thing = Refusing("Thing", (), {})
STRANGE = {
    "a class": Thing,
    "an error": RefusingError,
    "an instance": object.__new__(Thing),
    "a proxy": object.__new__(type("Proxy", (), {"__class__": property(Refusing.refuse)})),
    "a proxy of nothing": weakref.proxy(set()),
    "a protocol": Service,
    "a protocol that can be asked": typing.runtime_checkable(Service),
    "an abstract class": typing.SupportsInt,
    "a generic class": list[int],
    "a generic tuple": tuple[RankFailedError, ...],
    "a union": typing.Optional[RankFailedError],  # noqa: UP045 - unlike that with |, no type on any Python
    "a variable of types": typing.TypeVar("T"),
    "anything": typing.Any,
    "a tuple": RefusingTuple((Thing, list[int])),
}
"""What a program may have in the head of a block, and what is no error or raises when it is asked."""


@by_name
def its_class():
    try:
        fail()
    except RankFailedError:
        pass


@by_name
def a_tuple_over_a_module():
    try:
        fail()
    except (ValueError, errors.RankFailedError) as error:
        print(error)  # noqa: T201


@by_name
def the_second_of_two_clauses():
    try:
        fail()
    except ValueError:
        pass
    except DistmanError:
        pass


@by_another
def a_wider_clause_before():
    try:
        fail()
    except RuntimeError:
        pass
    except DistmanError:
        pass


@by_another
def everything():
    try:
        fail()
    except:
        pass


@by_another
def finally_and_return():
    try:
        fail()
    finally:
        return


@by_another
def finally_and_continue():
    for _ in range(2):
        try:
            fail()
        finally:
            continue


@by_another
def finally_and_perhaps_return_within_a_name():
    try:
        try:
            fail()
        finally:
            if raised:
                return
    except RankFailedError:
        pass


@by_name
def a_name_around_finally():
    try:
        try:
            fail()
        except ValueError:
            pass
        finally:
            raised.reverse()
            raised.reverse()
    except RankFailedError:
        pass


@by_name
def suppress_by_name():
    with contextlib.suppress(RankFailedError):
        fail()


@by_another
def suppress_everything_within_a_name():
    try:
        with contextlib.suppress(Exception):
            fail()
    except RankFailedError:
        pass


@by_name
def pytest_raises():
    with pytest.raises(RankFailedError):
        fail()


@by_name
def pytest_raises_with_what_is_computed():
    kind = ValueError
    with pytest.raises(RankFailedError, match=rf"{kind.__name__}: b" + "o" * 2):
        fail()


@by_name
def blocks_that_let_it_pass():
    try:
        with nothing(), contextlib.suppress(OSError), nothing() as _:
            fail()
    except RankFailedError:
        pass


@by_another
def a_stack_of_blocks():
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Exception))
        fail()


@by_another
def everything_around_a_name_that_raises_again():
    try:
        try:
            fail()
        except RankFailedError:
            raise
    except Exception:
        pass


@by_another
def everything_around_a_name_that_raises_it_by_its_variable():
    try:
        try:
            fail()
        except RankFailedError as error:
            raise error
    except Exception:
        pass


@by_name
def a_name_around_everything_that_raises_again():
    def step():
        try:
            fail()
        except BaseException:
            raise

    try:
        step()
    except RankFailedError:
        pass


@by_name
def the_variable_of_a_retry():
    wanted = (OSError, RankFailedError)

    def retry():
        try:
            fail()
        except wanted:
            pass

    retry()


@by_name
def an_attribute():
    class Retry:
        wanted = RankFailedError

        def run(self):
            try:
                fail()
            except self.wanted:
                pass

    Retry().run()


@by_another
def what_must_be_called_to_be_known():
    def wanted():
        return RankFailedError

    try:
        fail()
    except wanted():
        pass


@by_name
def a_context_manager_that_names_it():
    @contextlib.contextmanager
    def handling():
        try:
            yield
        except RankFailedError:
            pass

    with handling():
        fail()


@by_name
def strange_things_before_a_name():
    for strange in STRANGE.values():
        try:
            with nothing(strange, (strange, Service)):
                fail()
        except RefusingError:
            pass
        except RankFailedError:
            pass


@by_name
def an_attribute_of_a_strange_class():
    try:
        with nothing(Thing.__mro__, Thing.__name__):
            fail()
    except (RefusingError, RankFailedError):
        pass


@by_name
def a_tuple_of_a_strange_kind():
    wanted = RefusingTuple((RefusingError, RankFailedError))
    try:
        fail()
    except wanted:
        pass


@by_another
def a_body_with_variables_of_its_own():
    class Variables(dict):
        __contains__ = Refusing.refuse

    class Body(type):
        __prepare__ = staticmethod(lambda *_: Variables())

    class _Retry(metaclass=Body):
        try:
            fail()
        except RankFailedError:
            pass


@by_name
def a_loop_over_a_generator():
    def generate():
        try:
            yield 1
            fail()
        finally:
            raised.reverse()
            raised.reverse()

    try:
        for _ in generate():
            pass
    except RankFailedError:
        return


@by_name
def a_task_that_is_awaited():
    async def work():
        fail()

    async def main():
        try:
            await asyncio.create_task(work())
        except RankFailedError:
            pass

    asyncio.run(main())


@by_another
def tasks_that_are_gathered():
    async def work():
        fail()

    async def main():
        await asyncio.gather(work(), return_exceptions=True)

    asyncio.run(main())


@by_another
def c_within_a_name():
    thing = code.InteractiveInterpreter()
    _reference = weakref.ref(thing, lambda _: fail())
    try:
        del thing
    except RankFailedError:
        pass


@caught(Handler.SHOWS_IT)
def a_console():
    code.InteractiveInterpreter({"fail": fail}).runsource("fail()")


class ConsoleOfPython313(code.InteractiveInterpreter):
    """One that leaves its own frame out of what it shows."""

    def showtraceback(self):
        error = sys.exc_info()[1]
        error.__traceback__ = raised[-1].__traceback__.tb_next


@caught(Handler.SHOWS_IT)
def a_console_that_leaves_itself_out():
    ConsoleOfPython313({"fail": fail}).runsource("fail()")


@by_another
def everything_in_such_a_console():
    source = "try:\n fail()\nexcept Exception as error:\n error.__traceback__ = error.__traceback__\n\n"
    code.InteractiveInterpreter({"fail": fail}).runsource(source, symbol="exec")


GROUPS = """
@by_name
def a_group_by_name():
    try:
        fail()
    except* RankFailedError:
        pass


@by_another
def a_group_of_everything():
    try:
        fail()
    except* Exception:
        pass
"""
exec(GROUPS)  # noqa: S102 - Python 3.10 has no such syntax


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_who_catches_it(case):
    raised.clear()
    function, by = CASES[case]
    function()
    assert handler_of(raised[-1]) is by


WRAPPINGS = {
    "name": "try:\n BODY\nexcept (OSError, RankFailedError):\n hits.append(True)",
    "name with a variable": "try:\n BODY\nexcept RankFailedError as error:\n hits.append(True)",
    "name, then again": "try:\n BODY\nexcept DistmanError:\n raise",
    "suppressed by name": "with contextlib.suppress(RankFailedError):\n BODY\n hits.append(None)\nhits.append(True)",
    "everything": "try:\n BODY\nexcept Exception:\n hits.append(False)",
    "everything, then again": "try:\n BODY\nexcept BaseException as error:\n raise error",
    "bare": "try:\n BODY\nexcept:\n hits.append(False)",
    "suppressed": "with contextlib.suppress(OSError, Exception):\n BODY\n hits.append(None)\nhits.append(False)",
    "another": "try:\n BODY\nexcept ValueError:\n hits.append(False)\nexcept OSError as error:\n pass\nelse:\n pass",
    "finally": "try:\n BODY\nfinally:\n len(hits)",
    "finally, then break": "for _ in range(1):\n try:\n  BODY\n finally:\n  hits.append(False)\n  break",
    "with": "with nothing() as it, nothing():\n BODY",
    "with what is strange": "with nothing(strange, (strange, 1)):\n BODY",
    "a strange class": "try:\n BODY\nexcept RefusingError:\n hits.append(False)",
    "function": "def step():\n BODY\nstep()",
    "generator": "def steps():\n yield 1\n BODY\nfor _ in steps():\n pass",
    "comprehension": "def step():\n BODY\n[step() for _ in range(2)]",
    "loop": "while True:\n BODY\n break",
}


def indented(text, depth):
    return text.replace("\n", "\n" + " " * depth)


def program(wrappings):
    """Return the source of a call that fails within handlers, the innermost first, and within one of everything."""
    source = "fail()"
    for wrapping in (*wrappings, "everything"):
        text = WRAPPINGS[wrapping]
        depth = len(text.partition("BODY")[0].rpartition("\n")[2])
        source = text.replace("BODY", indented(source, depth))
    return source


@hypothesis.given(
    st.lists(st.sampled_from(sorted(WRAPPINGS)), max_size=6), st.booleans(), st.sampled_from(sorted(STRANGE))
)
def test_who_catches_it_in_any_program(wrappings, is_function, strange):
    hits = []
    variables = {**globals(), "hits": hits, "strange": STRANGE[strange]}
    source = program(wrappings)
    exec(f"def main():\n {indented(source, 1)}\nmain()" if is_function else source, variables)  # noqa: S102
    by_name = next(hit for hit in hits if hit is not None)
    assert (handler_of(raised[-1]) is Handler.NAMES_IT) is by_name


def test_an_error_that_was_never_raised_was_caught_by_nobody():
    assert handler_of(failure_on(1).to_error()) is Handler.CATCHES_ALL


def test_the_errors_before_one_end_even_if_they_are_a_ring():
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert {*errors_in(first)} == {first, second}


class UnlikeError(Exception):
    """An error that is equal to none, is false, and lies about what it is and came from."""

    __eq__ = __bool__ = __len__ = Refusing.refuse
    __hash__ = None
    __class__ = __context__ = __cause__ = property(Refusing.refuse)


def test_errors_are_found_behind_one_of_which_nothing_can_be_asked():
    first = failure_on(1).to_error()
    strange = UnlikeError()
    try:
        try:
            raise first
        except RankFailedError:
            raise strange  # noqa: B904
    except Exception:
        assert [type(error) for error in errors_in(sys.exc_info()[1])] == [UnlikeError, RankFailedError]
    assert list(errors_in("what a program left in sys.last_value")) == []


def frame_within(*functions):
    """Return the innermost frame of nested calls of functions, given as module and name."""
    if not functions:
        return sys._getframe()
    (module, name), *inner = functions
    variables = {"__name__": module, "go_on": lambda: frame_within(*inner)}
    exec(f"def {name}(): return go_on()", variables)  # noqa: S102
    return variables[name]()


@pytest.mark.parametrize(
    ("functions", "is_running"),
    [
        ([("train", "main")], True),
        ([("ipykernel.kernelapp", "start"), ("tornado.ioloop", "start")], False),
        ([("ipykernel.kernelapp", "start"), ("IPython.core.interactiveshell", "run_code"), ("train", "f")], True),
        ([("IPython.terminal.interactiveshell", "mainloop")], False),
        ([(None, "main"), ([], "main")], True),
    ],
)
def test_a_kernel_that_waits_for_work_runs_no_program(functions, is_running):
    assert is_program_running(frame_within(*functions)) is is_running
