"""A model whose layers only sleep: what an iteration takes beyond the plan's figures is the runtime's own."""

from __future__ import annotations

from pathlib import Path

_TEXT = """
import time

import torch
from torch import nn


def doze(seconds):
    # sleep() wakes up late by 0.1 ms and more: so wake early, and wait
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.0005))
    while time.perf_counter() < end:
        pass


@torch.library.custom_op("{namespace}::nap", mutates_args=())
def nap(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    doze({forward_s})
    return x + weight


@torch.library.custom_op("{namespace}::weigh", mutates_args=())
def weigh(weight: torch.Tensor) -> torch.Tensor:
    return weight.clone()


def nap_back(ctx, gradient):
    doze({backward_s})
    return gradient, gradient.sum(0)


def weigh_back(ctx, gradient):
    doze({weight_s})
    return gradient


nap.register_fake(lambda x, weight: torch.empty_like(x))
nap.register_autograd(nap_back)
weigh.register_fake(lambda weight: torch.empty_like(weight))
weigh.register_autograd(weigh_back)


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
    text = text.replace("    doze(0)\n", "").replace("    doze(0.0)\n", "")
    path.write_text(text)
    return path
