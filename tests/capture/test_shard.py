"""Tensor parallel: T processes, each with its part of every layer, against one process that has the whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from planner.capture import Capture, RandomKey, Stage, capture, load_model_file
from planner.capture.shard import shard
from planner.capture.shard_split import Shard, Split
from planner.capture.shard_views import ways
from planner.errors import InputError
from tests.capture.pipelines import Pipeline, Trained, differences, even_cut, gpipe
from tests.capture.real_models import REAL_MODELS
from tests.capture.tensor_ranks import Gloo, Step, each_rank, gathered, largest_difference, trained
from tests.capture.test_real_models import needs

EXAMPLES = Path(__file__).parents[2] / "planner" / "examples"
MICROBATCHES = 2


def captured_of(path: Path, text: str, *, size: int = 2) -> Capture:
    torch.set_num_threads(1)
    path.write_text(text)
    return capture(load_model_file(path), microbatch_size=size)


def whole_step(captured: Capture) -> Trained:
    batch = next(captured.model_file.data(MICROBATCHES * captured.microbatch_size))
    return Pipeline(captured, even_cut(captured, 1)).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))


def sharded_steps(captured: Capture, tensor: int, *steps: Step, sequence: bool = False) -> list[Trained]:
    batch = next(captured.model_file.data(MICROBATCHES * captured.microbatch_size))
    runs = trained(captured, batch, MICROBATCHES, tensor=tensor, steps=steps, sequence=sequence)
    return [gathered(captured, run) for run in runs]


def share_of(captured: Capture, tensor: int) -> float:
    """Of the parameters, on rank 0."""
    own = shard(captured, tensor=tensor).module
    return sum(p.numel() for p in own.parameters()) / sum(p.numel() for p in captured.module.parameters())


def test_two_ranks_train_gpt_as_one_process_and_alike_in_any_cut(tmp_path: Path) -> None:
    text = (EXAMPLES / "gpt.py").read_text().replace("BLOCKS = 12", "BLOCKS = 2")
    captured = captured_of(tmp_path / "gpt.py", text)
    one, *others = sharded_steps(captured, 2, Step(), Step(4, split=True, recompute=True))
    difference, name = largest_difference(whole_step(captured), one)
    assert difference < 1e-5, name
    assert [differences(one, other) for other in others] == [[]]
    assert share_of(captured, 2) < 0.54


# --- one rule after another -------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, {width})
        self.outer = nn.Linear({into}, 12)
        {parts}

    def forward(self, x):
        y = self.inner(x)
        {body}
        return self.outer(y)

def model():
    return Model()

def batch(size):
    return torch.randn(size, 6, 12), torch.randn(size, 6, 12)

def loss(output, target):
    return ((output - target) ** 2).mean()
"""

HEADS = "y = y.view(*y.shape[:2], {}, 4).transpose(1, 2); "
MERGED = "y = y.transpose(1, 2).reshape(*x.shape[:2], -1)"
EXPERTS = "self.up = nn.Parameter(torch.randn(4, 12, 8)); self.down = nn.Parameter(torch.randn(4, 8, 12))"
EACH = "q, k, v = (t.view(*x.shape[:2], -1, 4).transpose(1, 2) for t in (q, k, v)); "
ATTENTION = "y = F.scaled_dot_product_attention(q, k, v, {}); "
SCALE = "self.scale = nn.Parameter(torch.randn(8))"

