"""What sampling and likelihoods share: checks, random streams, and errors when each rank works on its part."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from distman._coordination.tracking import depth
from distman._coordination.wait_scope import WaitScope
from distman._job.groups.registry import Group
from distman.collectives import GroupLike, all_gather_objects, resolve_group
from distman.decorators import _told_by as told_by
from distman.errors import PlanMismatchError
from distman.topology import split_sizes

R = TypeVar("R")


def check_samples(x: torch.Tensor, least_dims: int) -> None:
    if x.ndim < least_dims or not x.numel() or not x.is_floating_point():
        dims = "" if least_dims == 1 else " with two dims or more"
        raise ValueError(
            f"x must hold floating-point samples, got {x.dtype} of shape {tuple(x.shape)}. Pass at least "
            f"one sample, shape (batch, *){dims}."
        )


def check_positive(name: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}. Pass {example}.")


def check_condition(condition: torch.Tensor | None, num: int) -> None:
    if condition is not None and (not condition.ndim or len(condition) != num):
        raise ValueError(
            f"condition must have one row for each of {num} samples, got {tuple(condition.shape)}. Pass all of them."
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

    The ranks wait for the slowest one over the store, so no collective times out. Unlike within ``on_rank``, the
    function may call collectives of other groups: a network may be split over one.
    """
    if group.sections is None:
        return run()
    section = group.sections.begin(what, range(group.size), depth=depth())
    with told_by(section):
        result = run()
    with WaitScope(what):
        if not section.succeed():
            section.wait()
    return result


def share_out(
    num: int, batch_size: int | None, num_ranks: int, *, rank_zero: bool = False
) -> tuple[list[list[tuple[int, slice]]], list[int]]:
    """Return the batches of each rank, with the index of each batch's random stream; and each rank's number of samples.

    Without a ``batch_size`` there is one batch for each rank.
    """
    num_taking_part = 1 if rank_zero else num_ranks
    lengths = split_sizes(num, num_taking_part) if batch_size is None else [batch_size] * -(-num // batch_size)
    ends = itertools.accumulate(lengths)
    batches = [slice(end - length, min(end, num)) for length, end in zip(lengths, ends, strict=True)]
    counts = split_sizes(len(batches), num_taking_part) + [0] * (num_ranks - num_taking_part)
    numbered = enumerate(batches)
    shares = [list(itertools.islice(numbered, count)) for count in counts]
    return shares, [sum(part.stop - part.start for _, part in share) for share in shares]


def check_finite(name: str, values: torch.Tensor, group: Group) -> None:
    bad = int((~values.isfinite()).reshape(len(values), -1).any(dim=1).sum()) if values.numel() else 0
    if bad:
        raise FloatingPointError(
            f"{name} must be finite, got {bad} of {len(values)} on rank {group.ranks[group.rank]} that are not. "
            "Check the scores there, or take smaller steps."
        )


def random_stream(purpose: str, seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for one of many streams of random numbers.

    Local. Streams of the same purpose and seed differ for all indices below 2^32: the index is added to a digest of
    the other two, of which a generator on the CPU uses 32 bits.

    Args:
        purpose: What the numbers are used for; equal seeds give different numbers for different purposes.
        seed: Any integer.
        index: The rank, or the number of a batch.
        device: Device of the generator.

    Returns:
        A new generator; torch's default generators are not used.

    Example:
        >>> draws = [torch.rand((), generator=random_stream("noise", 7, index)) for index in (0, 0, 1)]
        >>> draws[0] == draws[1], draws[1] == draws[2]
        (tensor(True), tensor(False))
    """
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed((int.from_bytes(digest, "big") + index) % 2**64)
