"""Functions and blocks that run on some ranks only, or there first; and functions that use all devices.

While some ranks run, the others wait: over the store, so nothing times out and the process group stays usable. What
is raised on one rank is raised on all.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

import torch

from distman._base.log import logger
from distman._coordination.sections import ExclusiveSection, ExclusiveSections
from distman._coordination.tracking import Restricted, call_site, check_all_run_here, depth, is_outside, restriction
from distman._coordination.wait_scope import WaitScope
from distman._job.groups.registry import Group
from distman.collectives import GroupLike, broadcast_data
from distman.errors import JobFailed
from distman.manager import DistributedManager

__all__ = [
    "local_rank_zero_first",
    "on_local_rank",
    "on_rank",
    "parallel_on_all_devices",
    "rank_zero_first",
    "rank_zero_only",
]

P = ParamSpec("P")
R = TypeVar("R")
# Of the functions that contextlib's decorators return, whatever they decorate.
_CODES_OF_CONTEXT_MANAGERS = [contextmanager(iter).__code__, asynccontextmanager(aiter).__code__]
_MAX_SHOWN = 8  # ranks listed in a message; more of them would hide the rest of the sentence


@overload
def on_rank(
    rank: int | Iterable[int], barrier: bool = False, *, broadcast: Literal[True], group: GroupLike = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@overload
def on_rank(
    rank: int | Iterable[int], barrier: bool = False, *, broadcast: bool = False, group: GroupLike = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...


def on_rank(
    rank: int | Iterable[int], barrier: bool = False, *, broadcast: bool = False, group: GroupLike = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Let a function run on one rank, or on some; the others wait until it is done there.

    Local; the decorated function is collective over the group, and may take as long as it takes. Within another
    function or block of this module, where not all ranks of the group run, it waits for nobody; nor in a process forked
    from the rank, such as a worker of a data loader.

    A rank that the group does not have is left out, so that a script also runs on fewer ranks. Where it has none of
    them, the function runs nowhere and a warning says so.

    Args:
        rank: The rank, or several of them, in the group.
        barrier: Let the ranks that run wait for the others as well.
        broadcast: Return the result on all ranks: that of the lowest rank, if several run.
        group: A process group, the name of one, or None for the world.

    Returns:
        A decorator for functions, methods, class methods and static methods. The decorated function returns the
        result where it ran, and None elsewhere, unless it is broadcast. It raises

        * What the function raised, on the rank where it did.
        * :class:`~distman.RankFailedError` on the other ranks of the group, then: with the type, text and
          traceback of that error.
        * :class:`~distman.DistmanError`, if it comes to a collective or barrier for which ranks are needed that wait:
          of this package or of torch, in a backward pass or a thread that it started too.

    Raises:
        TypeError: The rank is no integer; or what is decorated is no function that runs when it is called, but a
            class, a property, a generator, a coroutine or a context manager.
        ValueError: There is no rank in the list, or a negative one.

    Example on two ranks:
        >>> @on_rank(1, broadcast=True)
        ... def count_files():
        ...     return 40 + rank
        >>> count_files()  # counted once, known to both
        41
    """
    ranks = _whole_ranks(rank, "on_rank")

    def choose(members: Group | None) -> tuple[Sequence[int], str]:
        size = members.size if members is not None else 1
        return [rank for rank in ranks if rank < size], f"of {size} {'rank' if size == 1 else 'ranks'}"

    def share(result: Any, present: Sequence[int]) -> Any:
        return broadcast_data(result, present[0], group)

    where = f"on_rank({_shown(ranks)})"
    return _decorator(where, group, choose, barrier=barrier, share=share if broadcast else None)