# outputs of the one linear layer, inputs of the other, what else the model holds, what lies between the two
RULES: dict[str, tuple[int, int, str, str]] = {
    "pointwise": (8, 8, "", "y = F.gelu(y) * torch.sigmoid(y) + 1"),
    "in place": (8, 8, "", "y = y.mul_(2).add_(y)"),
    "uneven": (7, 7, "", "y = torch.tanh(y)"),
    "gate by chunk": (16, 8, "", "a, b = y.chunk(2, -1); y = F.silu(a) * b"),
    "gate by slices": (20, 10, "", "y = F.silu(y[..., :10]) * y[..., 10:]"),
    "gate by split": (12, 4, "", "a, b, c = y.split([4, 4, 4], -1); y = a * b - c"),
    "weight for each column": (8, 8, SCALE, "y = y * self.scale"),
    "whole tensor beside": (8, 8, SCALE, "y = torch.stack([y, y + self.scale * x[..., :8]]).sum(0)"),
    "mean over the split": (8, 8, SCALE, "y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1) * self.scale"),
    "sum over the split": (8, 8, "", "y = y * torch.sigmoid(y.sum(-1, keepdim=True))"),
    "softmax over samples": (8, 8, "", "y = y.softmax(1) + y.log_softmax(1)"),
    "norm within heads": (16, 16, "self.norm = nn.LayerNorm(4)", HEADS.format(4) + "y = self.norm(y); " + MERGED),
    "dropout": (8, 8, "", "y = F.dropout(y, 0.5)"),
    "dropout of what is turned": (16, 16, "", HEADS.format(4) + "y = F.dropout(y, 0.3); " + MERGED),
    "flattened and back": (8, 8, "", "y = y.flatten(0, 1); y = y.unflatten(0, (x.shape[0], 6))"),
    "heads folded into samples": (
        *(16, 16, ""),
        HEADS.format(4) + "y = y.flatten(0, 1); y = (y @ y.transpose(1, 2) @ y).view(x.shape[0], 4, 6, 4); " + MERGED,
    ),
    "padded": (8, 8, "", "y = F.pad(y, (0, 0, 1, 1))[:, 1:-1]"),
    "rotary": (16, 16, "", HEADS.format(4) + "y = y + torch.cat([-y[..., 2:], y[..., :2]], -1); " + MERGED),
    "heads repeated by expand": (
        *(8, 16, ""),
        HEADS.format(2) + "y = y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, 6, 4); " + MERGED,
    ),
    "fused attention": (
        *(36, 12, ""),
        "q, k, v = y.view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0); "
        + (ATTENTION.format("is_causal=True") + MERGED),
    ),
    "fused keys and values": (
        *(32, 16, "self.q = nn.Linear(12, 16)"),
        "k, v = y.view(*x.shape[:2], 2, 4, 4).permute(2, 0, 3, 1, 4).unbind(0); "
        + ("q = self.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2); " + ATTENTION.format("") + MERGED),
    ),
    "attention with dropout": (
        *(48, 16, ""),
        "q, k, v = y.chunk(3, -1); " + EACH + ATTENTION.format("dropout_p=0.4") + MERGED,
    ),
    "grouped queries": (
        *(32, 16, ""),
        "q, k, v = y.split([16, 8, 8], -1); " + EACH + ATTENTION.format("enable_gqa=True") + MERGED,
    ),
    "one head of keys": (
        *(16, 16, "self.kv = nn.Linear(12, 8)"),
        HEADS.format(4)
        + "q, (k, v) = y, self.kv(x)[:, None].chunk(2, -1); "
        + (ATTENTION.format("dropout_p=0.2, enable_gqa=True") + MERGED),
    ),
    "attention by hand": (
        *(16, 16, "self.bias = nn.Embedding(9, 4)"),
        HEADS.format(4)
        + "b = self.bias(torch.arange(36).view(6, 6) % 9).permute(2, 0, 1); "
        + ("y = ((y @ y.transpose(-1, -2)) / 2 + b).softmax(-1) @ y; " + MERGED),
    ),
    "attention by einsum": (
        *(16, 16, "self.out = nn.Parameter(torch.randn(4, 4, 16))"),
        "y = y.view(*x.shape[:2], 4, 4); s = torch.einsum('bqhd,bkhd->bhqk', y, y).softmax(-1); "
        "y = torch.einsum('bhqk,bkhd->bqhd', s, y); y = torch.tanh(torch.einsum('bqhd,hde->bqe', y, self.out))",
    ),
    "matrix turned round": (
        *(8, 8, "self.w = nn.Parameter(torch.randn(8, 12))"),
        "z = torch.tanh(y) @ self.w; y = torch.relu(torch.matmul(z, self.w.t()))",
    ),
    "a weight's halves read whole and in part": (
        *(8, 8, "self.two = nn.Parameter(torch.randn(2, 8))"),
        "a, b = self.two.unbind(0); y = y * a + (x[..., :8] * b).cumsum(-1).mean()",
    ),
    "changed through views": (
        *(8, 8, SCALE),
        "z = torch.zeros_like(x[..., :8]); z[..., :4] = x[..., :4] * self.scale[:4]; y = y + z * 2; "
        "z[..., 3:] += self.scale[3:] * x[..., 3:8]; y = torch.tanh(y * z)",
    ),
    "heads picked by numbers": (
        *(32, 16, ""),
        "y = y.view(*x.shape[:2], 4, 2, 4); k = x[..., :4, None, None].argsort(-1); "
        "k = torch.take_along_dim(y[..., [1], :], k, -1).expand(-1, -1, -1, 2, -1); "
        "y = (y[..., [0], :] * k).sum(-2).flatten(2)",
    ),
    "gated linear unit": (16, 8, "", "y = F.glu(y, -1)"),
    "every other": (16, 8, "", "y = F.silu(y[..., ::2]) * y[..., 1::2]"),
    "sinks": (
        *(16, 16, "self.sink = nn.Parameter(torch.randn(4))"),
        HEADS.format(4) + "s = torch.cat([y @ y.mT, self.sink.view(1, 4, 1, 1).expand(x.shape[0], -1, 6, 1)], -1); "
        "s = (s - s.max(-1, keepdim=True).values).softmax(-1)[..., :-1]; y = s @ y; " + MERGED,
    ),
    "positions repeated": (
        *(16, 16, "self.key = nn.Linear(12, 16)"),
        HEADS.format(4) + "y = y.reshape(-1, 6, 4); k = self.key(x[:1]).view(6, 4, 4).transpose(0, 1).repeat(2, 1, 1); "
        "s = torch.bmm(y, k.mT); s = torch.baddbmm(s, y, y.mT, beta=0.5); s = torch.gather(s, 2, s.sort(-1).indices); "
        "y = torch.bmm(s, y).view(2, 4, 6, 4); " + MERGED,
    ),
    "a product over the split": (8, 8, "", "y = y * torch.tanh(y @ y.transpose(1, 2)).mean()"),
    "a matrix for each expert": (
        *(8, 8, EXPERTS + "; self.gate = nn.Linear(12, 4)"),
        "p, z = self.gate(x).softmax(-1).flatten(0, 1), x.flatten(0, 1); z = torch.bmm(z.expand(4, -1, -1), self.up); "
        "z = torch.bmm(F.silu(z), self.down); y = y * (z * p.t()[..., None]).sum((0, 2)).view(*x.shape[:2], 1)",
    ),
    "experts by einsum": (
        *(8, 8, EXPERTS + "; self.gate = nn.Linear(12, 4)"),
        "z = F.silu(torch.einsum('bld,edf->belf', x, self.up)); z = torch.einsum('belf,efd->beld', z, self.down); "
        "y = y * torch.einsum('beld,ble->bld', z, self.gate(x).softmax(-1)).mean(-1, keepdim=True)",
    ),
    "viewed as another": (8, 8, "", "y = y.flatten(0, 1).view_as(y) + torch.tanh(y[:, :1]).expand_as(y)"),
    "rotary by complex numbers": (
        *(16, 16, ""),
        HEADS.format(4) + "z = torch.view_as_complex(y.reshape(*y.shape[:-1], 2, 2)); r = torch.arange(6.)[:, None]; "
        "y = torch.view_as_real(z * torch.polar(torch.ones_like(r), r)).flatten(3); y = y @ y.mT @ y; " + MERGED,
    ),
    "heads made one long": (
        *(16, 16, ""),
        HEADS.format(4) + "y = F.normalize(y, dim=-1) / torch.linalg.vector_norm(y, dim=2, keepdim=True); " + MERGED,
    ),
    "in the type of another": (
        8,
        8,
        "",
        "m = torch.ones(6, 1).type_as(y); y = y * m.to(x) + torch.zeros(12)[:8].type_as(y)",
    ),
    "module called twice": (8, 8, "", "y = torch.relu(self.inner(self.outer(torch.relu(y))))"),
}
WHOLE = {
    "over the split dimension": (8, 8, "self.norm = nn.LayerNorm(8)", "y = self.norm(y)"),
    "an op without a rule": (8, 8, "", "y = torch.fft.fft(y).real"),
    "heads that do not divide": (12, 12, "", HEADS.format(3) + "y = y @ y.transpose(-1, -2) @ y; " + MERGED),
    "a weight read in two ways": (8, 8, "", "y = torch.relu(y) + self.inner.weight.sum()"),
    "cut anew": (12, 4, "", "a, b = y.split([8, 4], -1); y = (a[..., :4] + a[..., 4:]) * b"),
}


