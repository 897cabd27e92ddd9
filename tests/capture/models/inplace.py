"""In-place ops where a cut may fall, on inputs, on buffers and through views; regions under no_grad and autocast."""

import torch
from torch import nn
from torch.nn import functional


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x.relu_()
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.calls += 1
        x = x + self.seen
        return self.linear(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 12)
        self.steps = nn.ModuleList(Step() for _ in range(5))
        self.mixed = nn.Linear(12, 12)
        self.leave = nn.Linear(12, 12)

    def forward(self, x):
        x.mul_(2)
        h = self.enter(x)
        for index, step in enumerate(self.steps):
            h = step(h)
            if index == 1:
                h[:, :3].mul_(0.5)
            if index == 2:
                h.add_(x.sum(1, keepdim=True))
        with torch.autocast("cpu", torch.bfloat16):
            h = self.mixed(h)
        h = self.leave(h.float())
        h += 1
        return functional.dropout(h, 0.3).sigmoid_()


def model():
    return Net()


def batch(size):
    return torch.randn(size, 4), torch.rand(size, 12)


def loss(output, target):
    return (output - target).pow(2).mean()
