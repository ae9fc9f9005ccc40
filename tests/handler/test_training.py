import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.handler import NNHandler
from distman.testing import ranks

from .problems import GLOBAL_BATCH, Network, assert_same_on_all_ranks, make_handler, reference, regression


@ranks(1, 4)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "accumulate"), [(torch.float64, 1e-10, 3), (torch.float32, 1e-5, 1)], ids=str
)
def test_any_number_of_ranks_learns_what_one_process_learns(dtype, tolerance, accumulate, world_size):
    handler = make_handler(GLOBAL_BATCH // world_size, dtype=dtype)
    losses, weights = reference(4, accumulate=accumulate, dtype=dtype)
    history = handler.train(4, accumulate=accumulate)
    assert history["loss"] == pytest.approx(losses, rel=tolerance)
    assert history["epoch"] == [0, 1, 2, 3]
    assert handler.num_steps == 4 * -(-65 // (GLOBAL_BATCH * accumulate))
    for own, expected in zip(handler.module.parameters(), weights, strict=True):
        torch.testing.assert_close(own.detach(), expected, rtol=100 * tolerance, atol=tolerance)
    assert_same_on_all_ranks(handler.module)


@pytest.fixture
def nobody():
    """A process without a manager, before and after."""
    DistributedManager.cleanup()
    yield
    DistributedManager.cleanup()


@pytest.mark.usefixtures("nobody")
def test_it_initializes_the_manager_if_nobody_has():
    handler = NNHandler(nn.Linear, in_features=2, out_features=1)
    assert DistributedManager.is_initialized()
    assert handler.model is handler.module
    handler.set_optimizer(torch.optim.SGD, lr=0.1, parameters=lambda model: [model.weight])
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(TensorDataset(torch.ones(3, 2), torch.ones(3, 1)), batch_size=2)
    bias = handler.module.bias.detach().clone()
    handler.train(1)
    assert torch.equal(handler.module.bias, bias)


@ranks(1)
@pytest.mark.parametrize("epochs", ["3", 3.0, None])
def test_epochs_are_whole(epochs):
    with pytest.raises(TypeError, match=re.escape(f"epochs must be a whole number, got {epochs!r}. ")):
        make_handler(8).train(epochs)


class Checkpointed(Network):
    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
        again = checkpoint(self.first, inputs, use_reentrant=True)
        return self.second(((hidden + again) / 2).tanh())


@ranks(1, 2)
def test_a_static_graph_may_use_a_parameter_several_times(world_size):
    """DistributedDataParallel learns the graph from the first backward pass, so that has to be one of the model's."""
    handler = NNHandler(Checkpointed, seed=1, strategy_options={"static_graph": True})
    handler.set_optimizer(torch.optim.Adam, lr=0.02)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(), batch_size=GLOBAL_BATCH // world_size)
    assert handler.train(3)["loss"] == pytest.approx(reference(3)[0], rel=1e-10)
