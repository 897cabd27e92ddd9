"""Models that do what few do: cut anywhere they train as whole, and as plain PyTorch trains them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from planner.capture import capture, load_model_file
from planner.errors import InputError, RunError
from tests.capture.odd_models import HEAD, ODD_MODELS, ROWS
from tests.capture.pipelines import Pipeline, differences, eager_step, even_cut, gpipe, one_f_one_b

MICROBATCHES = 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_MODELS)
def test_cut_anywhere_it_trains_as_plain_pytorch(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = tmp_path / f"odd_{name}.py"
    path.write_text(ODD_MODELS[name])
    captured = capture(load_model_file(path), microbatch_size=2)
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))
    assert len(captured.layers) > 1
    cuts = [count for count in (2, 4) if count <= len(captured.layers)]
    for stages, split, recompute in itertools.product(cuts, (False, True), (False, True)):
        order = one_f_one_b if split else gpipe
        pipeline = Pipeline(captured, even_cut(captured, stages), recompute=recompute)
        step = pipeline.step(batch, MICROBATCHES, actions=order(stages, MICROBATCHES, split=split))
        assert differences(whole, step) == [], (stages, split, recompute)
    plain, aligned = eager_step(captured, batch)
    assert aligned
    assert differences(whole, plain) == []


def _refused(folder: Path, text: str) -> str:
    path = folder / "refused.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        capture(load_model_file(path), microbatch_size=2)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    return line.removeprefix(str(path))


def _with(block: str, model: str) -> str:
    return f"{HEAD}{block}\ndef model():\n    {model}\n{ROWS}"


STATE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.mean, self.calls = nn.Linear(8, 8), torch.zeros(8), 0
    def forward(self, x):
        y = self.a(x)
        {change}
        return y - self.mean + self.calls
"""


@pytest.mark.parametrize(
    ("change", "names"),
    [("self.mean = 0.9 * self.mean + y.detach().mean(0)", "mean"), ("self.calls += 1", "calls")],
)
def test_state_that_is_no_buffer_is_refused(change: str, names: str, tmp_path: Path) -> None:
    """A graph would do for ever what the first forward did."""
    text = _with(STATE.format(change=change), "return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))")
    line = _refused(tmp_path, text)
    assert f"what the one before left in 1, in an attribute that is no buffer ({names})" in line
    assert f"self.register_buffer('{names}', ...)" in line


@pytest.mark.parametrize(
    ("first", "change", "read"),
    [
        ("None", "if self.kept is not None: y = y + self.kept", "self.kept = y.detach()"),
        ("[]", "if self.kept: y = y + self.kept[-1]", "self.kept.append(y.detach())"),
        ("{}", "y = y + self.kept.get('y', 0)", "self.kept['y'] = y.detach()"),
        ("(0.0, [0.0])", "y = y + self.kept[1][0]", "self.kept = (0.0, [y.detach()])"),
        ("[[]]", "y = y + len(self.kept[0])", "self.kept[0].append(1)"),
        ("None", "y = y if self.kept is None else y / self.kept", "self.kept = 2"),
        ("None", "if self.kept is not None: y = y + 0 * self.kept", "self.kept = y"),  # a backward into the one before
    ],
)
def test_state_that_only_a_forward_makes_is_refused(first: str, change: str, read: str, tmp_path: Path) -> None:
    block = STATE.format(change=f"{change}\n        {read}").replace(" - self.mean + self.calls", "")
    block = block.replace(
        "self.mean, self.calls = nn.Linear(8, 8), torch.zeros(8), 0", f"self.kept = nn.Linear(8, 8), {first}"
    )
    line = _refused(tmp_path, _with(block, "return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))"))
    assert "what the one before left in 1, in an attribute that is no buffer (kept)" in line


def test_a_forward_that_differs_by_chance_is_none_of_state(tmp_path: Path) -> None:
    """Kernels of a GPU may add in another order each time."""
    block = STATE.format(change="self.mean = y.detach() * 0; y = y * (1 + 1e-3 * next(chance))")
    path = tmp_path / "chance.py"
    model = "return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))"
    path.write_text(_with("import itertools\nchance = itertools.count()\n" + block, model))
    assert len(capture(load_model_file(path), microbatch_size=2).layers) > 1


NORMED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.register_buffer("fixed", torch.ones(8))
    def forward(self, x):
        return self.fixed * {call}
