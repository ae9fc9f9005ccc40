"""Models of the kinds that fields outgrow a device with."""

import torch
from torch import nn

from distman.domain import Roll, SpectralConv


class Block(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1)
        self.norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.short = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x):
        return torch.relu(self.second(self.norm(self.first(x)).relu()) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 7, 2, padding=3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Block(4, 4), Block(4, 8, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class UNet(nn.Module):
    """With circular columns, a gate of global means, channels last in the middle, and a time embedding."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.GroupNorm(2, 4), nn.SiLU()
        )
        self.down = nn.Conv2d(4, 8, 3, 2, padding=1)
        self.time = nn.Linear(3, 8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.last = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 8)
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 4, 3, padding=1))
        self.other = nn.ConvTranspose2d(8, 4, 2, 2)
        self.leave = nn.Conv2d(12, 2, 1)
        self.roll = Roll((1, -2), (-2, -1))

    def forward(self, x, time):
        high = self.enter(x)
        low = self.down(high)
        low = low + self.time(time)[:, :, None, None]
        low = low * self.gate(low)
        middle = self.wide(self.last(low.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        a, b = torch.cat([low, middle], 1).chunk(2, dim=1)
        return self.leave(self.roll(torch.cat([high, self.up(a), self.other(b)], dim=1)))


class FNO(nn.Module):
    """A Fourier neural operator: spectral layers beside convolutions of one entry."""

    def __init__(self):
        super().__init__()
        self.lift, self.project = nn.Conv2d(2, 6, 1), nn.Sequential(nn.Conv2d(6, 8, 1), nn.GELU(), nn.Conv2d(8, 2, 1))
        self.spectral = nn.ModuleList(SpectralConv(6, 6, (4, 5)) for _ in range(3))
        self.beside = nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(3))
        self.norm = nn.InstanceNorm2d(6, affine=True)

    def forward(self, x):
        x = self.lift(x)
        for spectral, beside in zip(self.spectral, self.beside, strict=True):
            x = torch.nn.functional.gelu(self.norm(spectral(x)) + beside(x))
        return self.project(x)
