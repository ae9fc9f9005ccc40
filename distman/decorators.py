"""Functions and blocks that run on some ranks only, or there first; and functions that use all devices.

While some ranks run, the others wait: over the store, so nothing times out and the process group stays usable. What
is raised on one rank is raised on all.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from distman._coordination.failure.record import FailureRecord
from distman._coordination.sections import ExclusiveSection, ExclusiveSections
from distman._coordination.tracking import Restricted, call_site, check_all_run_here, depth, is_child, restriction
from distman._coordination.wait_scope import WaitScope
from distman._groups.registry import Group
from distman.collectives._objects import broadcast_data
from distman.collectives._validation import GroupLike
from distman.environments import is_env_distributed
from distman.errors import RankFailedError
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
_MAX_SHOWN = 8  # ranks listed in a message; more of them would hide the rest of the sentence


def on_rank(
    rank: int | Iterable[int], barrier: bool = False, *, broadcast: bool = False, group: GroupLike = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Let a function run on one rank, or on some; the others wait until it is done there.

    Local; the decorated function is collective over the group, and may take as long as it takes. Within another
    function or block of this module, where not all ranks of the group run, it waits for nobody; nor in a process forked
    from the rank, such as a worker of a data loader.

    Args:
        rank: The rank, or several of them, in the group.
        barrier: Let the ranks that run wait for the others as well.
        broadcast: Return the result on all ranks: that of the lowest rank, if several run.
        group: A process group, the name of one, or None for the world.

    Returns:
        A decorator. The decorated function returns the result where it ran, and None elsewhere, unless it is
        broadcast. It raises

        * :class:`~distman.RankFailedError` on every rank of the group, if it raised on one: with the type, text and
          traceback of that error, which is the cause on the rank where it was raised. There SystemExit and
          KeyboardInterrupt go on as they are, and so does the error of a result that cannot be pickled.
        * :class:`~distman.DistmanError`, if it comes to a collective or barrier for which ranks are needed that wait.
        * ValueError, if there is no such rank.

    Raises:
        TypeError: The rank is no integer, or the function a generator or coroutine.
        ValueError: There is no rank in the list.
    """
    ranks = _whole_ranks(rank)

    def decorate(func: Callable[P, R]) -> Callable[P, R | None]:
        name = _name_of(func)
        what = f"on_rank({_shown(ranks)}) of {name}"

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            members = _members(group)
            size = members.size if members is not None else 1
            if ranks[-1] >= size:
                raise ValueError(
                    f"rank must be below {size}, got {ranks[-1]} for {name}. Valid ranks are 0 to {size - 1}."
                )
            run = functools.partial(func, *args, **kwargs)
            return _run_on(ranks, run, what, members, barrier=barrier, broadcast=broadcast)

        return call

    return decorate


