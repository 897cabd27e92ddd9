"""Random small models with random skips, shared and in-place parts, cut at random, run in a random order."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from planner.capture import EagerReference, ModelFile, capture
from tests.capture.pipelines import Pipeline, Trained, differences, gpipe, random_cut, random_order

WIDTH, TOKENS = 8, 4
KINDS = ("linear", "mlp", "norm", "batch_norm", "in_place", "shared", "matmul", "turned", "attention", "scaled", "cell")


class Unit(nn.Module):
    """One random part: reads one or two tensors [samples, TOKENS, WIDTH], gives one."""

    def __init__(self, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.linear = shared if kind == "shared" else nn.Linear(WIDTH, WIDTH, bias=kind != "matmul")
        if kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "batch_norm":
            self.norm = nn.BatchNorm1d(TOKENS)
        elif kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        elif kind == "cell":
            self.cell = nn.Conv1d(TOKENS, TOKENS, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kind = self.kind
        if kind == "in_place":
            x = (x + y).mul_(1.5).relu_()
            return self.linear(x).add_(1)
        if kind in ("norm", "batch_norm"):
            return self.linear(self.norm(x)) + y
        if kind == "matmul":
            return functional.dropout(x @ self.linear.weight, 0.2) - y
        if kind == "turned":
            return self.linear(x.transpose(1, 2).reshape(-1, TOKENS, WIDTH)).transpose(1, 2).reshape(x.shape) * y
        if kind == "attention":
            return x + self.attention(y, x, x, need_weights=False)[0]
        if kind == "scaled":
            return self.linear(torch.cat([x[..., : WIDTH // 2], y[..., WIDTH // 2 :]], -1)) * y.mean(1, keepdim=True)
        if kind == "cell":
            return self.cell(x).tanh() + y
        return functional.dropout(self.linear(x), 0.1) + y


class Net(nn.Module):
    """Units that read any earlier tensors; some of them are views without contiguous memory."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        count = random.randint(2, 9)
        self.units = nn.ModuleList(Unit(random.choice(KINDS), shared) for _ in range(count))
        self.reads = [(random.randint(0, index), random.randint(0, index)) for index in range(count)]
        self.turns = [random.random() < 0.2 for _ in range(count)]
        self.frozen = [random.random() < 0.1 for _ in range(count)]
        for unit, frozen in zip(self.units, self.frozen, strict=True):
            if frozen:
                unit.requires_grad_(False)
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = [self.enter(x)]
        for unit, (first, second), turn in zip(self.units, self.reads, self.turns, strict=True):
            new = unit(made[first], made[second])
            made.append(new.transpose(1, 2).contiguous().transpose(1, 2) if turn else new)
        read = {index for pair in self.reads for index in pair}
        return self.leave(sum(tensor for index, tensor in enumerate(made) if index not in read))


def model_file(seed: int) -> ModelFile:
    functions = {
        "model": lambda: Net(Random(seed)),
        "batch": lambda size: (torch.randn(size, TOKENS, 3), torch.randn(size, TOKENS, 2)),
        "loss": lambda output, target: functional.mse_loss(output, target),
    }
    return ModelFile(path=Path("random.py"), global_batch=None, leaves=(), functions=functions)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=2484977)  # a shared module's second name heads a layer
def test_random_models_equal_one_stage(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_many_random_models_equal_one_stage(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    """A random model cut at random twice."""
    torch.set_num_threads(1)
    random = Random(seed)
    captured = capture(
        model_file(seed), microbatch_size=2, granularity=random.choice(["block", "module", "op"]), seed=seed % 97
    )
    batch = next(captured.model_file.data(6, seed=seed))
    everything = [[layer.name for layer in captured.layers]]
    whole = Pipeline(captured, everything).step(batch, 3, actions=gpipe(1, 3))

    eager = EagerReference(captured)
    losses = eager.step(batch, seed=7, step=0)
    assert eager.aligned
    plain = Trained(
        losses,
        {name: parameter.grad for name, parameter in eager.module.named_parameters()},
        dict(eager.module.named_buffers()),
    )
    for name in differences(whole, plain):  # tied parameters sum their gradients layer by layer
        first, second = whole.gradients[name], plain.gradients[name]
        assert first is not None, name
        assert second is not None, name
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-6 * second.abs().max().item()), name

    for split in (False, True):
        cut = random_cut(captured, random.randint(2, 5), random)
        pipeline = Pipeline(captured, cut, recompute=random.random() < 0.3)
        for stage in pipeline.stages:
            stage._defer = stage._defer and random.random() < 0.5
        step = pipeline.step(batch, 3, actions=random_order(len(cut), 3, random, split=split))
        assert differences(whole, step) == [], (cut, split)
