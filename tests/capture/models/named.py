"""Named tuples in a batch: the model and the loss read their fields."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Sentence(NamedTuple):
    ids: Tensor
    rest: Tensor


class Wanted(NamedTuple):
    value: Tensor
    weight: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(16, 1)

    def forward(self, sentence, scale):
        x = self.embed(sentence.ids).mean(1) + sentence.rest
        for block in self.blocks:
            x = block(x * scale)
        return self.head(x)


def model():
    return Model()


def batch(size):
    wanted = Wanted(value=torch.randn(size, 1), weight=torch.rand(size, 1))
    return (Sentence(torch.randint(50, (size, 4)), torch.randn(size, 16)), torch.ones(size, 1)), wanted


def loss(output, target):
    return functional.mse_loss(output * target.weight, target.value)