def rank_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Let a function run on rank 0 only: the same as ``on_rank(0)``.

    Local; the decorated function is collective.

    Args:
        func: The function.

    Returns:
        The decorated function; what it returns and raises, :func:`on_rank` says.

    Raises:
        TypeError: As of :func:`on_rank`.

    Example on two ranks:
        >>> @rank_zero_only
        ... def log(text):
        ...     return f"rank {rank}: {text}"
        >>> all_gather_objects(log("epoch 3"))
        ['rank 0: epoch 3', None]
    """
    return on_rank(0)(func)


def on_local_rank(
    local_rank: int, barrier: bool = False, *, broadcast: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Let a function run on one rank of each host; all others wait until it is done everywhere.

    Local; the decorated function is collective. See :func:`on_rank`.

    Args:
        local_rank: Index of the rank on its host; hosts with fewer ranks are left out.
        barrier: Let the ranks that run wait for the others as well.
        broadcast: Return the result of each host on all of its ranks; None where it ran on none of them.

    Returns:
        A decorator; what the decorated function returns and raises, :func:`on_rank` says.

    Raises:
        TypeError: As of :func:`on_rank`.
        ValueError: The rank is negative, or there are several.

    Example on two ranks:
        >>> @on_local_rank(0, broadcast=True)
        ... def unpack():  # once on each host
        ...     return "/tmp/data"
        >>> unpack()
        '/tmp/data'
    """
    ranks = _whole_ranks(local_rank, "on_local_rank")
    if len(ranks) > 1:
        raise ValueError(f"local_rank must be one rank of each host, got {local_rank!r}. Pass one integer.")

    def choose(members: Group | None) -> tuple[Sequence[int], str]:
        alone = [rank for rank in ranks if rank == 0]
        return alone if members is None else DistributedManager().ranks_with_local_rank(ranks[0]), "on any host"

    def share(result: Any, present: Sequence[int]) -> Any:
        node = DistributedManager().resolve_group("node")
        src = next((index for index, rank in enumerate(node.ranks) if rank in present), None)
        return broadcast_data(result, src, "node") if src is not None else None

    where = f"on_local_rank({_shown(ranks)})"
    return _decorator(where, None, choose, barrier=barrier, share=share if broadcast else None)


def rank_zero_first() -> AbstractContextManager[None]:
    """Return a context in which rank 0 runs first; the others wait at its start until rank 0 has left it.

    Local; the ``with`` block is collective. If it raises on rank 0, the others raise ``RankFailedError`` instead of
    running it. Collectives within it raise ``DistmanError``: the ranks do not run there together.

    Example on two ranks:
        >>> with rank_zero_first():  # rank 0 downloads, rank 1 finds the file there
        ...     model = torch.nn.Linear(2, 1)
    """
    members = _members(None)
    if members is None or members.sections is None:
        return nullcontext()
    return _first(members.sections, 0, "rank_zero_first", f"rank_zero_first at {call_site()}")


def local_rank_zero_first() -> AbstractContextManager[None]:
    """Return a context in which one rank of each host runs first: the one with local rank 0.

    Local; the ``with`` block is collective over the ranks of each host. See :func:`rank_zero_first`.

    Example on two ranks:
        >>> with local_rank_zero_first():  # one rank of each host unpacks to its disk, the others find the files
        ...     data = torch.arange(3)
    """
    sections = DistributedManager().node_sections if _members(None) is not None else None
    if sections is None:
        return nullcontext()
    local_ranks = [DistributedManager().roll_call[rank].local_rank for rank in sections.store_group.ranks]
    first = local_ranks.index(min(local_ranks))
    return _first(sections, first, "local_rank_zero_first", f"local_rank_zero_first at {call_site()}")


def parallel_on_all_devices(func: Callable[P, R]) -> Callable[P, R]:
    """Let a function run on all GPUs that this process sees, each with its part of the batch.

    Local. :class:`torch.nn.DataParallel` splits tensor arguments along dim 0, runs the function in a thread for each
    GPU, and gathers the results on the first one. With one GPU or none, the function runs as it is.

    Args:
        func: A function of tensors, or a module. It must find its device from its arguments; a module is replicated,
            the modules that a function refers to are not.

    Returns:
        A function of the same arguments.

    Example:
        >>> @parallel_on_all_devices
        ... def norms(batch):
        ...     return batch.norm(dim=1)
        >>> norms(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        tensor([ 5., 10.])
    """
    module = func if isinstance(func, torch.nn.Module) else torch.nn.Module()
    if module is not func:
        module.forward = func

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        num_devices = torch.cuda.device_count()
        if num_devices < 2:
            return func(*args, **kwargs)
        result: R = torch.nn.DataParallel(module, device_ids=list(range(num_devices)))(*args, **kwargs)
        return result

    return call


