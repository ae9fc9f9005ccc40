"""What is trained in the tests of NNHandler's calls; classes that a file names are in a module that is imported."""

import torch


class Net(torch.nn.Module):
    def __init__(self, width=4, dropout=0.0):
        super().__init__()
        self.inner = torch.nn.Linear(2, width)
        self.drop = torch.nn.Dropout(dropout)
        self.outer = torch.nn.Linear(width, 1)
        self.noise = 1.0

    def forward(self, x, shift=0.0):
        return self.outer(self.drop(torch.tanh(self.inner(x)))) + shift


class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, t, x, condition=0.0):
        return -x + self.weight + condition


class OwnSde:
    epsilon, T = 0.1, 1.0

    def sigma(self, t):
        return 2 * t

    def marginal_prob(self, t, x):
        return x, self.sigma(t)[:, None]
