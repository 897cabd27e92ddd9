"""Sparse gradients, which torch makes for embeddings that ask for them: over ranks and replicas as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import captured, plan_of, run

from planner.errors import InputError

MODEL = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.linear = table, nn.Linear(8, 8)
    def forward(self, pair):
        ids, x = pair
        return ids, self.linear(x + self.table(ids)).tanh()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        tied = nn.Embedding(9, 8, sparse=True)
        tables = [tied, tied, nn.Embedding(9, 8, sparse=True), tied]
        self.blocks = nn.ModuleList(Part(table) for table in tables)
        self.head = nn.Linear(8, 9)
        if HEAD:
            self.head.weight = tied.weight
    def forward(self, ids):
        x = torch.zeros(*ids.shape, 8)
        for block in self.blocks:
            _, x = block((ids, x))
        return self.head(x)

def model():
    return Net()

def batch(size):
    return torch.randint(9, (size, 6)), torch.randn(size, 6, 9)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

def optimizer(params):
    return torch.optim.SGD(params, lr=0.3)
"""


def model_of(folder: Path, *, head: bool) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.replace("HEAD", str(head)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_sparse_gradients_train_as_in_one_process(ranks: int, data: int, head: bool, tmp_path: Path) -> None:
    """Of one layer, of several, and added to a dense one's, which comes first where the head is tied."""
    path = model_of(tmp_path, head=head)
    layers = [layer.name for layer in captured(path, 2).layers]
    tied = [name for name in layers if name.endswith("table") and name != "blocks.2.table"]
    assert len(tied) == 3
    verified = run(
        plan_of(path, num_ranks=ranks, data=data, microbatches=4 // data), tmp_path, steps=3, verify=True
    ).result.verify
    assert verified is not None
    assert verified.equal, verified
    assert verified.largest_weight_difference == 0.0
    assert verified.eager_difference is not None
    assert verified.eager_difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sparse_gradient_has_no_norm(ranks: int, tmp_path: Path) -> None:
    path = model_of(tmp_path, head=False)
    path.write_text(f"{path.read_text()}\nclip_norm = 1.0\n")
    with pytest.raises(InputError, match=r"clip_norm: the gradient of .* is sparse.*leave out sparse=True"):
        run(plan_of(path, num_ranks=ranks, microbatches=4), tmp_path)
