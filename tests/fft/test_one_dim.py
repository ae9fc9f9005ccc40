"""Transforms of one dim equal torch.fft on the full tensor, whichever dim is sharded."""

import itertools
import random

import pytest
import torch

from distman import DistributedManager, fft, split_sizes
from distman.errors import PlanMismatchError
from distman.testing import ranks
from tests.collectives.reference import check_gradients_numerically, in_one_job, random_tensor, strided

KINDS = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
REAL_INPUT = ("rfft", "ihfft")
NUM_DRAWS = 16


def make_input(kind, *shape, dtype=torch.float64, seed=0):
    """The full tensor, equal on all ranks."""
    return random_tensor(*shape, dtype=dtype if kind in REAL_INPUT else dtype.to_complex(), seed=seed)


def draw_sizes(source, length, world_size):
    """Lengths of shards, of which some are likely to be empty."""
    ends = sorted(source.choices(range(length + 1), k=world_size - 1))
    return [end - start for start, end in itertools.pairwise([0, *ends, length])]


def check_against_one_process(kind, full, n, dim, norm, rank, **options):
    """Compare result, gradient and gradient of the gradient of this rank with those on the full tensor."""
    world_size = DistributedManager().world_size
    shard_dim = options.get("shard_dim", dim)
    out_dim = options.get("out_dim", shard_dim)
    leaf = full.clone().requires_grad_()
    expected = getattr(torch.fft, kind)(leaf, n, dim, norm)
    weights = random_tensor(*expected.shape, dtype=expected.dtype, seed=1).requires_grad_()
    (expected_grad,) = torch.autograd.grad(expected, leaf, weights, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected_grad, weights, full)

    in_shards = options.get("sizes") or split_sizes(full.shape[shard_dim], world_size)
    default = in_shards if out_dim == shard_dim != dim else split_sizes(expected.shape[out_dim], world_size)
    out_shards = options.get("out_sizes") or default
    mine = full.split(in_shards, shard_dim)[rank].clone().requires_grad_()
    kept = mine.detach().clone()
    result = getattr(fft, kind)(mine, n, dim, norm, **options)
    own_weights = weights.detach().split(out_shards, out_dim)[rank].clone().requires_grad_()
    (grad,) = torch.autograd.grad(result, mine, own_weights, create_graph=True)
    (second,) = torch.autograd.grad(grad, own_weights, full.split(in_shards, shard_dim)[rank])
    for found, wanted, cut, where in [
        (result, expected, out_shards, out_dim),
        (grad, expected_grad, in_shards, shard_dim),
        (second, expected_second, out_shards, out_dim),
    ]:
        torch.testing.assert_close(found, wanted.split(cut, where)[rank], rtol=0, atol=1e-10)
    assert torch.equal(mine.detach(), kept)


@ranks(1, 2, 3)
@in_one_job(kind=KINDS)
def test_draws_equal_one_process(rank, world_size, kind):
    source = random.Random(f"{kind} {world_size}")  # noqa: S311 - no secret
    for draw in range(NUM_DRAWS):
        shape = source.choices([1, 2, 3, 4, 6, 7, 12, 16, 30], k=source.choice([1, 1, 2, 3]))
        dim, shard_dim, out_dim = source.choices(range(len(shape)), k=3)
        shard_dim = source.choice([dim, shard_dim])
        n = source.choice([None, shape[dim] + 5, max(1, shape[dim] - 2)])
        if kind in ("irfft", "hfft") and n is None and shape[dim] == 1:
            continue  # no points
        norm = source.choice([None, "backward", "ortho", "forward"])
        full = make_input(kind, *shape, seed=draw)
        length = getattr(torch.fft, kind)(full, n, dim).shape[out_dim]
        options = {}
        if shard_dim != dim:
            options["shard_dim"] = shard_dim
        if out_dim != shard_dim:
            options["out_dim"] = out_dim
        for name, total in (("sizes", shape[shard_dim]), ("out_sizes", length)):
            if source.random() < 0.5:
                options[name] = draw_sizes(source, total, world_size)
        check_against_one_process(kind, full, n, dim, norm, rank, **options)


@ranks(3)
@in_one_job(kind=KINDS)
def test_gradcheck_twice(rank, world_size, kind):
    for shape, dim, out_dim in [((6,), 0, 0), ((3, 4), 0, 0), ((3, 4), 0, 1)]:
        length = shape[dim]
        shards = make_input(kind, *shape).split(split_sizes(length, world_size), dim)
        inputs = [torch.view_as_real(one) if one.is_complex() else one for one in shards]

        def function(mine, dim=dim, out_dim=out_dim):
            tensor = mine if kind in REAL_INPUT else torch.view_as_complex(mine.contiguous())
            result = getattr(fft, kind)(tensor, dim=dim, out_dim=out_dim)
            return torch.view_as_real(result) if result.is_complex() else result

        check_gradients_numerically(function, inputs, rank)