def _on_all_ranks(func: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function on every rank, and return what it returned here if it succeeded on all; else raise on all."""
    members = _members(None)
    return cast("R", on_rank(range(members.size if members is not None else 1))(func)(*args, **kwargs))


def _run_on(
    ranks: Sequence[int],
    run: Callable[[], R],
    what: str,
    members: Group | None,
    *,
    barrier: bool = False,
    share: Callable[[R | None, Sequence[int]], R | None] | None = None,
) -> R | None:
    """Run a function on some ranks of a group, and make the outcome that of all; ``share`` hands out the result."""
    if members is None:
        with Restricted(what, frozenset([0])):
            return run()
    is_active = members.rank in ranks
    if is_outside():
        return run() if is_active else None
    runners = frozenset(members.ranks[rank] for rank in ranks)
    region = restriction()
    if region is not None and not region.ranks.issuperset(members.ranks):
        if (barrier or share is not None) and not runners.issuperset(region.ranks):
            with WaitScope(what):
                check_all_run_here(members.ranks)
        return run() if is_active else None
    if members.sections is None:
        with Restricted(what, frozenset(members.ranks)):
            return run()
    section = members.sections.begin(what, range(members.size) if barrier else ranks, depth=depth())
    result = None
    if is_active:
        with _told_by(section), Restricted(what, runners):
            result = run()
    with WaitScope(what):
        is_over = section.succeed() if is_active or barrier else False
        if not is_over:
            section.wait()
    return share(result, ranks) if share is not None else result


@contextmanager
def _told_by(section: ExclusiveSection) -> Iterator[None]:
    """Tell the ranks that wait for a section of an error in it; of the job's failure they hear anyway."""
    try:
        yield
    except JobFailed:
        raise
    except BaseException as error:
        section.fail(error)
        raise


@contextmanager
def _first(sections: ExclusiveSections, first: int, what: str, place: str) -> Iterator[None]:
    """Let one rank of a store group, given by its index in the group, run through a block before the others."""
    store_group = sections.store_group
    region = restriction()
    is_joint = not is_outside() and (region is None or region.ranks.issuperset(store_group.ranks))
    section = sections.begin(what, [first], depth=depth()) if is_joint else None
    is_first = store_group.rank == first
    if section is not None and not is_first:
        with WaitScope(what):
            section.wait()
    telling = _told_by(section) if section is not None and is_first else nullcontext()
    with telling, Restricted(place, frozenset([store_group.ranks[store_group.rank]])):
        yield
    if section is not None and is_first:
        section.succeed()


def _members(group: GroupLike) -> Group | None:
    """Return the group; None in a process that is alone and has not initialized the manager."""
    manager = DistributedManager.find()
    return manager.resolve_group(group) if manager is not None else None


def _decorator(
    where: str,
    group: GroupLike,
    choose: Callable[[Group | None], tuple[Sequence[int], str]],  # returns who runs, and among whom, in words
    *,
    barrier: bool,
    share: Callable[[Any, Sequence[int]], Any] | None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator for functions, also within ``classmethod`` and ``staticmethod``."""
    warned: set[str] = set()  # of what runs nowhere

    def decorate(func: Any) -> Any:
        if isinstance(func, classmethod | staticmethod):
            return type(func)(decorate(func.__func__))
        what = f"{where} of {_name_of(func)}"

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            members = _members(group)
            present, among = choose(members)
            if present:
                run = functools.partial(func, *args, **kwargs)
                return _run_on(present, run, what, members, barrier=barrier, share=share)
            if what not in warned and (members is None or members.rank == 0):
                warned.add(what)
                logger.warning(
                    "%s runs nowhere and returns None: there is no such rank %s. Name another one.", what, among
                )
            return None

        return call

    return decorate


def _whole_ranks(rank: object, decorator: str) -> tuple[int, ...]:
    if callable(rank):
        raise TypeError(
            f"rank must be an integer or a list of integers, got {rank!r}. Write @{decorator}(0), with parentheses."
        )
    try:
        given: list[Any] = list(cast(Iterable[object], rank))
    except TypeError:  # one number, of whatever library
        given = [rank]
    if any(isinstance(one, bool) or not hasattr(one, "__index__") for one in given):
        raise TypeError(f"rank must be an integer or a list of integers, got {rank!r}. Pass ranks.")
    ranks = sorted({operator.index(one) for one in given})
    if not ranks or ranks[0] < 0:
        raise ValueError(f"rank must name at least one rank, none below 0, got {rank!r}. Pass the ranks to run on.")
    return tuple(ranks)


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) > _MAX_SHOWN:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return str(ranks[0] if len(ranks) == 1 else list(ranks))


def _name_of(func: object) -> str:
    if not callable(func) or isinstance(func, type):
        raise TypeError(
            f"what runs on some ranks must be a function, got {func!r}. Decorate a function: below @property and its "
            "like, or one that makes an object of the class."
        )
    bare = func.func if isinstance(func, functools.partial) else func
    if _is_lazy(bare) or _is_lazy(type(bare).__call__):
        raise TypeError(
            f"the function must run when it is called, got the generator, coroutine or context manager {func!r}. "
            "Decorate the function that iterates over it, awaits it or enters it."
        )
    return f"{getattr(bare, '__qualname__', type(bare).__name__)}()"


def _is_lazy(func: Callable[..., object]) -> bool:
    """Return whether a function has done nothing yet when it returns."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(func) for is_kind in kinds) or getattr(func, "__code__", None) in _CODES_OF_CONTEXT_MANAGERS
