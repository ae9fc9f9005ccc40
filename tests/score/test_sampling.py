import math

import pytest
import torch
from scipy.stats import ks_2samp

from distman import DistributedManager, RankFailedError, split_sizes
from distman.errors import PlanMismatchError
from distman.score import VariancePreserving, sample
from distman.testing import ranks

from .mixture import SDES, ExactScore, FailsOn, Mixture

SDE = VariancePreserving()
SHORT = {"num_steps": 4, "dtype": torch.float64}


def smallest_p_value(samples, expected):
    """Of Kolmogorov and Smirnov's test along several directions."""
    angles = torch.arange(5) * math.pi / 5
    directions = torch.stack([angles.cos(), angles.sin()]).double()
    pairs = zip((samples.double() @ directions).T.tolist(), (expected @ directions).T.tolist(), strict=True)
    return min(ks_2samp(*pair).pvalue for pair in pairs)


@pytest.mark.parametrize("name", SDES)
@ranks(1, 4)
def test_samples_are_distributed_as_the_data(name):
    found = sample(ExactScore(SDES[name], torch.float32), SDES[name], (2000, 2), num_steps=300, seed=5)
    assert found.dtype == torch.float32
    assert smallest_p_value(found, Mixture().draw(2000)) > 0.01


def test_the_test_of_distributions_sees_a_wrong_one():
    assert smallest_p_value(1.15 * Mixture().draw(2000, seed=1), Mixture().draw(2000)) < 1e-3