@ranks(2)
@in_one_job(kind=KINDS)
def test_dtypes_strides_conjugates_and_results_that_are_changed(rank, kind):
    for dtype, (shape, dim, shard_dim) in itertools.product(
        [torch.float32, torch.float64], [((16,), 0, 0), ((6, 3, 8), 0, 0), ((6, 3, 8), 2, 0)]
    ):
        full = make_input(kind, *shape, dtype=dtype)
        expected = getattr(torch.fft, kind)(full, dim=dim)
        mine = full.split(shape[shard_dim] // 2, shard_dim)[rank]
        out_sizes = split_sizes(expected.shape[shard_dim], 2)
        forms = [mine, strided(mine), mine.transpose(0, -1).contiguous().transpose(0, -1)]
        forms += [mine.conj().resolve_conj().conj()] if mine.is_complex() else []
        for form in forms:
            leaf = form.clone().requires_grad_()
            result = getattr(fft, kind)(leaf, dim=dim, shard_dim=shard_dim)
            torch.testing.assert_close(result, expected.split(out_sizes, shard_dim)[rank])
            result *= 2
            result.abs().square().sum().backward()
            assert leaf.grad.shape == leaf.shape


@ranks(1, 3)
def test_a_batch_of_nothing(rank, world_size):
    for kind, shape, shard_dim in itertools.product(KINDS, [(0, 6), (6, 0)], [0, 1]):
        full = make_input(kind, *shape)
        dim = shape.index(6)
        mine = full.split(split_sizes(full.shape[shard_dim], world_size), shard_dim)[rank].clone().requires_grad_()
        result = getattr(fft, kind)(mine, dim=dim, shard_dim=shard_dim)
        result.abs().sum().backward()
        assert result.numel() == 0
        assert mine.grad.shape == mine.shape


@ranks(2)
def test_a_line_in_single_precision(rank):
    for kind, length in itertools.product(("fft", "rfft"), (2**16, 1009)):
        full = make_input(kind, length, dtype=torch.float32)
        expected = getattr(torch.fft, kind)(full)
        result = getattr(fft, kind)(full.split(split_sizes(length, 2))[rank])
        wanted = expected.split(split_sizes(len(expected), 2))[rank]
        assert (result - wanted).abs().max() < 1e-5 * expected.abs().max()


@ranks(2)
def test_integers_and_half_precision(rank):
    full = torch.arange(8)
    torch.testing.assert_close(fft.rfft(full.split(4)[rank]), torch.fft.rfft(full).split([3, 2])[rank])
    halves = full.bfloat16().split(4)[rank]
    with pytest.raises(ValueError, match=r"must be of 32 or 64 bits, got torch\.bfloat16"):
        fft.fft(halves)
    with torch.autocast("cpu", torch.bfloat16):
        assert fft.fft(halves).dtype == torch.complex64


WRONG = [
    ("fft", {"dim": 2}, "dim must be between -2 and 1"),
    ("fft", {"shard_dim": 2}, "shard_dim must be between -2 and 1"),
    ("fft", {"out_dim": "0"}, "out_dim must be between -2 and 1 for a tensor of 2 dims, got '0'"),
    ("fft", {"n": 0}, "n must be at least 1, got 0"),
    ("irfft", {"n": -1}, "n must be at least 1, got -1"),
    ("fft", {"n": 4.0}, r"n must be an integer, got 4\.0"),
    ("hfft", {"norm": "orthogonal"}, "norm must be one of backward, ortho, forward"),
    ("ihfft", {"sizes": (1, 3)}, "must have length sizes"),
    ("fft", {"sizes": (3,), "shard_dim": 0}, "sizes must hold one number"),
    ("rfft", {"out_sizes": (1, 1)}, "out_sizes must add up to the length 5"),
    ("fft", {"out_sizes": (1, 1), "shard_dim": 0}, "out_sizes must add up to the length 4"),
]


@ranks(2)
def test_wrong_arguments_are_one_sentence():
    for name, arguments, message in WRONG:
        with pytest.raises(ValueError, match=message):
            getattr(fft, name)(torch.ones(2, 4), **arguments)


@ranks(2)
def test_what_the_ranks_do_not_agree_on(monkeypatch, rank):
    with pytest.raises(ValueError, match=r"the tensor of ihfft must be real, got torch\.complex64\. Use ifft"):
        fft.ihfft(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="the shards of fft must be equal"):
        fft.fft(torch.ones(2, 4 + rank), dim=0)
    monkeypatch.setenv("DISTMAN_DEBUG", "1")
    with pytest.raises(PlanMismatchError, match="operation fft, dim 0, n "):
        fft.fft(torch.ones(4), n=[None, 7][rank], sizes=[4, 4])