FAST = {
    *("uneven", "gate by chunk", "gate by slices", "mean over the split"),
    *("dropout of what is turned", "fused attention", "fused keys and values", "attention with dropout"),
    *(
        "a weight's halves read whole and in part",
        "changed through views",
        "one head of keys",
        "attention by hand",
        "attention by einsum",
        "module called twice",
    ),
    *("heads that do not divide", "a weight read in two ways"),
}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in (*RULES, *WHOLE)]
)
def test_a_rule(name: str, tmp_path: Path) -> None:
    """In float64, so that all beyond rounding shows; the first linear is split by columns where there is a rule."""
    width, into, parts, body = (RULES | WHOLE)[name]
    text = MODEL.format(width=width, into=into, parts=parts, body=body)
    torch.set_default_dtype(torch.float64)
    try:
        captured = captured_of(tmp_path / "rule.py", text)
        size = 3 if name in ("fused attention",) else 2
        own = shard(captured, tensor=size)
        assert own.sharding is not None
        assert ("inner.weight" in own.sharding.parameters) == (name in RULES)
        (step,) = sharded_steps(captured, size, Step(split=True))
        difference, where = largest_difference(whole_step(captured), step)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference < 1e-12, where
    if name in WHOLE:
        told = {module: why for layer in own.sharding.layers for module, why in layer.whole}
        assert told["inner"]


