import math
import sys

import pytest
import torch

from distman import DistributedManager, RankFailedError
from distman.errors import PlanMismatchError
from distman.score import VariancePreserving, log_likelihood
from distman.testing import ranks

from .mixture import SDES, ExactScore, FailsOn, Mixture

SDE = VariancePreserving()
NUM = 40
SHORT = VariancePreserving(epsilon=0.05)  # a way of few steps
COARSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SDES)
@ranks(2)
def test_the_exact_divergence_gives_the_density_of_each_sample(name, dtype):
    sde, x = SDES[name], Mixture().draw(NUM)
    found = log_likelihood(ExactScore(sde, dtype), sde, x.to(dtype), num_probes=None, batch_size=NUM // 2)
    assert (found.dtype, found.shape, found.requires_grad) == (dtype, (NUM,), False)
    expected = Mixture().log_density(x)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-2)
    assert found.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)


@ranks(2)
def test_random_vectors_give_the_mean_of_the_density():
    x = Mixture().draw(400)
    expected = Mixture().log_density(x)
    options = {"num_probes": 8, "seed": 0, "batch_size": 200, "rtol": 1e-4, "atol": 1e-4}
    found = log_likelihood(ExactScore(SDE), SDE, x, **options)
    assert found.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)
    noisier = log_likelihood(ExactScore(SDE), SDE, x, probes="gaussian", **options)
    standard_error = (noisier - expected).std() / math.sqrt(len(x))
    assert (noisier - expected).mean().abs() < 3 * standard_error
    assert 0 < (found - expected).std() < (noisier - expected).std() < 1


@pytest.mark.parametrize("num", [11, 2])  # also fewer batches than ranks
@ranks(1, 2)
def test_the_result_does_not_depend_on_the_number_of_ranks(num):
    x = Mixture().draw(num)
    options = {"seed": 7, "probes": "gaussian", "batch_size": 2, **COARSE}
    before = torch.get_rng_state()
    found = log_likelihood(ExactScore(SHORT), SHORT, x, **options)
    assert torch.equal(torch.get_rng_state(), before)
    DistributedManager.create_process_subgroup("alone", 1)
    alone = log_likelihood(ExactScore(SHORT), SHORT, x, group="alone", **options)
    assert torch.equal(found, alone)
    other = log_likelihood(ExactScore(SHORT), SHORT, x, group="alone", **options | {"seed": 8})
    assert not torch.equal(found, other)


@ranks(2)
def test_without_a_seed_all_ranks_take_that_of_rank_zero(rank):
    x = Mixture().draw(4)
    options = {"probes": "gaussian", "batch_size": 2, **COARSE}
    torch.manual_seed(rank)
    first = log_likelihood(ExactScore(SHORT), SHORT, x, **options)
    torch.manual_seed(0)
    assert torch.equal(log_likelihood(ExactScore(SHORT), SHORT, x, **options), first)
    assert not torch.equal(log_likelihood(ExactScore(SHORT), SHORT, x, **options), first)


class Gaussian:
    """The score of standard Gaussian data, of any shape, which stay so under an equation that preserves variance."""

    def __call__(self, _, x):
        return -x


@ranks(2)
def test_samples_of_more_dims():
    x = torch.randn(5, 2, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = SDE.prior_log_density(x)
    for num_probes in (None, 1, 2):  # each sign vector gives the divergence of -x exactly
        found = log_likelihood(Gaussian(), SDE, x, num_probes=num_probes, batch_size=2, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not x.requires_grad


@ranks(1, 2)
def test_an_error_on_one_rank_is_raised_on_all_and_the_group_stays_usable(rank, world_size):
    culprit, x = world_size - 1, Mixture().draw(3)
    with pytest.raises(KeyError if rank == culprit else RankFailedError, match="'no weights'"):
        log_likelihood(FailsOn(culprit), SHORT, x, batch_size=1, **COARSE)
    assert log_likelihood(FailsOn(-1), SHORT, x, batch_size=1, **COARSE).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@ranks(1, 2)
def test_a_flow_without_end_is_told_on_all_ranks(value, world_size):
    culprit = world_size - 1
    with pytest.raises((FloatingPointError, RankFailedError), match=rf".* must .* finite.* on rank {culprit}"):
        log_likelihood(FailsOn(culprit, value), SHORT, Mixture().draw(3), batch_size=1, **COARSE)


@ranks(2)
def test_samples_that_differ_between_ranks_are_told_on_all(rank):
    with pytest.raises(PlanMismatchError, match=r"log_likelihood with the same arguments, got different x\."):
        log_likelihood(Gaussian(), SDE, Mixture().draw(3, seed=rank))


@ranks(1)
def test_a_score_without_a_gradient():
    with pytest.raises(ValueError, match=r"score_fn must be differentiable in x, got a score without a gradient"):
        log_likelihood(lambda _, x: -x.detach(), SDE, Mixture().draw(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(3)}, r"x must hold floating-point samples, got torch\.float32 of shape \(3,\)"),
        ({"x": torch.ones(0, 2)}, r"x must hold floating-point samples"),
        ({"x": torch.ones(2, 2).int()}, r"got torch\.int32"),
        ({"num_probes": 0}, r"num_probes must be at least 1, got 0"),
        ({"batch_size": 0}, r"batch_size must be at least 1, got 0"),
        ({"probes": "sign"}, r"probes must be one of rademacher, gaussian, got 'sign'"),
        ({"rtol": 0.0}, r"rtol must be above 0 and finite, got 0\.0"),
        ({"atol": math.nan}, r"atol must be above 0 and finite, got nan"),
    ],
)
@ranks(1)
def test_wrong_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        log_likelihood(Gaussian(), SDE, **{"x": torch.ones(2, 2), **arguments})


@ranks(1)
def test_a_missing_solver_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install torchdiffeq"):
        log_likelihood(Gaussian(), SDE, torch.ones(2, 2))
