"""Layers that are registered custom ops with a backward of their own, each of which sleeps."""

import time

import torch
from torch import Tensor, nn


@torch.library.custom_op("pipeplan_tests::nap", mutates_args=())
def nap(x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
    time.sleep(forward_s)
    return x * weight


@nap.register_fake
def _(x, weight, forward_s, backward_s):
    return torch.empty_like(x)


@torch.library.custom_op("pipeplan_tests::nap_backward", mutates_args=())
def nap_backward(gradient: Tensor, x: Tensor, weight: Tensor, backward_s: float) -> tuple[Tensor, Tensor]:
    time.sleep(backward_s)
    return gradient * weight, (gradient * x).sum(0)


def _setup(ctx, inputs, output):
    x, weight, _, ctx.backward_s = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    of_x, of_weight = nap_backward(gradient, x, weight, ctx.backward_s)
    return of_x, of_weight, None, None


nap.register_autograd(_backward, setup_context=_setup)


class Nap(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        return nap(x, self.weight, 0.001, 0.001)


def model():
    return nn.Sequential(*(Nap() for _ in range(8)))


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 8)


def loss(output, target):
    return (output - target).square().mean()