ENDS = {
    "mean": "F.cross_entropy(output.flatten(0, 1), target.flatten())",
    "sum": "F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction='sum') / 12",
    "each": "F.cross_entropy(output.transpose(1, 2), target, reduction='none').mean()",
    "smoothed": "F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.2)",
    "ignored": "F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=2)",
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("classes", [pytest.param(10, marks=pytest.mark.slow), 11])
def test_words_in_and_words_out_are_split_over_the_vocabulary(name: str, classes: int, tmp_path: Path) -> None:
    text = f"""
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding({classes}, 12, padding_idx=7)
        self.head = nn.Linear(12, {classes}, bias={classes == 10})
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)))

def model():
    return Model()

def batch(size):
    return torch.randint({classes}, (size, 6)), torch.randint({classes}, (size, 6))

def loss(output, target):
    return {ENDS[name]}
"""
    torch.set_default_dtype(torch.float64)
    try:
        captured = captured_of(tmp_path / "words.py", text)
        (step,) = sharded_steps(captured, 2, Step(stages=2, split=True))
        difference, where = largest_difference(whole_step(captured), step)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference < 1e-12, where
    assert share_of(captured, 2) < 0.56


class Counting(Gloo):
    """Notes what passes: the bytes of each sum (a largest counts as one); a gather or a scatter is half of one."""

    def __init__(self, group: Gloo) -> None:
        self._group = group._group
        self.bytes: list[int] = []
        self.halves: list[int] = []

    def gather(self, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
        self.halves.append(tensor.nbytes * size)
        return super().gather(tensor, size)

    def start_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Any:
        self.halves.append(whole.nbytes)
        return super().start_scatter(own, whole)

    def sum(self, tensor: torch.Tensor) -> None:
        self.bytes.append(tensor.nbytes)
        super().sum(tensor)

    def max(self, tensor: torch.Tensor) -> None:
        self.bytes.append(tensor.nbytes)
        super().max(tensor)


def test_forward_and_backward_input_exchange_what_is_told_and_backward_weight_nothing(tmp_path: Path) -> None:
    captured = captured_of(tmp_path / "gpt.py", (EXAMPLES / "gpt.py").read_text().replace("BLOCKS = 12", "BLOCKS = 2"))

    def work(group: Gloo, rank: int) -> list[list[int]]:
        own = shard(captured, tensor=2, rank=rank)
        counting = Counting(group)
        assert own.sharding is not None
        own.sharding.connect(counting)
        (program,) = own.stages([[layer.name for layer in own.layers]])
        stage = Stage(program, own.module, defer=False)
        made = []
        for action in (
            lambda: stage.forward(0, *captured.batch, {}, RandomKey(0, 0, 0), split=True),
            lambda: stage.backward_input(0, {}, 1.0),
            lambda: stage.backward_weight(0),
        ):
            action()
            made.append(list(counting.bytes))
            counting.bytes.clear()
        return made

    told = shard(captured, tensor=2).sharding
    assert told is not None
    for forward, backward_input, backward_weight in each_rank(2, work):
        for seen, rows in (
            (forward, [layer.forward for layer in told.layers]),
            (backward_input, [layer.backward_input for layer in told.layers]),
        ):
            assert (len(seen), sum(seen)) == (sum(row.count for row in rows), sum(row.bytes for row in rows))
        assert backward_weight == []
        # two sums a block each way, of [samples, words, width] in four bytes; one of words read, one before the head
        assert sorted(forward)[-5:] == [2 * 64 * 128 * 4] * 5
        assert backward_input == [2 * 64 * 128 * 4] * 5


def test_with_tokens_in_parts_gathers_and_scatters_are_told_too(tmp_path: Path) -> None:
    """What is gathered again for the backward as well; nothing in W."""
    captured = captured_of(tmp_path / "gpt.py", (EXAMPLES / "gpt.py").read_text().replace("BLOCKS = 12", "BLOCKS = 1"))

    def work(group: Gloo, rank: int) -> list[tuple[float, int]]:
        own = shard(captured, tensor=2, rank=rank, sequence=True)
        counting = Counting(group)
        assert own.sharding is not None
        own.sharding.connect(counting)
        (program,) = own.stages([[layer.name for layer in own.layers]])
        stage = Stage(program, own.module, defer=False)
        made = []
        for action in (
            lambda: stage.forward(0, *captured.batch, {}, RandomKey(0, 0, 0), split=True),
            lambda: stage.backward_input(0, {}, 1.0),
            lambda: stage.backward_weight(0),
        ):
            action()
            count = len(counting.bytes) + len(counting.halves) / 2
            made.append((count, sum(counting.bytes) + sum(counting.halves) // 2))
            counting.bytes.clear()
            counting.halves.clear()
        return made

    told = shard(captured, tensor=2, sequence=True).sharding
    assert told is not None
    rows = [[layer.forward for layer in told.layers], [layer.backward_input for layer in told.layers]]
    sums = [(sum(row.count for row in one), sum(row.bytes for row in one)) for one in rows]
    assert each_rank(2, work) == [[*sums, (0, 0)]] * 2


def test_a_model_without_linear_layers_cannot_be_split(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

def model():
    return nn.Conv1d(3, 4, 1)

def batch(size):
    return torch.randn(size, 3, 5), torch.randn(size, 4, 5)

def loss(output, target):
    return ((output - target) ** 2).mean()
"""
    captured = captured_of(tmp_path / "convolution.py", text)
    with pytest.raises(InputError, match="no layer can be split over 2 tensor ranks"):
        shard(captured, tensor=2)


# --- what views do ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2), st.integers(2, 4))
def test_parts_make_the_whole(sections: list[int], dim: int, size: int) -> None:
    split = Split(dim, tuple(sections))
    shape = [2, 2, 2]
    shape[dim] = sum(sections)
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = [split.part(whole, size, rank) for rank in range(size)]
    assert [part.shape[dim] for part in parts] == [split.local(size, rank) for rank in range(size)]
    assert torch.equal(split.whole(parts), whole)


@given(st.data())
def test_a_view_of_the_parts_is_a_part_of_the_view(data: st.DataObject) -> None:
    """However a shape is cut or run together, each way that is offered holds for every rank."""
    size = data.draw(st.integers(2, 3))
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5))

    def grouped() -> list[int]:
        marks = data.draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        shape = [factors[0]]
        for factor, joins in zip(factors[1:], marks[1:], strict=True):
            if joins:
                shape[-1] *= factor
            else:
                shape.append(factor)
        return shape

    shape, into = grouped(), grouped()
    dims = [dim for dim, extent in enumerate(shape) if extent >= size]
    if not dims:
        return
    dim = data.draw(st.sampled_from(dims))
    pieces = data.draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0 and shape[dim] // n >= size]))
    node = Graph().placeholder("source")
    shard_ = Shard(Split(dim, (shape[dim] // pieces,) * pieces), frozenset({node}), raw=True)
    whole = torch.arange(math.prod(shape)).view(shape)
    for way in ways(shard_, shape, into, size):
        before = Split(dim, way.source or shard_.sections)
        after = Split(way.dim, way.sections)
        for rank in range(size):
            local = list(into)
            local[way.dim] = after.local(size, rank)
            part = before.part(whole, size, rank)
            assert torch.equal(part.reshape(local), after.part(whole.view(into), size, rank))


# --- real models ------------------------------------------------------------------------------------------------------

MOST = {"gpt2": 0.51, "llama": 0.52, "t5": 0.51, "bert": 0.57, "vit": 0.54, "whisper": 0.54, "mixtral": 0.51,
        "transformer": 0.80, "unet2d": 0.92}  # fmt: skip
"""The share of the parameters that one of two ranks may hold."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in MOST])
def test_a_real_model_on_several_ranks_is_that_of_one(name: str, size: int, tmp_path: Path) -> None:
    captured = captured_of(tmp_path / f"{name}.py", REAL_MODELS[name])
    one, *others = sharded_steps(captured, size, Step(), Step(4), Step(8, split=True, recompute=True))
    difference, where = largest_difference(whole_step(captured), one)
    assert difference < 1e-5, where
    assert [differences(one, other) for other in others] == [[]] * 2
    if size == 2:
        assert share_of(captured, 2) < MOST[name]


# --- sequence parallel ------------------------------------------------------------------------------------------------

BETWEEN = {"gpt2": 0.62, "llama": 0.66, "bert": 0.62, "t5": 0.7, "mixtral": 1.0, "whisper": 0.8}
"""Of the bytes between layers at T = 1, what one of two ranks may hold where it holds half of the tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in BETWEEN])
def test_a_real_model_with_its_tokens_in_parts_is_that_of_one(name: str, size: int, tmp_path: Path) -> None:
    captured = captured_of(tmp_path / f"{name}.py", REAL_MODELS[name])
    one, *others = sharded_steps(captured, size, Step(), Step(4), Step(8, split=True, recompute=True), sequence=True)
    difference, where = largest_difference(whole_step(captured), one)
    assert difference < 1e-5, where
    assert [differences(one, other) for other in others] == [[]] * 2
    own = shard(captured, tensor=size, sequence=True)
    assert _bytes_between(own) < BETWEEN[name] * _bytes_between(captured)
    assert own.sharding is not None
    assert "split" in {layer.tokens for layer in own.sharding.layers}


def _bytes_between(captured: Capture) -> int:
    return sum(tensor.bytes_per_sample for edge in captured.edges for tensor in edge.tensors)


def test_tokens_in_parts_give_what_one_process_gives(tmp_path: Path) -> None:
    """Positions, dropout, norms and a head beside blocks; equal over cuts, and a rank sends half."""
    text = (EXAMPLES / "gpt.py").read_text().replace("BLOCKS = 12", "BLOCKS = 2")
    captured = captured_of(tmp_path / "gpt.py", text)
    one, *others = sharded_steps(captured, 2, Step(), Step(4, split=True, recompute=True), sequence=True)
    difference, name = largest_difference(whole_step(captured), one)
    assert difference < 1e-5, name
    assert [differences(one, other) for other in others] == [[]]
    own = shard(captured, tensor=2, sequence=True)
    assert _bytes_between(own) == _bytes_between(captured) / 2
    saved = [sum(layer.saved_bytes for layer in one.layers) for one in (captured, shard(captured, tensor=2), own)]
    assert saved[2] < 0.51 * saved[0]
    assert saved[2] < 0.75 * saved[1]


# outputs of the one linear layer, inputs of the other, what else the model holds, what lies after the two, as for RULES
TOKENS = {
    "norm": ("self.norm = nn.LayerNorm(12)", "return self.norm(x + y)", "split"),
    "dropout": ("", "return F.dropout(x + y, 0.4) * 2", "split"),
    "weights made of weights": ("self.w = nn.Parameter(torch.randn(12))", "return (x + y) * (1 + self.w)", "split"),
    "a weight read whole too": (
        *("self.w = nn.Parameter(torch.randn(12))", "return (x * self.w).cumsum(1) + (y + x) * self.w", "split"),
    ),
    "whole beside": ("self.two = nn.Linear(12, 12)", "return torch.tanh(self.two(x).cumsum(1)) * (y + x)", "split"),
    "mean over tokens": ("", "return (x + y) * torch.sigmoid((x + y).mean(1, keepdim=True))", "split"),
    "over tokens": ("", "return (x + y).softmax(1)", "nothing works on its tokens before they are gathered again"),
    "in place": ("", "y += x; return y * 2", "it is changed in place"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("norm", "a weight read whole too") else pytest.mark.slow) for n in TOKENS],
)
def test_what_lies_between_split_ops_works_on_tokens(name: str, tmp_path: Path) -> None:
    """In float64: a rank does its tokens, and what needs all of them gathers them."""
    parts, body, told = TOKENS[name]
    text = MODEL.format(
        width=8, into=8, parts="self.last = nn.Linear(12, 12)\n        " + parts, body="y = torch.tanh(y)"
    )
    end = (
        f"y = self.outer(y); z = self._after(x, y); return self.last(z)\n\n    def _after(self, x, y):\n        {body}"
    )
    text = text.replace("return self.outer(y)", end)
    torch.set_default_dtype(torch.float64)
    try:
        captured = captured_of(tmp_path / "tokens.py", text)
        (step,) = sharded_steps(captured, 2, Step(split=True), sequence=True)
        difference, where = largest_difference(whole_step(captured), step)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference < 1e-12, where
    own = shard(captured, tensor=2, sequence=True).sharding
    assert own is not None
    assert told in {layer.tokens for layer in own.layers}
