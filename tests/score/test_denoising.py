import pytest
import torch
from torch import nn

from distman.score import VariancePreserving, denoising_loss, random_stream, score

from .mixture import SDES, ExactScore, Mixture


def exact_model(sde):
    """The network that would be perfect, by the convention."""
    return lambda t, x: ExactScore(sde)(t, x) * sde.marginal(t)[1][:, None]


@pytest.mark.parametrize("name", SDES)
def test_the_score_is_what_the_network_says_over_the_std(name):
    sde = SDES[name]
    t, x = torch.rand(5, dtype=torch.float64) + 1e-3, torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(score(exact_model(sde), sde, t, x), ExactScore(sde)(t, x))


@pytest.mark.parametrize("name", SDES)
def test_the_exact_score_has_the_least_loss(name):
    sde = SDES[name]
    exact, x = exact_model(sde), Mixture().draw(20_000)
    losses = [
        denoising_loss(lambda t, x, c=factor: c * exact(t, x), sde, x, generator=torch.Generator().manual_seed(0))
        for factor in (0.9, 1.0, 1.1)
    ]
    assert losses[1] < min(losses[0], losses[2])
    assert losses[1].shape == ()


class Recorder(nn.Module):
    """Keeps what it was called with, and returns its one number everywhere."""

    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))

    def forward(self, t, x):
        self.t, self.x = t, x
        return self.level.expand_as(x)


def test_loss_and_gradient_of_a_known_network():
    sde, model, x = VariancePreserving(), Recorder(), Mixture().draw(50).reshape(25, 2, 2)
    loss = denoising_loss(model, sde, x, generator=torch.Generator().manual_seed(3))
    loss.backward()
    scale, std = (value[:, None, None] for value in sde.marginal(model.t))
    noise = (model.x - scale * x) / std
    torch.testing.assert_close(loss.detach(), (0.25 + noise).square().sum(dim=(1, 2)).mean())
    torch.testing.assert_close(model.level.grad, 2 * (0.25 + noise).sum(dim=(1, 2)).mean())
    assert sde.epsilon <= model.t.min() <= model.t.max() <= sde.horizon
    torch.testing.assert_close(model.t.sort().values.diff(), torch.full((24,), 0.04).double(), rtol=1e-3, atol=0)
    assert noise.std().item() == pytest.approx(1.0, abs=0.2)


def test_with_a_generator_the_default_one_is_not_touched():
    before = torch.get_rng_state()
    results = [
        denoising_loss(Recorder(), VariancePreserving(), torch.ones(4, 2).double(), generator=random_stream("a", 0, 1))
        for _ in range(2)
    ]
    assert torch.equal(*results)
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_differ_by_purpose_seed_and_index():
    keys = [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0), ("a", -1, 0), ("a", 0, 2**31)]
    numbers = {torch.randint(2**62, (), generator=random_stream(*key)).item() for key in keys}
    assert len(numbers) == len(keys)


def test_wrong_shapes_are_one_sentence():
    sde, x = VariancePreserving(), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"model\(t, x\) must have the shape of x, \(3, 2\), got \(3, 1\)"):
        denoising_loss(lambda _, x: x[:, :1], sde, x)
    with pytest.raises(ValueError, match=r"t must have one time for each sample"):
        score(lambda _, x: x, sde, torch.ones(()), x)
    for bad in (torch.ones(0, 2), torch.ones(2, 2).int(), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x must hold floating-point samples, got torch\."):
            denoising_loss(lambda _, x: x, sde, bad)
