"""What the ranks of a group do before, while and after each of them works on its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from distman._coordination.failure.record import FailureRecord
from distman._coordination.tracking import depth
from distman._coordination.wait_scope import WaitScope
from distman._groups.registry import Group
from distman.collectives._objects import all_gather_objects
from distman.collectives._validation import GroupLike, resolve_group
from distman.errors import PlanMismatchError

R = TypeVar("R")


def check_count(name: str, value: int) -> None:
    """Check that a number of things is a whole one, at least 1.

    Raises:
        ValueError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}. Correct it.")


def agree(operation: str, call: Mapping[str, object], seed: int | None, group: GroupLike) -> int:
    """Go on only if all ranks make the same call, and return the seed that is theirs together.

    Collective. Blocking.

    Args:
        operation: Name of the function, for messages.
        call: What must be equal on all ranks, by name.
        seed: The seed, equal on all ranks. None takes the number that rank 0 draws from torch's default generator;
            all ranks draw one, so that generators that were equal stay equal.
        group: A process group, the name of one, or None for the world.

    Raises:
        PlanMismatchError: On every rank: the calls differ.
    """
    drawn = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
    mine = {name: str(value) for name, value in {**call, "seed": seed}.items()}
    everyone = all_gather_objects((mine, drawn), group)
    differing = [name for name in mine if any(one.get(name) != mine[name] for one, _ in everyone)]
    if differing or any(one.keys() != mine.keys() for one, _ in everyone):
        rows = [
            f"  rank {rank}: {', '.join(f'{name} {value}' for name, value in one.items())}"
            for rank, (one, _) in zip(resolve_group(group).ranks, everyone, strict=True)
        ]
        raise PlanMismatchError(
            f"all ranks must call {operation} with the same arguments, got different {', '.join(differing)}. Each rank "
            "takes its share itself: pass everything on all ranks.\n" + "\n".join(rows)
        )
    return everyone[0][1]


def run_jointly(run: Callable[[], R], what: str, group: Group) -> R:
    """Run a function on all ranks, and make an error on one of them that of all.

    Collective. Blocking, for as long as it takes the slowest: over the store, so that nothing times out.

    Args:
        run: This rank's work. It may come to collectives over other groups.
        what: What is done, for messages.
        group: The ranks.

    Raises:
        RankFailedError: On every rank: it raised on one. The error is the cause on the rank where it was raised.
    """
    turn = group.sections.begin(what, range(group.size), depth=depth()) if group.sections is not None else None
    try:
        result = run()
    except BaseException as error:
        notice = turn.fail(error) if turn is not None else FailureRecord.of(error, group.ranks[group.rank])
        if not isinstance(error, Exception):  # SystemExit and KeyboardInterrupt end this process
            raise
        raise notice.to_error() from error
    with WaitScope(what):
        if turn is not None and not turn.succeed():
            turn.wait()
    return result


def check_finite(name: str, values: torch.Tensor, group: Group) -> None:
    """Check that all of a rank's results are numbers.

    Args:
        name: What they are, for messages.
        values: The results, shape ``(batch, *)``.
        group: The ranks, of which this is one.

    Raises:
        FloatingPointError: Some are infinite or NaN.
    """
    bad = int((~values.isfinite()).reshape(len(values), -1).any(dim=1).sum()) if values.numel() else 0
    if bad:
        raise FloatingPointError(
            f"{name} must be finite, got {bad} of {len(values)} on rank {group.ranks[group.rank]} that are not. Look "
            "at the scores there, or take smaller steps."
        )