"""


@pytest.mark.parametrize("weightless", [False, True])
@pytest.mark.parametrize(
    ("call", "times"),
    [
        ("checkpoint(self.inner, x, use_reentrant=False)", 2),
        ("checkpoint(self.inner, x, use_reentrant=True)", 2),
        ("(checkpoint(self.inner[0], x, use_reentrant=False) + self.inner(x))", 1),
    ],
)
def test_buffers_that_a_checkpoint_changes_twice_are_named(
    call: str, times: int, weightless: bool, tmp_path: Path
) -> None:
    path = tmp_path / "normed.py"
    path.write_text(_with(NORMED.format(call=call), "return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))"))
    captured = capture(load_model_file(path), microbatch_size=2, weightless=weightless)
    assert captured.counted_once == ["1.inner.1"] * (times - 1)
    module = captured.model_file.model()
    module(captured.batch.inputs).sum().backward()
    assert module[1].inner[1].num_batches_tracked == times


def test_a_buffer_that_grows_is_refused(tmp_path: Path) -> None:
    block = STATE.format(change="self.seen = torch.cat([self.seen, y.detach().mean().reshape(1)])")
    block = block.replace(
        "torch.zeros(8), 0\n", "torch.zeros(8), 0\n        self.register_buffer('seen', torch.ones(1))\n"
    )
    line = _refused(tmp_path, _with(block, "return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))"))
    assert "Block assigns float32[2] to its buffer seen in forward(), which was float32[1]; keep its shape" in line


OWN_GENERATOR = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.generator)
"""
VMAP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
    def forward(self, x):
        return torch.func.vmap(lambda row: row @ self.weight)(x)
"""


FORCE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(8, 4)
    def forward(self, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(self.energy(x).tanh().sum(), x, create_graph=True)[0][:, :4]
"""
FUNC_GRAD = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(8, 1)
    def forward(self, x):
        return x + torch.func.grad(lambda y: self.energy(y).tanh().sum())(x)
"""
COND = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y), (x,))
"""
CLOSURE = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.made = lambda x: self.a(x) if x.sum() < 1e9 else x
    def forward(self, x):
        return self.made(x)
"""


@pytest.mark.parametrize(
    ("block", "model", "fact", "mend"),
    [
        (
            OWN_GENERATOR,
            "nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))",
            "torch.Generator",
            "draw from torch's",
        ),
        (VMAP, "Net()", "the model's own forward() calls vmap", "module of its own"),
        (CLOSURE, "nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))", "reads its a.weight in a", "arguments"),
        (FORCE, "Net()", "the model's own forward() runs a backward", "module of its own"),
        (
            FUNC_GRAD,
            "nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))",
            "torch.func.grad",
            "torch.autograd.grad",
        ),
        (
            COND,
            "nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 4))",
            "module 1, which is kept",
            "a plain if will",
        ),
    ],
)
def test_what_the_graph_would_lose_is_refused(block: str, model: str, fact: str, mend: str, tmp_path: Path) -> None:
    line = _refused(tmp_path, _with(block, f"return {model}"))
    assert fact in line
    assert mend in line


@pytest.mark.parametrize(
    ("model", "fact", "mend"),
    [
        ("return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))", "gave 0.weight no shape yet", "call the module in"),
        (
            "return nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 4)))",
            "scripted its module 1",
            "without torch.jit.script",
        ),
        ("return torch.jit.script(nn.Linear(8, 4))", "returned a scripted module", "without torch.jit.script"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_modules_that_cannot_be_taken_as_they_are(model: str, fact: str, mend: str, tmp_path: Path) -> None:
    line = _refused(tmp_path, _with("", model))
    assert f": model() {fact}; " in line
    assert mend in line


def test_a_value_that_is_another_than_when_it_was_captured_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "decides.py"
    path.write_text(ODD_MODELS["decides_on_values"])
    captured = capture(load_model_file(path), microbatch_size=2)
    assert len({layer.name for layer in captured.layers if "stack.blocks" in layer.name}) == 4, "it is not kept whole"
    batch = next(captured.model_file.data(2))
    large = batch._replace(inputs=batch.inputs * 1e10)
    with pytest.raises(RunError, match=r"decides\.py:\d+: .* was False when it was captured and is True now"):
        Pipeline(captured, even_cut(captured, 2)).step(large, 1, actions=gpipe(2, 1))
