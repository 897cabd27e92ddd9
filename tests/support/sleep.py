"""A model whose layers only sleep: what an iteration takes beyond the plan's figures is the runtime's own."""

from __future__ import annotations

import zlib
from pathlib import Path

_TEXT = """
import time

import torch
from torch import nn


def doze(seconds):
    # sleep() wakes up late by 0.1 ms and more: so wake early, and wait
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.00015))
    while time.perf_counter() < end:
        pass


def nap(x, weight):
    doze({forward_s})
    return x + weight


def weigh(weight):
    return weight.clone()


class GeneratedBackwardFor_nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.{namespace}.nap(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        doze({backward_s})
        return gradient, gradient.sum(0)


class GeneratedBackwardFor_weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.{namespace}.weigh(weight)

    @staticmethod
    def backward(ctx, gradient):
        doze({weight_s})
        return gradient


# What torch.library.custom_op does, without the hundred microseconds that it takes after a nap
if not hasattr(torch.ops.{namespace}, "nap"):
    torch._lib_{namespace} = library = torch.library.Library("{namespace}", "FRAGMENT")
    library.define("nap(Tensor x, Tensor weight) -> Tensor")
    library.define("weigh(Tensor weight) -> Tensor")
    for op, run, way_back in (("nap", nap, GeneratedBackwardFor_nap), ("weigh", weigh, GeneratedBackwardFor_weigh)):
        library.impl(op, run, "CPU")
        library.impl(op, way_back.apply, "AutogradCPU")
        torch.library.register_fake("{namespace}::" + op, lambda first, *rest: torch.empty_like(first), lib=library)


class Nap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({width}))

    def forward(self, x):
        return torch.ops.{namespace}.nap(x, {weight})


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
    namespace = f"naps_{zlib.crc32(repr((path, layers, forward_s, backward_s, weight_s, width)).encode()):x}"
    text = _TEXT.format(
        layers=layers,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s or 0,
        weight="self.weight" if weight_s is None else f"torch.ops.{namespace}.weigh(self.weight)",
        width=width,
        namespace=namespace,
    )
    text = text.replace("    doze(0)\n", "").replace("    doze(0.0)\n", "")
    path.write_text(text)
    return path
