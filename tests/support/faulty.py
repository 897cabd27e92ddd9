"""A model that fails in one rank, once it has run for a while: how and where is written in as FAULT and PLACE."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

FAULT = "none"
PLACE = "forward"
CALLS_BEFORE = 9
_calls = 0


def break_down() -> None:
    global _calls
    _calls += 1
    if _calls <= CALLS_BEFORE:
        return
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
    if PLACE == "forward":
        break_down()
    return x.clone()


@torch.library.custom_op("faulty::back", mutates_args=())
def back(x: Tensor) -> Tensor:
    if PLACE == "backward":
        break_down()
    return x.clone()


step.register_fake(lambda x: torch.empty_like(x))
step.register_autograd(lambda ctx, gradient: back(gradient))
back.register_fake(lambda x: torch.empty_like(x))


def replace(owner: Any, name: str) -> None:
    """Let one of the runtime's own functions fail in the last process."""
    whole = getattr(owner, name)

    def broken(*given: Any, **named: Any) -> Any:
        if os.environ.get("RANK") == "1":
            break_down()
        return whole(*given, **named)

    setattr(owner, name, broken)


if PLACE == "sum":
    from planner.runtime.replicas import Replicas

    replace(Replicas, "finish")
if PLACE == "checkpoint":
    from planner.runtime import checkpoint

    replace(checkpoint, "write_synced")


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
