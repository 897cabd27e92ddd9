"""A model whose third layer fails, once it has run for a while: how, is written in as FAULT."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor, nn

FAULT = "none"
CALLS_BEFORE = 9
_calls = 0


def break_down() -> None:
    if FAULT == "raise":
        raise ValueError("the weather is bad")
    if FAULT == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "leave":
        os._exit(7)
    if FAULT == "finish":
        os._exit(0)
    if FAULT == "hang":
        time.sleep(1000)
    if FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


@torch.library.custom_op("faulty::step", mutates_args=())
def step(x: Tensor) -> Tensor:
    global _calls
    _calls += 1
    if _calls > CALLS_BEFORE:
        break_down()
    return x.clone()


step.register_fake(lambda x: torch.empty_like(x))
step.register_autograd(lambda ctx, gradient: gradient)


class Layer(nn.Module):
    def __init__(self, faulty: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.faulty = faulty

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return step(x) if self.faulty else x


def model() -> nn.Module:
    return nn.Sequential(*(Layer(number == 2) for number in range(4)))


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.zeros(size)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()
