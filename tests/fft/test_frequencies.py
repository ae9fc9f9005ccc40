"""Frequencies equal those of torch.fft on the full tensor."""

import itertools
import random

import pytest
import torch

from distman import fft, split_sizes
from distman.testing import ranks
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
]


@ranks(2)
def test_wrong_arguments_are_one_sentence():
    for call, message in WRONG:
        with pytest.raises(ValueError, match=message):
            call()
