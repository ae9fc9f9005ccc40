"""Checks and error handling when each rank of a group works on its share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from distman._coordination.tracking import depth
from distman._coordination.wait_scope import WaitScope
from distman._job.groups.registry import Group
from distman.collectives import GroupLike
from distman.collectives._objects import all_gather_objects
from distman.collectives._validation import resolve_group
from distman.errors import JobFailed, PlanMismatchError

R = TypeVar("R")


def check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}. Pass such a number.")


def check_condition(condition: torch.Tensor | None, num: int) -> None:
    if condition is not None and (not condition.ndim or len(condition) != num):
        raise ValueError(
            f"condition must have one row for each of {num} samples, got {tuple(condition.shape)}. Pass those of all "
            "ranks."
        )


def described(values: torch.Tensor | None) -> str:
    """Return what tells tensors apart, also by what they hold."""
    if values is None:
        return "none"
    content = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{values.dtype} of shape {tuple(values.shape)} with the digest {digest}"


def agree(operation: str, call: Mapping[str, object], seed: int | None, group: GroupLike) -> int:
    """Check that all ranks make the same call, and return their common seed. Collective.

    None is a number that rank 0 draws from torch's default generator; all ranks draw one, so that generators in equal
    states stay equal.
    """
    drawn = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed  # the result has to fit an int64
    mine = {name: str(value) for name, value in {**call, "seed": seed}.items()}
    everyone = all_gather_objects((mine, drawn), group)
    differing = [name for name in mine if any(one.get(name) != mine[name] for one, _ in everyone)]
    if differing or any(one.keys() != mine.keys() for one, _ in everyone):
        rows = [
            f"  rank {rank}: {', '.join(f'{name} {value}' for name, value in one.items())}"
            for rank, (one, _) in zip(resolve_group(group).ranks, everyone, strict=True)
        ]
        raise PlanMismatchError(
            f"all ranks must call {operation} with the same arguments, got different {', '.join(differing)}. Pass "
            "everything on all ranks: each takes its share itself.\n" + "\n".join(rows)
        )
    return everyone[0][1]


def run_jointly(run: Callable[[], R], what: str, group: Group) -> R:
    """Run a function on all ranks, and raise an error of one of them on all. Collective.

    The ranks wait for the slowest one over the store, so no collective times out.
    """
    section = group.sections.begin(what, range(group.size), depth=depth()) if group.sections is not None else None
    try:
        result = run()
    except JobFailed:  # the others hear of it too
        raise
    except BaseException as error:
        if section is not None:
            section.fail(error)
        raise
    with WaitScope(what):
        if section is not None and not section.succeed():
            section.wait()
    return result


def check_finite(name: str, values: torch.Tensor, group: Group) -> None:
    bad = int((~values.isfinite()).reshape(len(values), -1).any(dim=1).sum()) if values.numel() else 0
    if bad:
        raise FloatingPointError(
            f"{name} must be finite, got {bad} of {len(values)} on rank {group.ranks[group.rank]} that are not. "
            "Check the scores there, or take smaller steps."
        )
