import math

import pytest
import torch

from distman.score import VarianceExploding, VariancePreserving

from .mixture import SDES, ExactScore, Mixture

EQUATIONS = [*SDES.values(), VariancePreserving(1.0, 5.0, horizon=2.0), VarianceExploding(0.1, 9.0, horizon=3.0)]


def times(sde, num=7):
    return torch.linspace(sde.epsilon, sde.horizon, num, dtype=torch.float64)


@pytest.mark.parametrize("sde", EQUATIONS, ids=str)
def test_the_kernel_solves_the_equations_of_its_moments(sde):
    t = times(sde).requires_grad_()
    scale, std = sde.marginal(t)
    (scale_rate,) = torch.autograd.grad((scale + 0 * t).sum(), t, retain_graph=True)  # a scale may be constant
    (variance_rate,) = torch.autograd.grad(std.square().sum(), t)
    rate = sde.drift(t, torch.ones(len(t), 1, dtype=torch.float64))[:, 0]  # the drift is this times x
    torch.testing.assert_close(scale_rate, rate * scale)
    torch.testing.assert_close(variance_rate, 2 * rate * std.square() + sde.diffusion(t).square())


@pytest.mark.parametrize("sde", EQUATIONS, ids=str)
def test_the_kernel_starts_at_the_data_and_ends_at_the_prior(sde):
    zero, end = (torch.tensor([time], dtype=torch.float64) for time in (0.0, sde.horizon))
    assert [value.item() for value in sde.marginal(zero)] == [1.0, 0.0]
    assert sde.marginal(end)[1].item() == pytest.approx(sde.prior_std, abs=2e-3)


def test_moments_of_times_that_are_small_are_exact_in_single_precision():
    for sde in SDES.values():
        t = torch.tensor([1e-5, 1e-4, 1e-3])
        for single, double in zip(sde.marginal(t), sde.marginal(t.double()), strict=True):
            torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sde", EQUATIONS, ids=str)
def test_the_prior_is_a_gaussian(sde):
    x = sde.sample_prior((5, 2, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    again = sde.sample_prior((5, 2, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(x, again)
    expected = torch.distributions.Normal(0.0, sde.prior_std).log_prob(x).sum(dim=(1, 2))
    torch.testing.assert_close(sde.prior_log_density(x), expected)
    many = sde.sample_prior((20_000, 1), generator=torch.Generator().manual_seed(0))
    assert many.std().item() == pytest.approx(sde.prior_std, rel=0.02)
    assert sde.prior_log_density(x[:0]).shape == (0,)


@pytest.mark.parametrize("name", SDES)
def test_the_oracle_is_the_gradient_of_the_density_under_noise(name):
    sde = SDES[name]
    x = Mixture().draw(6).requires_grad_()
    t = times(sde, 6)
    scale, std = (value[:, None] for value in sde.marginal(t))
    (expected,) = torch.autograd.grad(Mixture().log_density(x, scale, std).sum(), x)
    torch.testing.assert_close(ExactScore(sde)(t, x), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VariancePreserving(2.0, 1.0), r"beta_min must be above 0 and at most beta_max, got beta_min 2\.0"),
        (lambda: VariancePreserving(0.0), r"beta_min must be above 0"),
        (lambda: VariancePreserving(beta_max=math.inf), r"beta_max inf\. Pass rates such as 0\.1 and 20\."),
        (lambda: VariancePreserving(math.nan), r"beta_min must be above 0"),
        (lambda: VarianceExploding(1.0, 1.0), r"sigma_min must be above 0 and below sigma_max, got sigma_min 1\.0"),
        (lambda: VarianceExploding(epsilon=1.0), r"epsilon must be above 0 and below the horizon, got epsilon 1\.0"),
        (lambda: VariancePreserving(horizon=math.inf), r"below the horizon, .* horizon inf"),
    ],
)
def test_wrong_parameters_are_one_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_each_sample_needs_a_time():
    for sde in SDES.values():
        with pytest.raises(ValueError, match=r"t must have one time for each sample of shape \(3, 2\), got shape \(1,"):
            sde.drift(torch.ones(1), torch.ones(3, 2))
