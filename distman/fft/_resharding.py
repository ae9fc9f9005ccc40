"""The exchange that shards a tensor along another dim, block by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from distman._job.groups.registry import Group
from distman.collectives import exchange, send_buffers
from distman.fft._blocks import Index, LocalTransform, Run, blocks_of, empty_with_last


def move(
    group: Group,
    tensor: torch.Tensor,
    local: LocalTransform | None,
    split: int,
    parts: Sequence[int],
    join: int,
    sizes: Sequence[int],
    length: int,
) -> torch.Tensor:
    """Transform a tensor that is sharded along ``join``, and return it sharded along ``split``.

    What ``parts`` leave of ``split`` is dropped; ``join`` gets this length, what ``sizes`` lack of it is zero.
    """
    blocks = blocks_of(tensor, local, whole=[split], across=join)
    shape, dtype = list(tensor.shape), tensor.dtype
    if local is not None:
        shape, dtype = local.shape(shape), local.dtype(dtype)
    like = tensor.new_empty(0, dtype=dtype)
    return exchange_blocks(group, blocks, like, shape, split, runs_of(parts), join, sizes, length)


def exchange_blocks(
    group: Group,
    blocks: Iterable[tuple[Index, torch.Tensor]],
    like: torch.Tensor,
    shape: list[int],
    split: int,
    parts: Sequence[Sequence[Run]],
    join: int,
    sizes: Sequence[int],
    length: int,
) -> torch.Tensor:
    """Do what :func:`move` does with a tensor that comes in blocks; a part is several runs, each a start and a length.

    In memory ``join`` comes last, for what is to be transformed along it. ``shape`` is that of all blocks together.
    """
    rank, shape = group.rank, list(shape)
    lengths = [sum(number for _, number in runs) for runs in parts]
    shape[split], shape[join] = lengths[rank], length
    joined = empty_with_last(like, shape, [join])
    joined.narrow(join, sum(sizes), length - sum(sizes)).zero_()
    receives = list(joined.narrow(join, 0, sum(sizes)).split_with_sizes(list(sizes), join))
    flat_receives = [one.movedim(join, -1) for one in receives]
    shapes: dict[int, list[int]] = {}
    for other in range(group.size):
        if other != rank:
            shape[split], shape[join] = lengths[other], sizes[rank]
            shapes[other] = [*(number for dim, number in enumerate(shape) if dim != join), shape[join]]
    with send_buffers(like, shapes, group) as (buffers, segment):
        flat_sends = [flat_receives[rank] if other == rank else buffers[other] for other in range(group.size)]
        targets: list[tuple[torch.Tensor, Run]] = []
        for flat, runs in zip(flat_sends, parts, strict=True):
            places = flat.movedim(-1, join).split_with_sizes([number for _, number in runs], split)
            targets += zip(places, runs, strict=True)
        for index, block in blocks:
            for target, run in targets:
                target[index] = block.narrow(split, *run)
            del block  # so that the next one is made in its memory, which is in the cache
        exchange(flat_sends, flat_receives, group, segment=segment)
    return joined


def runs_of(sizes: Sequence[int]) -> list[list[Run]]:
    """Return parts of these lengths, one behind the other, as a run each."""
    return [[(end - size, size)] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
