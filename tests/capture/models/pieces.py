"""A tensor filled piece by piece through views, weights read turned round and by several ops, expanded gradients."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.embed = nn.Embedding(10, WIDTH, padding_idx=1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x, index):
        first, second, third, fourth = self.parts
        out = torch.zeros(x.shape[0], 4, WIDTH)
        h = first(x)
        out[:, 0] = h
        h = second(h)
        out[:, 1] = h
        self.mean.lerp_(h.detach().mean(0), 0.1)
        h = third(h) + self.mean
        out[:, 2] = h
        out[:, 3] = self.embed(index)
        h = fourth(out.flatten(1)[:, :WIDTH] * (x > 0).float())
        pair = torch.stack([h, out[:, 1]], 1)
        pair[pair > 1] = 0.5
        turned = functional.linear(h, fourth.weight.t(), first.bias)
        products = torch.addmm(second.bias, h, third.weight) + torch.mm(h, third.weight.t())
        return (pair.sum(1) + turned * products.sigmoid()).tanh(), h.expand(3, *h.shape).mean(0)


def model():
    return Net()


def batch(size):
    return (torch.randn(size, WIDTH), torch.randint(10, (size,))), torch.randn(size, WIDTH)


def loss(output, target):
    return (output[0] - target).abs().mean() + output[1].mean() ** 2
