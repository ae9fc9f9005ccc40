"""Frequencies and shifts equal those of torch.fft on the full tensor."""

import itertools
import random

import pytest
import torch

from distman import fft, split_sizes
from distman.testing import ranks
from tests.collectives.reference import check_gradients_numerically, random_tensor
from tests.fft.test_one_dim import draw_sizes


@ranks(1, 2, 3, 4)
def test_each_rank_gets_its_part_of_the_frequencies(rank, world_size):
    source = random.Random(world_size)  # noqa: S311 - no secret
    for name, n, dtype in itertools.product(["fftfreq", "rfftfreq"], range(1, 12), [None, torch.float64]):
        expected = getattr(torch.fft, name)(n, 0.3, dtype=dtype)
        part = getattr(fft, name)(n, 0.3, dtype=dtype)
        assert torch.equal(part, expected.split(split_sizes(len(expected), world_size))[rank])
        sizes = draw_sizes(source, len(expected), world_size)
        part = getattr(fft, name)(n, 0.3, sizes=sizes, dtype=dtype)
        assert torch.equal(part, expected.split(sizes)[rank])
        assert part.dtype == expected.dtype


@ranks(1, 2, 3, 4)
def test_draws_of_shifts_equal_one_process(rank, world_size):
    source = random.Random(world_size)  # noqa: S311 - no secret
    for draw in range(60):
        shape = source.choices([1, 2, 3, 5, 8, 13], k=source.choice([1, 2, 3]))
        dims = source.sample(range(len(shape)), source.randint(1, len(shape)))
        shard_dim = source.choice([dims[0], source.randrange(len(shape))])
        sizes = source.choice([draw_sizes(source, shape[shard_dim], world_size)])
        name = source.choice(["fftshift", "ifftshift"])
        dtype = source.choice([torch.float32, torch.complex128, torch.int16, torch.bool])
        full = random_tensor(*shape, dtype=dtype, seed=draw)
        options = {} if len(dims) == 1 and shard_dim == dims[0] else {"shard_dim": shard_dim}
        options |= source.choice([{}, {"sizes": sizes}])
        mine = full.split(sizes, shard_dim)[rank].clone()
        kept = mine.clone()
        result = getattr(fft, name)(mine, dims[0] if len(dims) == 1 else dims, **options)
        assert torch.equal(result, getattr(torch.fft, name)(full, dims).split(sizes, shard_dim)[rank])
        assert torch.equal(mine, kept)
        result.zero_()
        assert torch.equal(mine, kept)


@ranks(3)
def test_gradcheck_of_shifts_twice(rank):
    inputs = random_tensor(5, 2).split([3, 0, 2])
    check_gradients_numerically(lambda mine: fft.fftshift(mine, shard_dim=0).pow(2), inputs, rank)


@ranks(2)
def test_frequencies_fit_the_transform(rank):
    n = 24
    x = torch.arange(n, dtype=torch.float64).div(n).mul(2 * torch.pi).split(n // 2)[rank]
    spectrum = fft.rfft(x.sin())
    frequencies = fft.rfftfreq(n, 1 / n, dtype=torch.float64)
    torch.testing.assert_close(fft.irfft(1j * frequencies * spectrum), x.cos())


WRONG = [
    (lambda: fft.fftfreq(0), "n must be at least 1 and d other than 0, got 0 points"),
    (lambda: fft.rfftfreq(4, 0.0), r"got 4 points at a distance of 0\.0"),
    (lambda: fft.fftfreq(4.0), r"n must be an integer, got 4\.0"),
    (lambda: fft.rfftfreq(6, sizes=[3, 3]), "sizes must add up to the 4 frequencies of 6 points"),
    (lambda: fft.fftfreq(6, dtype=torch.int64), "dtype must be a floating point one"),
    (
        lambda: fft.fftshift(torch.ones(2, 2)),
        r"shard_dim must be given where several dims are shifted, got \(0, 1\)",
    ),
    (
        lambda: fft.fftshift(torch.ones(2, 2), (0, -2)),
        r"dim must hold one or more different dims, got \(0, -2\) for a tensor of 2 dims\. Name each dim once",
    ),
    (
        lambda: fft.fftshift(torch.tensor(1.0)),
        r"got \(\) for a tensor of 0 dims\. Name each dim once; a scalar has none to shift\.",
    ),
    (lambda: fft.ifftshift(torch.ones(2, 2), 2), "dim must be between -2 and 1"),
    (lambda: fft.ifftshift(torch.ones(2), sizes=[1, 1]), "must have length sizes"),
]


@ranks(2)
def test_wrong_arguments_are_one_sentence():
    for call, message in WRONG:
        with pytest.raises(ValueError, match=message):
            call()
