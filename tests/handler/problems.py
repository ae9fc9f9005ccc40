"""Small problems to train on, and what one process without the package makes of them."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distman._base.seeds import seed_of
from distman.collectives import all_gather_objects
from distman.handler import Callback, NNHandler

NUM_SAMPLES = 65
GLOBAL_BATCH = 16


def regression(dtype=torch.float64, num_samples=NUM_SAMPLES):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    targets = (inputs.sin().sum(dim=1, keepdim=True) + 0.1 * inputs[:, :1]).to(dtype)
    return TensorDataset(inputs.to(dtype), targets)


class Network(nn.Module):
    def __init__(self, width=8, dtype=torch.float64, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(4, width, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(width, 1, dtype=dtype)

    def forward(self, inputs):
        return self.second(self.dropout(self.first(inputs).tanh()))


class Rates(Callback):
    """Keeps the learning rate with which each step was taken."""

    def __init__(self):
        self.rates, self.rate = [], 0.0

    def on_train_batch_start(self, handler, batch):
        self.rate = handler.optimizer.param_groups[0]["lr"]

    def on_step_end(self, handler, step):
        self.rates.append(self.rate)

    def state_dict(self):
        return {"rates": [*self.rates], "rate": self.rate}

    def load_state_dict(self, state):
        self.rates, self.rate = [*state["rates"]], state["rate"]


def make_handler(batch_size, *, dtype=torch.float64, data=None, dropout=0.0, lr=0.02, **kwargs):
    """Return a handler of a network with a regression."""
    handler = NNHandler(Network, seed=1, dtype=dtype, dropout=dropout, **kwargs)
    handler.set_optimizer(torch.optim.Adam, lr=lr)
    handler.set_loss_fn(nn.functional.mse_loss)
    handler.set_train_loader(regression(dtype) if data is None else data, batch_size=batch_size)
    return handler


def reference(epochs, *, accumulate=1, dtype=torch.float64, clip_norm=None, lr=0.02):
    """Return loss of each epoch and final weights of one process that sees every batch as a whole."""
    torch.manual_seed(seed_of(1))
    model = Network(dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    inputs, targets = regression(dtype).tensors
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed_of(1, epoch)))
        total = 0.0
        for window in order.split(GLOBAL_BATCH * accumulate):
            loss = nn.functional.mse_loss(model(inputs[window]), targets[window])
            optimizer.zero_grad()
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            total += loss.item() * len(window)
        losses.append(total / len(inputs))
    return losses, [parameter.detach() for parameter in model.parameters()]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, inputs):
        return self.last(self.norm(inputs))


def assert_same_on_all_ranks(module):
    weights = [parameter.detach() for parameter in module.parameters()]
    for other in all_gather_objects(weights):
        assert all(torch.equal(one, two) for one, two in zip(weights, other, strict=True))
