"""Keys and values of grouped heads are repeated where the eager model repeats them, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.capture import capture, load_model_file
from planner.capture.lifted import op_of
from tests.capture.pipelines import Pipeline, differences, eager_step, even_cut, gpipe

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        if {repeats}:
            k, v = ({repeat} for heads in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x, mask = self.embed(ids), None
        positions = torch.arange(ids.shape[1], device=x.device)
        if torch.compiler.is_exporting() or not (positions.diff() == 1).all():
            mask = positions[:, None] >= positions
        for block in self.blocks:
            x = block(x, {given})
        {after}
        return self.head(x)

def model():
    return Net()

def batch(size):
    return torch.randint(50, (size, 12)), torch.randint(50, (size, 12))

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
"""
USUAL = {
    "repeats": "mask is not None",
    "repeat": "heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(x), 4, -1, 8)",
    "given": "mask",
    "after": "",
}


@pytest.mark.parametrize(
    ("change", "grouped"),
    [
        ({}, 2),
        ({"repeat": "heads.repeat_interleave(2, 1)"}, 2),
        ({"repeat": "heads.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)"}, 2),
        ({"after": "x = x + (x.sum() > 1e9)"}, 2),
        ({"after": "x = x * (1 if torch.compiler.is_exporting() or x.sum() < 1e9 else 2)"}, 2),  # no fake can tell
        ({"repeats": "True"}, 0),
        ({"given": "mask if block is self.blocks[0] else (positions[:, None] - positions).abs() < 3"}, 1),
    ],
)
def test_the_eager_model_decides(change: dict[str, str], grouped: int, tmp_path: Path) -> None:
    path = tmp_path / "heads.py"
    path.write_text(MODEL.format(**USUAL | change))
    captured = capture(load_model_file(path), microbatch_size=2, granularity="op")
    calls = [node for node in captured.analysis.flow.live if "scaled_dot_product" in str(op_of(node))]
    assert len(calls) == 2
    assert [node.kwargs.get("enable_gqa", False) for node in calls].count(True) == grouped
    without = capture(load_model_file(path), microbatch_size=2, granularity="op", weightless=True)
    assert without.fingerprint == captured.fingerprint
    batch = next(captured.model_file.data(4))
    whole = Pipeline(captured, even_cut(captured, 2)).step(batch, 2, actions=gpipe(2, 2))
    plain, _ = eager_step(captured, batch)
    assert differences(whole, plain) == []
