"""A sum in rank order is the same bits on all ranks, and the pieces may change afterwards."""

import random

import pytest
import torch

from distman.collectives import _result_memory
from distman.collectives._sums import SumInRankOrder
from tests.collectives.reference import random_tensor


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_added_in_rank_order(monkeypatch, seed):
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    monkeypatch.setattr(_result_memory, "_LEAST_BYTES", draw.choice([16, 2**25]))
    monkeypatch.setattr(_result_memory, "_HUGE_PAGE", 1)
    num_ranks = draw.randrange(1, 7)
    rank = draw.randrange(num_ranks)
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.uint8])
    use_fp32 = draw.random() < 0.5
    shape = draw.choice([(), (0, 3), (5,), (4, 7)])
    pieces = [
        (random_tensor(*shape, dtype=torch.float32, seed=100 * seed + one) * 50).to(dtype) for one in range(num_ranks)
    ]
    if dtype.is_complex:
        pieces[rank] = pieces[rank].conj()
    wide = torch.float32 if use_fp32 and dtype in (torch.float16, torch.bfloat16) else dtype
    expected = pieces[0].to(wide)
    for piece in pieces[1:]:
        expected = expected + piece.to(wide)

    own = pieces[rank].clone()
    total = SumInRankOrder(pieces[rank], rank, use_fp32=use_fp32)
    for one in [one for one in range(num_ranks) if one != rank]:
        lent = pieces[one].clone()
        total.add(one, lent)
        lent.zero_()
    result = total.result()
    assert result.dtype == dtype
    assert result.equal(expected.to(dtype))
    result.zero_()
    assert pieces[rank].equal(own)