def rank_zero_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Let a function run on rank 0 only: the same as ``on_rank(0)``.

    Local; the decorated function is collective. See :func:`on_rank`.
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
        broadcast: Return the result of each host on all of its ranks.

    Returns:
        A decorator; what the decorated function returns and raises, :func:`on_rank` says. It raises ValueError if
        no host has such a rank, or one does not and its ranks want a result.

    Raises:
        TypeError: The rank is no integer, or the function a generator or coroutine.
        ValueError: It is negative.
    """
    (local_rank,) = _whole_ranks(operator.index(local_rank))

    def decorate(func: Callable[P, R]) -> Callable[P, R | None]:
        name = _name_of(func)
        what = f"on_local_rank({local_rank}) of {name}"

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            members = _members(None)
            run = functools.partial(func, *args, **kwargs)
            ranks, num_nodes = ([0] if local_rank == 0 else []), 1
            if members is not None:
                manager = DistributedManager()
                ranks, num_nodes = manager.ranks_with_local_rank(local_rank), manager.num_nodes
            if len(ranks) < (num_nodes if broadcast else 1):
                raise ValueError(
                    f"local rank must be one that {'each host' if broadcast else 'a host'} has, got {local_rank} for "
                    f"{name}. Choose one that exists, or start more ranks on each host."
                )
            result = _run_on(ranks, run, what, members, barrier=barrier)
            if not broadcast or members is None:
                return result
            node = DistributedManager().resolve_group("node")
            src = next(index for index, rank in enumerate(node.ranks) if rank in ranks)
            return broadcast_data(result, src, "node")

        return call

    return decorate


def rank_zero_first() -> AbstractContextManager[None]:
    """Return a context in which rank 0 runs first; the others wait at its start until rank 0 has left it.

    Local; the ``with`` block is collective. If it raises on rank 0, the others raise ``RankFailedError`` instead of
    running it. Collectives within it raise ``DistmanError``: the ranks do not run there together.
    """
    members = _members(None)
    if members is None or members.sections is None:
        return nullcontext()
    return _First(members.sections, 0, "rank_zero_first")


def local_rank_zero_first() -> AbstractContextManager[None]:
    """Return a context in which one rank of each host runs first: the one with local rank 0.

    Local; the ``with`` block is collective over the ranks of each host. See :func:`rank_zero_first`.
    """
    sections = DistributedManager().node_sections if _members(None) is not None else None
    if sections is None:
        return nullcontext()
    local_ranks = [DistributedManager().roll_call[rank].local_rank for rank in sections.store_group.ranks]
    return _First(sections, local_ranks.index(min(local_ranks)), "local_rank_zero_first")


def parallel_on_all_devices(func: Callable[P, R]) -> Callable[P, R]:
    """Let a function run on all GPUs that this process sees, each with its part of the batch.

    Local. ``torch.nn.DataParallel`` splits tensor arguments along dim 0, runs the function in a thread for each GPU,
    and gathers the results on the first one. With one GPU or none, the function runs as it is.

    Args:
        func: A function of tensors, or a module. It must find its device from its arguments; a module is replicated,
            the modules that a function refers to are not.
    """
    module = func if isinstance(func, torch.nn.Module) else _Forward(func)

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        num_devices = torch.cuda.device_count()
        if num_devices < 2:
            return func(*args, **kwargs)
        result: R = torch.nn.DataParallel(module, device_ids=list(range(num_devices)))(*args, **kwargs)
        return result

    return call


class _Forward(torch.nn.Module):
    """A function as a module, for DataParallel."""

    def __init__(self, func: Callable[P, R]) -> None:
        super().__init__()
        self.forward = func


def _run_on(
    ranks: Sequence[int],
    run: Callable[[], R],
    what: str,
    members: Group | None,
    *,
    barrier: bool = False,
    broadcast: bool = False,
) -> R | None:
    """Run a function on some ranks of a group, and make the outcome that of all."""
    if members is None:
        return _run_alone(run, what, 0)
    is_active = members.rank in ranks
    if is_child():
        return run() if is_active else None
    runners = frozenset(members.ranks[rank] for rank in ranks)
    region = restriction()
    if region is not None and not region.ranks.issuperset(members.ranks):
        if (barrier or broadcast) and not runners.issuperset(region.ranks):
            with WaitScope(what):
                check_all_run_here(members.ranks)
        return run() if is_active else None
    if members.sections is None:
        return _run_alone(run, what, members.ranks[members.rank])
    section = members.sections.begin(what, range(members.size) if barrier else ranks, depth=depth())
    result = _run_and_tell(section, run, Restricted(what, runners)) if is_active else None
    with WaitScope(what):
        is_over = section.succeed() if is_active or barrier else False
        if not is_over:
            section.wait()
    return broadcast_data(result, ranks[0], members.process_group) if broadcast else result


def _run_and_tell(section: ExclusiveSection, run: Callable[[], R], region: Restricted) -> R:
    """Run a function, and tell the others if it fails."""
    try:
        with region:
            return run()
    except RankFailedError as error:  # it says all there is to say, and is the one that the watcher raised, perhaps
        section.fail(error)
        raise
    except Exception as error:
        raise section.fail(error).to_error() from error
    except BaseException as error:  # SystemExit and KeyboardInterrupt end this process, and concern the others
        section.fail(error)
        raise


def _run_alone(run: Callable[[], R], what: str, rank: int) -> R:
    """Run a function on the only rank there is; an error looks as it would among others."""
    try:
        with Restricted(what, frozenset([rank])):
            return run()
    except Exception as error:
        raise FailureRecord.of(error, rank).to_error() from error


class _First(AbstractContextManager[None]):
    """One rank of a store group runs through a block before the others.

    Args:
        sections: The exclusive sections of these ranks.
        first: Who runs first, by index in the group.
        what: The block, for messages.
    """

    def __init__(self, sections: ExclusiveSections, first: int, what: str) -> None:
        self._sections = sections
        self._first = first
        self._what = what
        self._place = f"{what} at {call_site()}"

    def __enter__(self) -> None:
        store_group = self._sections.store_group
        region = restriction()
        is_joint = not is_child() and (region is None or region.ranks.issuperset(store_group.ranks))
        self._section = self._sections.begin(self._what, [self._first], depth=depth()) if is_joint else None
        if self._section is not None and store_group.rank != self._first:
            with WaitScope(self._what):
                self._section.wait()
        self._region = Restricted(self._place, frozenset([store_group.ranks[store_group.rank]]))
        self._region.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._region.__exit__(kind, error, trace)
        if self._section is None or self._sections.store_group.rank != self._first:
            return
        if error is None:
            self._section.succeed()
        else:
            self._section.fail(error)


def _members(group: GroupLike) -> Group | None:
    """Return the group; None in a process that is alone and has not initialized the manager."""
    if not DistributedManager.is_initialized() and not is_env_distributed(os.environ):
        return None
    return DistributedManager().resolve_group(group)


def _whole_ranks(rank: int | Iterable[int]) -> tuple[int, ...]:
    given = [rank] if isinstance(rank, int) or not isinstance(rank, Iterable) else list(rank)
    if any(isinstance(one, bool) for one in given):
        raise TypeError(f"rank must be an integer or a list of integers, got {rank!r}. Pass ranks.")
    ranks = sorted({operator.index(one) for one in given})
    if not ranks or ranks[0] < 0:
        raise ValueError(f"rank must name at least one rank, none below 0, got {rank!r}. Pass the ranks to run on.")
    return tuple(ranks)


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) > _MAX_SHOWN:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return str(ranks[0] if len(ranks) == 1 else list(ranks))


def _name_of(func: Callable[..., object]) -> str:
    if inspect.isgeneratorfunction(func) or inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
        raise TypeError(
            f"the function must run when it is called, got the generator or coroutine {func!r}. Decorate the "
            "function that iterates over it or awaits it."
        )
    return f"{getattr(func, '__qualname__', type(func).__name__)}()"
