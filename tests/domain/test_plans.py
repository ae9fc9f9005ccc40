"""Which entries a rank takes from whom, as arithmetic, against torch's padding: many ranks, and no processes."""

import itertools

import torch

from distman.domain._axes import longest_halo, plan
from distman.domain._halo import add, checked_windows
from tests.domain.reference import BOUNDARIES, cut, drawer, with_halo

CPU = torch.device("cpu")


def window_by_plans(full, plans, windows, rank):
    """The window of a rank, put together of what all of them send to it."""
    starts = [0, *itertools.accumulate(windows.sizes)]
    shards = [full[start:end] for start, end in itertools.pairwise(starts)]
    kept, incoming, _, _, beyond = plans[rank]
    window = torch.full((windows.length(rank),), -1)
    window[kept[1] : kept[1] + kept[2]] = shards[rank][kept[0] : kept[0] + kept[2]]
    window[beyond] = 0
    senders = {sender for sender, one in enumerate(plans) if rank in one.outgoing}
    assert senders == incoming.keys()
    for sender, places in incoming.items():
        window[places] = shards[sender][plans[sender].outgoing[rank]]
    return window


def test_windows_are_those_of_a_padded_field():
    for seed in range(200):
        draw = drawer("plan", seed)
        num_ranks, length, boundary = draw.randint(1, 9), draw.randint(1, 12), BOUNDARIES[seed % 5]
        most = min(longest_halo(boundary, length), 15)
        halo, sizes = (draw.randint(0, most), draw.randint(0, most)), cut(length, num_ranks, draw)
        full = torch.arange(1, length + 1)
        windows = checked_windows(0, sizes, halo, boundary)
        plans = [plan(windows, rank, CPU) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            expected = with_halo(full, 0, sizes, rank, halo, boundary)
            assert torch.equal(window_by_plans(full, plans, windows, rank), expected), (sizes, halo, boundary, rank)


def test_what_is_added_in_order_is_what_is_added():
    for seed in range(20):
        draw = drawer("add", seed)
        dim, length, count = draw.randrange(3), draw.randint(1, 5), draw.randint(1, 12)
        entries = torch.tensor([draw.randrange(length) for _ in range(count)])
        sizes = [2, 3, 4]
        sizes[dim] = length
        totals = [torch.ones(sizes), torch.ones(sizes)]
        sizes[dim] = count
        piece = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
        for total, in_order in zip(totals, (False, True), strict=True):
            add(total, dim, entries, piece, in_order=in_order)
        torch.testing.assert_close(*totals)


def test_windows_with_an_entry_twice_are_known():
    for boundary, halo, expected in [
        ("circular", (4, 4), {0, 1}),
        ("circular", (1, 1), set()),
        ("replicate", (3, 0), {0, 1}),
    ]:
        windows = checked_windows(0, [2, 2], halo, boundary)
        assert plan(windows, 0, CPU).repeated == expected, boundary
