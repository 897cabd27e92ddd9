"""Batch norm, skips over several stages, one read by many layers, transposed convolutions, strided views at cuts."""

import torch
from torch import nn
from torch.nn import functional


class Unit(nn.Module):
    def __init__(self, channels, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=bias, groups=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return functional.relu(self.norm(self.conv(x)), inplace=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.units = nn.ModuleList(Unit(8, bias=index % 2 == 0) for index in range(6))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(8, 8, 2, stride=2) for _ in range(2))
        self.joins = nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(3))
        self.leave = nn.Linear(8, 5)

    def forward(self, x):
        first = self.enter(x)
        h, kept = first, []
        for unit in self.units[:3]:
            kept.append(h)
            h = functional.dropout2d(unit(h), 0.1) + first
        for unit, join, skip in zip(self.units[3:], self.joins, reversed(kept), strict=True):
            h = join(torch.cat([unit(h), skip], dim=1)) + first.mean(dim=(2, 3), keepdim=True)
        h = self.grow[1](functional.max_pool2d(self.grow[0](h), 2))
        tokens = h.flatten(2).transpose(1, 2)  # no contiguous memory at this cut
        return self.leave(tokens)[:, 0]


def model():
    return Net()


def batch(size):
    return torch.randn(size, 3, 8, 8), torch.randint(5, (size,))


def loss(output, target):
    return functional.cross_entropy(output, target)
