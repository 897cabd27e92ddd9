"""Faults seen in torch.distributed.pipelining 2.13, and the tests that show each absent here: most lie elsewhere."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from support.runs import EVERYTHING, captured, plan_of, run

from planner.capture import Capture, capture, load_model_file
from planner.schedules import ScheduleName
from tests.capture.pipelines import Pipeline, Trained, even_cut, gpipe

TESTS = Path(__file__).parents[1]
M = 4

HERE = "runtime/test_torch_faults.py"
FAULTS = {
    "batch norm counts one batch more, on memory that nobody filled": (
        HERE,
        "test_batch_norm_counts_each_micro_batch_once",
    ),
    "a second step scales the first one's gradients again": (
        HERE,
        "test_a_second_step_starts_from_nothing",
    ),
    "another order of micro-batches on the last stage gives wrong gradients": (
        HERE,
        "test_any_order_on_the_last_stage",
    ),
    "replicas under a split backward drift apart": (
        HERE,
        "test_replicas_stay_equal_under_a_split_backward",
    ),
    "recompute under a split backward runs a block again and again": (
        "capture/test_stage.py",
        "test_recompute_runs_the_forward_once_more",
    ),
    "the backward of a custom autograd function runs twice": (
        HERE,
        "test_a_custom_function_runs_backward_once",
    ),
    "tied weights become two": (
        "runtime/test_equal.py",
        "test_every_plan_trains_the_same_model",
    ),
    "dropout hangs on the partition": (
        "runtime/test_equal.py",
        "test_every_plan_trains_the_same_model",
    ),
    "micro-batches of other shapes hang, or mix in stale rows": (
        "runtime/test_transport.py",
        "test_a_tensor_that_changes_its_shape_is_refused_by_name",
    ),
    "integers, tensors without gradient, None and dicts cannot cross": (
        HERE,
        "test_whatever_passes_between_modules_passes_between_stages",
    ),
    "a skip connection has no backward": (
        "runtime/test_equal.py",
        "test_every_plan_trains_the_same_model",
    ),
    "the gradient norm is that of one stage": (
        "runtime/test_numerics.py",
        "test_every_plan_trains_the_same_model",
    ),
    "receive buffers and sent outputs grow with the number of micro-batches": (
        HERE,
        "test_memory_follows_the_schedule",
    ),
    "when a rank fails the others say that a connection was closed": (
        "runtime/test_faults.py",
        "test_a_rank_that_fails_ends_the_run",
    ),
}
"""What was seen, and the file and name of the test."""


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_test(fault: str) -> None:
    path, name = FAULTS[fault]
    assert name in {node.name for node in ast.parse((TESTS / path).read_text()).body if hasattr(node, "name")}


@pytest.fixture(scope="module")
def everything() -> Capture:
    return captured(EVERYTHING, 2)


def step(found: Capture, *, recompute: bool = False, split: bool = False) -> tuple[Pipeline, Trained]:
    pipeline = Pipeline(found, even_cut(found, 3), recompute=recompute)
    trained = pipeline.step(next(found.model_file.data(2 * M)), M, actions=gpipe(3, M, split=split))
    return pipeline, trained


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_counts_each_micro_batch_once(recompute: bool, everything: Capture) -> None:
    counters = {name for name, _ in everything.module.named_buffers() if name.endswith("num_batches_tracked")}
    assert {everything.module.get_buffer(name).item() for name in counters} == {0}, "capturing runs nothing"
    _, trained = step(everything, recompute=recompute, split=True)
    assert {trained.buffers[name].item() for name in counters} == {M}


def test_a_second_step_starts_from_nothing(everything: Capture) -> None:
    """Nobody zeroes gradients in between; the weights stay the same."""
    pipeline, first = step(everything)
    before = {name: None if grad is None else grad.clone() for name, grad in first.gradients.items()}
    again = pipeline.step(next(everything.model_file.data(2 * M)), M, actions=gpipe(3, M))
    for name, gradient in before.items():
        other = again.gradients[name]
        assert (gradient is None) == (other is None)
        assert gradient is None or torch.equal(gradient, other), name


@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 2, 1, 0)])
def test_any_order_on_the_last_stage(order: tuple[int, ...], everything: Capture) -> None:
    """The sums' order changes with it: gradients to rounding, losses to the bit."""
    _, wanted = step(everything)
    firsts = [("F", stage, m) for stage in (0, 1) for m in range(M)]
    last = list(itertools.chain.from_iterable((("F", 2, m), ("B", 2, m), ("B", 1, m), ("B", 0, m)) for m in order))
    pipeline = Pipeline(everything, even_cut(everything, 3))
    trained = pipeline.step(next(everything.model_file.data(2 * M)), M, actions=[*firsts, *last])
    assert [loss.item() for loss in trained.losses] == [loss.item() for loss in wanted.losses]
    for name, gradient in wanted.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(trained.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_replicas_stay_equal_under_a_split_backward(tmp_path: Path) -> None:
    plan = plan_of(EVERYTHING, num_ranks=2, data=2, microbatches=2, schedule=ScheduleName.ZB_H1)
    verified = run(plan, tmp_path, verify=True).result.verify
    assert verified is not None
    assert (verified.equal, verified.largest_weight_difference) == (True, 0.0)


COUNTED = """
import torch
from torch import nn

counts = {"forward": 0, "backward": 0}

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        counts["forward"] += 1
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        counts["backward"] += 1
        return gradient * 2

class Counted(nn.Module):
    def forward(self, x):
        return Double.apply(x)

def model():
    return nn.Sequential(nn.Linear(4, 4), Counted(), nn.Linear(4, 4), Counted(), nn.Linear(4, 4))
def batch(size):
    return torch.randn(size, 4), torch.randn(size, 4)
def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.parametrize("split", [False, True])
def test_a_custom_function_runs_backward_once(split: bool, tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(COUNTED)
    found = capture(load_model_file(path), microbatch_size=2)
    counts = found.model_file.functions["model"].__globals__["counts"]
    counts.update(forward=0, backward=0)
    step(found, split=split)
    assert counts == {"forward": 2 * M, "backward": 2 * M}


PASSED = """
import torch
from torch import nn

class Makes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, bundle):
        x = torch.tanh(self.linear(bundle["x"]))
        best = x.argmax(-1) if bundle["best"] is None else bundle["best"]
        return {"x": x, "best": best, "mask": x > 0, "calm": x.detach().mean(-1), "nothing": None}

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), nn.Embedding(8, 8)
    def forward(self, bundle):
        x = self.linear(bundle["x"]) + self.table(bundle["best"]) * bundle["calm"][:, None]
        return torch.where(bundle["mask"], x, -x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.makes, self.reads = nn.ModuleList(Makes() for _ in range(3)), Reads()
    def forward(self, x):
        bundle = {"x": x, "best": None}
        for module in self.makes:
            bundle = module(bundle)
        return self.reads(bundle)

def model():
    return Model()
def batch(size):
    return torch.randn(size, 8), torch.randn(size, 8)
def loss(output, target):
    return (output - target).square().mean()
"""


def test_whatever_passes_between_modules_passes_between_stages(tmp_path: Path) -> None:
    path = tmp_path / "passed.py"
    path.write_text(PASSED)
    found = capture(load_model_file(path), microbatch_size=2)
    crossing = {made.dtype for program in found.stages(even_cut(found, 3)) for made in program.sends}
    assert torch.int64 in crossing
    assert any(not made.grad for program in found.stages(even_cut(found, 3)) for made in program.sends)
    whole = Pipeline(found, even_cut(found, 1)).step(next(found.model_file.data(2 * M)), M, actions=gpipe(1, M))
    _, trained = step(found, split=True)
    assert [loss.item() for loss in trained.losses] == [loss.item() for loss in whole.losses]
    for name, gradient in whole.gradients.items():
        assert gradient is not None
        other = trained.gradients[name]
        assert other is not None
        assert torch.equal(gradient, other), name


WIDE = """
import torch
from torch import nn

WIDTH = 500_000

class Widen(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return (x.sum(1, keepdim=True) * self.weight).expand(-1, WIDTH) + torch.zeros(WIDTH)

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x * self.weight

def model():
    return nn.Sequential(Widen(), *(Scale() for _ in range(3)))
def batch(size):
    return torch.randn(size, 4), torch.randn(size, 1)
def loss(output, target):
    return (output.mean(1, keepdim=True) - target).square().mean()
def optimizer(params):
    return torch.optim.SGD(params, lr=0.01)
"""


def test_memory_follows_the_schedule(tmp_path: Path) -> None:
    """Under 1F1B a rank holds no more with 16 micro-batches than with 4: counted are all tensors of a step."""
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    peaks = []
    for microbatches in (4, 16):
        plan = plan_of(path, num_ranks=2, microbatch=1, microbatches=microbatches)
        peaks.append([rank.peak_memory_bytes for rank in run(plan, tmp_path, steps=2).result.ranks])
    wide = 4 * 500_000
    for few, many in zip(*peaks, strict=True):
        assert few > 2 * wide, "tensors that cross are counted"
        assert many <= few + wide, "one message may be under way at another moment"
