"""Conditions, guidance, weights and methods, against Gaussians whose densities are known."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.errors import PlanMismatchError
from distman.handler import NNHandler
from distman.score import (
    VarianceExploding,
    VariancePreserving,
    denoising_loss,
    guided_score,
    log_likelihood,
    sample,
    score,
)
from distman.testing import ranks

SDES = {"vp": VariancePreserving(), "ve": VarianceExploding(sigma_max=10.0)}
WIDTH = 0.5  # of the data around their conditions
METHODS = {"euler_maruyama": 400, "predictor_corrector": 200, "probability_flow": 40}


class GaussianAround:
    """The score of data that are normal around their conditions, and around 0 where those are the null condition."""

    def __init__(self, sde):
        self.sde = sde

    def __call__(self, t, x, condition):
        scale, std = self.sde.marginal(t)
        mean = condition.to(x.dtype).masked_fill(condition == -100, 0)
        return -(x - scale[:, None] * mean) / (scale.square() * WIDTH**2 + std.square())[:, None]

    def network(self, t, x, condition):
        return self(t, x, condition) * self.sde.marginal(t)[1][:, None]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SDES)
@ranks(3)
def test_samples_follow_their_conditions_and_are_those_that_one_process_draws(name, method, rank):
    conditions = torch.linspace(-4, 4, 600, dtype=torch.float64)[:, None].expand(-1, 2)
    options = {
        "num_steps": METHODS[method],
        "method": method,
        "seed": 3,
        "dtype": torch.float64,
        "batch_size": 170,
    }  # four batches
    found = sample(GaussianAround(SDES[name]), SDES[name], (600, 2), conditions, **options)
    errors = (found - conditions) / WIDTH
    assert errors.mean().item() == pytest.approx(0, abs=5 / math.sqrt(errors.numel()))
    assert errors.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * errors.numel()) + 0.03)
    alone = sample(GaussianAround(SDES[name]), SDES[name], (600, 2), conditions, rank_zero=True, dst=0, **options)
    if rank == 0:
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_the_density_under_a_condition():
    conditions = torch.tensor([[-3.0], [0.5], [2.0]], dtype=torch.float64)
    x = conditions + torch.tensor([[0.0], [0.4], [-1.0]], dtype=torch.float64)
    sde = SDES["vp"]
    found = log_likelihood(GaussianAround(sde), sde, x, conditions, num_probes=None, batch_size=2)
    expected = torch.distributions.Normal(conditions, WIDTH).log_prob(x)[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)  # the prior is not quite reached


def test_guidance_is_a_scale_of_what_the_condition_makes():
    exact, t = GaussianAround(SDES["vp"]), torch.tensor([0.2, 0.9])
    x, condition = torch.randn(2, 2), torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    options = {"null_condition": -100.0}
    under, without = exact(t, x, condition), exact(t, x, torch.full_like(condition, -100))
    for scale, expected in [(0.0, without), (1.0, under), (3.0, without + 3 * (under - without))]:
        found = score(exact.network, SDES["vp"], t, x, condition, guidance=scale, **options)
        torch.testing.assert_close(found, expected)


@ranks(2)
def test_a_measurement_guides_the_samples():
    sde, error, value = SDES["vp"], 0.5, 2.0

    def measured(t, x):
        scale, _ = sde.marginal(t)  # of a standard Gaussian, whose noisy samples are standard Gaussians too
        variance = 1 - scale.square() + error**2
        return -(scale * x[:, 0] - value).square() / (2 * variance)

    guided = guided_score(lambda _t, x: -x, measured)
    found = sample(guided, sde, (2000, 2), num_steps=200, seed=1)
    variance = error**2 / (1 + error**2)
    assert found[:, 0].mean().item() == pytest.approx(value / (1 + error**2), abs=0.05)
    assert found[:, 0].std().item() == pytest.approx(math.sqrt(variance), abs=0.05)
    assert found[:, 1].mean().item() == pytest.approx(0, abs=0.15)
    assert found[:, 1].std().item() == pytest.approx(1, abs=0.1)
    nats = log_likelihood(guided, sde, found[:3], num_probes=None)  # it can be differentiated again
    assert nats.isfinite().all()
    with pytest.raises(ValueError, match="log_likelihood must return a number for each sample"):
        guided_score(lambda _t, x: -x, lambda _t, x: -x)(torch.ones(3), torch.ones(3, 2))


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_conditions_are_dropped_with_a_probability(probability):
    seen = []

    def network(_t, x, condition):
        seen.append(condition)
        return x

    labels = torch.arange(5000) % 10
    generator = torch.Generator().manual_seed(0)
    options = {"drop_condition": probability, "null_condition": 10, "generator": generator}
    denoising_loss(network, SDES["vp"], torch.zeros(5000, 2), labels, **options)
    is_dropped = seen[0] == 10
    assert is_dropped.double().mean().item() == pytest.approx(probability, abs=0.03)
    assert torch.equal(seen[0][~is_dropped], labels[~is_dropped])


def test_weights_by_time():
    sde, x = SDES["ve"], torch.randn(64, 3)

    def loss(weighting):
        return denoising_loss(
            lambda _t, x: 0.1 * x, sde, x, weighting=weighting, generator=torch.Generator().manual_seed(0)
        )

    def likelihood(t):
        return (sde.diffusion(t) / sde.marginal(t)[1]).square()

    torch.testing.assert_close(loss("likelihood"), loss(likelihood))
    torch.testing.assert_close(loss("variance"), loss(torch.ones_like))
    torch.testing.assert_close(loss(lambda t: torch.full_like(t, 3.0)), 3 * loss("variance"))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + 4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        self.classes = nn.Embedding(4, 4)

    def forward(self, t, x, label):
        return self.layers(torch.cat([x, t[:, None], self.classes(label)], dim=1))


@ranks(2)
def test_a_handler_trains_and_samples_under_conditions():
    labels = torch.arange(600) % 3
    data = TensorDataset(
        0.2 * torch.randn(600, 1, generator=torch.Generator().manual_seed(0)) + labels[:, None], labels
    )
    handler = NNHandler(Network, seed=0)
    handler.set_optimizer(torch.optim.Adam, lr=1e-2)
    handler.set_sde("vp", conditional=True, drop_condition=0.1, null_condition=3)
    handler.set_train_loader(data, batch_size=100 // DistributedManager().world_size)
    handler.set_val_loader(data, batch_size=100)
    handler.train(30, ema_decay=0.95)
    wanted = torch.tensor([0, 1, 2]).repeat_interleave(40)
    options = {"num_steps": 100, "seed": 0, "batch_size": 50}
    found = handler.sample((120, 1), condition=wanted, guidance=1.2, **options)
    means = found.reshape(3, 40).mean(1)
    assert means.tolist() == pytest.approx([0, 1, 2], abs=0.35)
    assert handler.validate() == handler.validate()
    assert handler.log_likelihood(found[:4], condition=wanted[:4], seed=0).isfinite().all()


@ranks(2)
def test_conditions_that_differ_or_are_too_few_are_told(rank):
    exact = GaussianAround(SDES["vp"])
    with pytest.raises(PlanMismatchError, match="got different condition"):
        sample(exact, SDES["vp"], (4, 2), torch.full((4, 2), float(rank)), num_steps=2, seed=0)
    with pytest.raises(ValueError, match=r"condition must have one row for each of 4 samples, got \(3, 2\)"):
        sample(exact, SDES["vp"], (4, 2), torch.zeros(3, 2), num_steps=2)
    with pytest.raises(ValueError, match=r"condition must have one row for each of 4 samples, got \(3, 2\)"):
        log_likelihood(exact, SDES["vp"], torch.zeros(4, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="condition must have one row for each of 4 samples"):
        denoising_loss(exact.network, SDES["vp"], torch.zeros(4, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="drop_condition must be between 0 and 1, got 2"):
        denoising_loss(exact.network, SDES["vp"], torch.zeros(4, 2), torch.zeros(4, 2), drop_condition=2)
    with pytest.raises(ValueError, match="drop_condition must be 0 without a condition"):
        denoising_loss(lambda _t, x: x, SDES["vp"], torch.zeros(4, 2), drop_condition=0.1)
    with pytest.raises(ValueError, match="weighting must be 'variance', 'likelihood' or a function, got 'snr'"):
        denoising_loss(lambda _t, x: x, SDES["vp"], torch.zeros(4, 2), weighting="snr")
    with pytest.raises(ValueError, match="weighting must return a weight for each time"):
        denoising_loss(lambda _t, x: x, SDES["vp"], torch.zeros(4, 2), weighting=torch.sum)
    with pytest.raises(ValueError, match="guidance must be 1 without a condition, got 2"):
        score(lambda _t, x: x, SDES["vp"], torch.ones(4), torch.zeros(4, 2), guidance=2)
    with pytest.raises(ValueError, match="method must be one of euler_maruyama, predictor_corrector, probability_flow"):
        sample(lambda _t, x: -x, SDES["vp"], (4, 2), method="ode")
    with pytest.raises(ValueError, match="snr must be above 0 and finite, got 0"):
        sample(lambda _t, x: -x, SDES["vp"], (4, 2), snr=0)
