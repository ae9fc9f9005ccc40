"""The oracle of a split field: torch on the full field, on one process."""

import random

import torch
from torch.nn.functional import pad

BOUNDARIES = ["zeros", "circular", "reflect", "replicate", "none"]


def cut(length, parts, draw):
    """Draw lengths of so many shards, some of them empty."""
    places = sorted(draw.randint(0, length) for _ in range(parts - 1))
    return [end - start for start, end in zip([0, *places], [*places, length], strict=True)]


def padded_index(length, before, after, boundary):
    """The indices of a dim that is padded by torch, -1 where it is padded by zeros."""
    places = torch.arange(length, dtype=torch.float64)
    if boundary == "zeros":
        return pad(places, (before, after), value=-1).long()
    return pad(places[None, None], (before, after), mode=boundary)[0, 0].long()


def with_halo(full, dim, sizes, rank, halo, boundary):
    """The shard of a rank with its halo, cut out of the full field, which torch pads."""
    before, after = halo
    start = sum(sizes[:rank])
    end = start + sizes[rank]
    if boundary == "none":
        return full.narrow(dim, max(start - before, 0), min(end + after, sum(sizes)) - max(start - before, 0))
    index = padded_index(sum(sizes), before, after, boundary)
    wide = torch.cat([full, torch.zeros_like(full.narrow(dim, 0, 1))], dim)  # where -1 leads to
    return wide.index_select(dim, index % wide.shape[dim]).narrow(dim, start, end - start + before + after)


def drawer(*seed):
    return random.Random("-".join(map(str, seed)))  # noqa: S311 - for what is drawn in tests
