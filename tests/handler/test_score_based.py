import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from distman.collectives import all_gather_objects
from distman.errors import PlanMismatchError
from distman.handler import NNHandler
from distman.score import VarianceExploding, log_likelihood, sample, score
from distman.testing import ranks


class ScoreNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, t, x):
        return self.layers(torch.cat([x, t[:, None]], dim=1))


def normal_samples(num):
    return torch.randn(num, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + torch.tensor([1.0, -1.0])


def trained_handler(world_size, **kwargs):
    handler = NNHandler(ScoreNetwork, seed=0)
    handler.set_sde("vp", **kwargs)
    handler.set_optimizer(torch.optim.Adam, lr=5e-3)
    handler.set_train_loader(TensorDataset(normal_samples(512)), batch_size=64 // world_size)
    handler.set_val_loader(normal_samples(65), batch_size=8)
    handler.train(25, ema_decay=0.9)
    return handler


@ranks(1, 2)
def test_a_density_is_learned_and_asked_for(world_size):
    handler = trained_handler(world_size)
    assert handler.history["loss"][-1] < 0.8 * handler.history["loss"][0]
    assert all(loss == loss for loss in handler.history["val_loss"])
    drawn = handler.sample((401, 2), num_steps=50, seed=3)
    assert drawn.shape == (401, 2)
    torch.testing.assert_close(drawn.mean(0), torch.tensor([1.0, -1.0]), rtol=0, atol=0.25)
    torch.testing.assert_close(drawn.std(0), torch.tensor([0.5, 0.5]), rtol=0, atol=0.25)
    everyone = all_gather_objects(drawn)
    assert all(torch.equal(drawn, other) for other in everyone)
    alone = handler.sample((5, 2), num_steps=10, seed=3, rank_zero=True)
    assert alone.shape == (5, 2)
    points = normal_samples(11)
    found = handler.log_likelihood(points, num_probes=None, rtol=1e-3, atol=1e-3)
    exact = torch.distributions.Normal(torch.tensor([1.0, -1.0]), 0.5).log_prob(points).sum(1)
    assert abs(found.mean() - exact.mean()) < 0.3


@ranks(2)
def test_what_it_returns_is_what_the_parts_return():
    handler = NNHandler(ScoreNetwork, seed=0)
    equation = VarianceExploding(sigma_max=5.0)
    handler.set_sde(equation)

    def own_score(t, x):
        return score(handler.module, equation, t, x)

    points = normal_samples(3)
    assert torch.equal(
        handler.sample((3, 2), num_steps=5, seed=1), sample(own_score, equation, (3, 2), num_steps=5, seed=1)
    )
    assert torch.equal(handler.log_likelihood(points, seed=1), log_likelihood(own_score, equation, points, seed=1))
    assert handler.module.training


@ranks(2)
def test_wrong_equations_and_arguments_that_differ(rank):
    handler = NNHandler(ScoreNetwork)
    with pytest.raises(ValueError, match="sde must be 'vp', 've', or an equation without options, got 'vq'"):
        handler.set_sde("vq")
    with pytest.raises(ValueError, match="or an equation without options"):
        handler.set_sde(VarianceExploding(), sigma_max=3.0)
    handler.set_sde("ve", sigma_max=3.0)
    with pytest.raises(PlanMismatchError):
        handler.sample((3 + rank, 2), num_steps=5, seed=1)


@ranks(1, 2)
def test_validation_draws_the_same_noise_each_time_and_none_of_the_training(world_size):
    found = []
    for validate_every in (1, 3):
        handler = NNHandler(ScoreNetwork, seed=0)
        handler.set_sde("ve")
        handler.set_optimizer(torch.optim.Adam, lr=5e-3)
        handler.set_train_loader(TensorDataset(normal_samples(64)), batch_size=16 // world_size)
        handler.set_val_loader(normal_samples(33), batch_size=8)
        handler.train(3, validate_every=validate_every)
        found.append(handler.history)
        assert handler.validate() == handler.validate() == {"loss": handler.history["val_loss"][-1]}
    assert found[0]["loss"] == found[1]["loss"]
    assert found[0]["val_loss"][-1] == found[1]["val_loss"][-1]