@pytest.mark.parametrize("num", [11, 3])
@ranks(1, 2, 4)
def test_the_samples_of_uneven_and_empty_shares_are_on_all_ranks_in_rank_order(num, world_size):
    before = torch.get_rng_state()
    found = sample(ExactScore(SDE), SDE, (num, 2), seed=1, **SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.shape == (num, 2)
    assert torch.equal(found, sample(ExactScore(SDE), SDE, (num, 2), seed=1, **SHORT))
    assert len(found.unique(dim=0)) == num, "no two ranks draw the same"
    size = split_sizes(num, world_size)[0]
    alone = sample(ExactScore(SDE), SDE, (size, 2), seed=1, rank_zero=True, **SHORT)
    assert torch.equal(found[:size], alone)
    other = sample(ExactScore(SDE), SDE, (num, 2), seed=2, **SHORT)
    assert not torch.isclose(found, other).any()


@ranks(1, 3)
def test_on_one_rank_only(rank, world_size):
    everywhere = sample(ExactScore(SDE), SDE, (5, 2), seed=1, **SHORT)
    dst = world_size - 1
    found = sample(ExactScore(SDE), SDE, (5, 2), seed=1, dst=dst, **SHORT)
    assert torch.equal(found, everywhere if rank == dst else torch.empty(0, 2))


class Counting:
    """Counts the samples it is asked for, at each time."""

    def __init__(self):
        self.sizes = []

    def __call__(self, t, x):
        assert not torch.is_grad_enabled()
        self.sizes.append(len(x))
        return ExactScore(SDE)(t, x)


@ranks(1, 3)
def test_rank_zero_alone_draws_what_one_process_draws(rank):
    score = Counting()
    found = sample(score, SDE, (5, 2), seed=1, rank_zero=True, batch_size=3, **SHORT)
    assert score.sizes == ([3] * 4 + [2] * 4 if rank == 0 else [])
    only_zero = sample(ExactScore(SDE), SDE, (5, 2), seed=1, rank_zero=True, batch_size=3, dst=0, **SHORT)
    assert torch.equal(only_zero, found if rank == 0 else found[:0])


@ranks(2)
def test_batches_of_a_share(rank):
    score = Counting()
    assert sample(score, SDE, (7, 2), seed=1, batch_size=2, **SHORT).unique(dim=0).shape == (7, 2)
    assert score.sizes == [[2] * 8, [2] * 4 + [1] * 4][rank]


@ranks(2)
def test_without_a_seed_the_default_generator_of_rank_zero_decides(rank):
    torch.manual_seed(3)  # equal on all ranks, as many programs do
    first = sample(ExactScore(SDE), SDE, (4, 2), **SHORT)
    second = sample(ExactScore(SDE), SDE, (4, 2), **SHORT)
    torch.manual_seed(3 + rank)
    again = sample(ExactScore(SDE), SDE, (4, 2), **SHORT)
    assert torch.equal(again, first)
    assert len(torch.cat([first, second]).unique(dim=0)) == 8


@ranks(4)
def test_over_a_group(rank):
    DistributedManager.create_process_subgroup("pairs", 2)
    pair = rank // 2
    found = sample(ExactScore(SDE), SDE, (3, 2), seed=pair, group="pairs", **SHORT)
    first = sample(ExactScore(SDE), SDE, (2, 2), seed=pair, rank_zero=True, group="pairs", **SHORT)
    assert torch.equal(found[:2], first)
    assert found.shape == (3, 2)


@pytest.mark.parametrize("rank_zero", [False, True])
@ranks(1, 3)
def test_an_error_on_one_rank_is_raised_on_all_and_the_group_stays_usable(rank_zero, rank, world_size):
    culprit = 0 if rank_zero else world_size - 1
    with pytest.raises(KeyError if rank == culprit else RankFailedError, match="'no weights'"):
        sample(FailsOn(culprit), SDE, (5, 2), rank_zero=rank_zero, **SHORT)
    assert sample(FailsOn(-1), SDE, (5, 2), rank_zero=rank_zero, **SHORT).isfinite().all()


@ranks(1, 3)
def test_samples_that_are_no_numbers_are_told_on_all_ranks(world_size):
    culprit = world_size - 1
    message = rf"samples must be finite, got (\d) of \1 on rank {culprit} that are not"
    with pytest.raises((FloatingPointError, RankFailedError), match=message):
        sample(FailsOn(culprit, math.nan), SDE, (5, 2), **SHORT)


class Sums:
    """A network that is split over a group, whose ranks sample together."""

    def __call__(self, _, x):
        parts = x / 2
        torch.distributed.all_reduce(parts, group=DistributedManager().group("split"))
        return -parts


@ranks(4)
def test_a_score_that_is_split_over_another_group():
    DistributedManager.create_process_subgroup("split", 2)
    DistributedManager.create_orthogonal_process_group("copies", "split")
    found = sample(Sums(), SDE, (3, 2), seed=0, group="copies", **SHORT)
    expected = sample(FailsOn(-1), SDE, (3, 2), seed=0, group="copies", **SHORT)
    torch.testing.assert_close(found, expected)


@ranks(3)
def test_calls_that_differ_are_told_on_all_ranks(rank):
    with pytest.raises(PlanMismatchError, match=r"sample with the same arguments, got different num_steps, seed\."):
        sample(FailsOn(-1), SDE, (5, 2), num_steps=3 + (rank == 1), seed=None if rank else 3)
    assert sample(FailsOn(-1), SDE, (5, 2), **SHORT).shape == (5, 2)


@ranks(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": ()}, r"shape must be whole numbers of 1 or more, \(num, \*\), got \(\)"),
        ({"shape": (0, 2)}, r"shape must be whole numbers of 1 or more"),
        ({"num_steps": 0}, r"num_steps must be at least 1, got 0"),
        ({"batch_size": -1}, r"batch_size must be at least 1, got -1"),
        ({"dst": 1}, r"dst must be a rank in group 'world', 0 to 0, got 1"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample(ExactScore(SDE), SDE, **{"shape": (2, 2), **arguments})


@ranks(1)
def test_a_score_of_another_shape():
    with pytest.raises(ValueError, match=r"score_fn\(t, x\) must have the shape of x, \(3, 2\), got"):
        sample(lambda _, x: x[:, :1], SDE, (3, 2))
