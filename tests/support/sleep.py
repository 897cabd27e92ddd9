"""A model whose layers only sleep: what an iteration takes beyond the plan's figures is the runtime's own."""

from __future__ import annotations

from pathlib import Path

_TEXT = """
import time

import torch
from torch import nn


@torch.library.custom_op("{namespace}::nap", mutates_args=())
def nap(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    time.sleep({forward_s})
    return x + weight


@torch.library.custom_op("{namespace}::nap_back", mutates_args=())
def nap_back(gradient: torch.Tensor) -> torch.Tensor:
    time.sleep({backward_s})
    return gradient.clone()


@torch.library.custom_op("{namespace}::weigh", mutates_args=())
def weigh(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone()


@torch.library.custom_op("{namespace}::weigh_back", mutates_args=())
def weigh_back(gradient: torch.Tensor) -> torch.Tensor:
    time.sleep({weight_s})
    return gradient.clone()


nap.register_fake(lambda x, weight: torch.empty_like(x))
nap_back.register_fake(lambda gradient: torch.empty_like(gradient))


def backward(ctx, gradient):
    made = nap_back(gradient)
    return made, made.sum(0)


nap.register_autograd(backward)
weigh.register_fake(lambda weight: torch.empty_like(weight))
weigh_back.register_fake(lambda gradient: torch.empty_like(gradient))
weigh.register_autograd(lambda ctx, gradient: weigh_back(gradient))


class Nap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({width}))

    def forward(self, x):
        return nap(x, {weight})


def model():
    return nn.Sequential(*(Nap() for _ in range({layers})))


def batch(size):
    return torch.randn(size, {width}), torch.zeros(size)


def loss(output, target):
    return output.mean()


def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


def write_sleep_model(
    path: Path,
    *,
    layers: int,
    forward_s: float,
    backward_s: float,
    weight_s: float | None = None,
    width: int = 256,
) -> Path:
    """Write the model file. With no time to sleep the layers do nothing at all.

    ``weight_s``: what an op on the weight alone sleeps in its backward, which a split backward leaves to W.
    """
    text = _TEXT.format(
        layers=layers,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s or 0,
        weight="self.weight" if weight_s is None else "weigh(self.weight)",
        width=width,
        namespace=path.stem,
    )
    text = text.replace("    time.sleep(0)\n", "").replace("    time.sleep(0.0)\n", "")
    path.write_text(text)
    return path
