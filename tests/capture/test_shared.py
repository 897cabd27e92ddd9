"""A module with two parents, one of which may be kept whole: cut anywhere it is still one module, called as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.capture import EagerReference, capture, load_model_file
from tests.capture.pipelines import Pipeline, Trained, differences, even_cut, gpipe

TEXT = '''
import torch
from torch import nn

class Own(torch.autograd.Function):
    """Its backward is not that of its forward, so that a lost one shows."""
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8)
    def forward(self, x):
        y = self.norm(self.linear(x.reshape(-1, 8))).reshape(x.shape)
        return x + self.dropout(BODY)

class Holder(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.before, self.part, self.after = nn.Linear(8, 8), part, nn.Linear(8, 8)
    def forward(self, x):
        return self.after(self.part(self.before(x)).tanh())

class Net(nn.Module):
    """a and b share their part, and call it on other shapes; blocks.2 is blocks.0."""
    def __init__(self):
        super().__init__()
        part = Part()
        self.a, self.b, self.c = Holder(part), Holder(part), Holder(Part())
        self.blocks = nn.ModuleList([Holder(Part()), Holder(Part())])
        self.blocks.append(self.blocks[0])
    def forward(self, x):
        x = self.c(self.b(torch.cat([self.a(x), x], 1)))
        for block in self.blocks:
            x = block(x)
        return x

def model():
    return Net()
def batch(size):
    return torch.randn(size, 3, 8), torch.randn(size, 6, 8)
def loss(output, target):
    return (output - target).square().mean()
'''
BODIES = {"plain": "y", "function": "Own.apply(y)", "branch": "y if y.sum() > 0 else -y"}
LEAVES: tuple[tuple[str, ...], ...] = ((), ("b.part",), ("a",), ("b",), ("a", "b.part"), ("a.part", "b"), ("blocks.2",))


@pytest.mark.parametrize(
    ("body", "leaves"),
    [
        pytest.param(body, leaves, marks=() if (body, leaves) == ("branch", ("a", "b.part")) else pytest.mark.slow)
        for body in BODIES
        for leaves in LEAVES
    ],
)
def test_a_shared_module_is_called_under_both_names(body: str, leaves: tuple[str, ...], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = tmp_path / "shared.py"
    path.write_text(f"{TEXT.replace('BODY', BODIES[body])}\nleaves = {list(leaves)}\n")
    captured = capture(load_model_file(path), microbatch_size=2)
    without = capture(captured.model_file, microbatch_size=2, weightless=True)
    assert without.fingerprint == captured.fingerprint
    assert [layer.name for layer in without.layers] == [layer.name for layer in captured.layers]
    batch = next(captured.model_file.data(4))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, 2, actions=gpipe(1, 2))
    step = Pipeline(captured, even_cut(captured, 5), recompute=True).step(batch, 2, actions=gpipe(5, 2))
    assert differences(whole, step) == []
    eager = EagerReference(captured)
    losses = eager.step(batch, seed=7, step=0)
    plain = {name: parameter.grad for name, parameter in eager.module.named_parameters()}
    found = set(differences(whole, Trained(losses, plain, dict(eager.module.named_buffers()))))
    assert eager.aligned
    assert {name.partition(".")[0] for name in found} <= {"a", "blocks"}  # summed layer by layer, not use by use
    for name in found:
        torch.testing.assert_close(whole.gradients[name], plain[name], rtol=1e-5, atol=1e-6)
