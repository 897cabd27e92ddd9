"""Modules kept whole: found without being named, layers of their own, refused by name where they cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.capture import Capture, EagerReference, RandomKey, Stage, capture, load_model_file
from planner.capture.lifted import opaque_call
from planner.errors import InputError, RunError
from tests.capture.captures import captured_at
from tests.capture.pipelines import Pipeline, differences, even_cut, gpipe

MODELS = Path(__file__).parent / "models"

HEAD = "import torch\nfrom torch import nn\n"
REST = """
def model():
    return nn.Sequential(nn.Linear(4, 4), Net(), nn.Linear(4, 4), nn.Linear(4, 4))
def batch(size):
    return torch.randn(size, 4), torch.randn(size, 4)
def loss(output, target):
    return (output - target).square().mean()
"""
COUNTED = """
class Inner(nn.Module):
    def forward(self, x, seen):
        seen.tensors.append(x)
        return x * 2 if x.sum() > 1e9 else x * 3
class Seen:
    def __init__(self):
        self.tensors = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(4, 4)
    def forward(self, x):
        seen = Seen()
        seen.tensors.append(x)
        return self.linear(self.inner(x, seen)) + seen.tensors[1]
"""
HOOKED = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 3 * gradient)
        return y.tanh()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.after = Inner(), nn.Linear(4, 4)
    def forward(self, x):
        return self.after(self.inner(x))
"""
SIZED = """
class Net(nn.Module):
    def forward(self, x):
        return x if x.min() > -1e9 else x[:1]
"""


def captured_text(folder: Path, text: str, microbatch_size: int = 2) -> Capture:
    path = folder / "made.py"
    path.write_text(HEAD + text + REST)
    return capture(load_model_file(path), microbatch_size=microbatch_size)


def whole_modules(captured: Capture) -> set[str]:
    calls = [opaque_call(node) for part in captured.analysis.segments for node in part.nodes]
    return {call.name for call in calls if call is not None}


@pytest.fixture(scope="module")
def captured() -> Capture:
    return captured_at(MODELS / "opaque.py")


def test_the_smallest_modules_are_found_and_named_ones_are_kept(captured: Capture) -> None:
    found = {"branch", "experts", "dropped", "place", "rewound"}
    found |= {f"blocks.{index}.{name}" for index in (0, 1) for name in ("scale", "act")}
    assert whole_modules(captured) == found | {"kept"}


@pytest.mark.parametrize("granularity", ["block", "module", "op"])
def test_each_is_a_layer_of_its_own(granularity: str) -> None:
    captured = captured_at(MODELS / "opaque.py", granularity=granularity)
    for part in captured.analysis.segments:
        names = {call.name for node in part.nodes if (call := opaque_call(node)) is not None}
        if names and not part.name.startswith(
            "branch"
        ):  # its buffers keep both of its calls together, with what lies between
            assert len(names) == 1, part.name
            assert part.name.partition("@")[0].removesuffix(".opaque") in names


def test_the_model_is_left_as_it_was(captured: Capture) -> None:
    fresh = captured.model_file.model()
    for name, module in captured.module.named_modules():
        twin = fresh.get_submodule(name)
        assert "forward" not in vars(module)
        assert len(module._forward_hooks) == len(twin._forward_hooks)
        assert len(module._forward_pre_hooks) == len(twin._forward_pre_hooks)
    for name, buffer in captured.module.named_buffers():
        assert torch.equal(buffer, fresh.get_buffer(name)), name


def test_a_module_that_hides_tensors_is_taken_with_what_is_around_it(tmp_path: Path) -> None:
    captured = captured_text(tmp_path, COUNTED)
    assert whole_modules(captured) == {"1"}
    batch = next(captured.model_file.data(4))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, 2, actions=gpipe(1, 2))
    step = Pipeline(captured, even_cut(captured, 3)).step(batch, 2, actions=gpipe(3, 2))
    assert differences(whole, step) == []


def test_a_hook_on_a_gradient_keeps_its_module_whole(tmp_path: Path) -> None:
    captured = captured_text(tmp_path, HOOKED)
    assert whole_modules(captured) == {"1.inner"}
    batch = next(captured.model_file.data(2))
    step = Pipeline(captured, even_cut(captured, 3)).step(batch, 1, actions=gpipe(3, 1))
    eager = EagerReference(captured)
    eager.step(batch, seed=0, step=0)
    for name, parameter in eager.module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(step.gradients[name], parameter.grad), name


def test_sizes_that_hang_on_values_fail_by_name(tmp_path: Path) -> None:
    captured = captured_text(tmp_path, SIZED)
    (layer,) = [layer.name for layer in captured.layers if layer.name == "1"]
    stage = Stage(captured.program([layer]), captured.module)
    received = {b.name: torch.full(b.shape, -1e10) for b in stage.program.receives}
    with pytest.raises(RunError, match=r"module 1 returned float32\[1, 4\] where it returned float32\[2, 4\]"):
        stage.forward(0, captured.batch.inputs, captured.batch.target, received, RandomKey(0, 0, 0))


READS_A_NUMBER = """
class Loads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 1e9:
            return y, y
        return y, y.detach().abs().mean(0)
class Host(nn.Module):
    def forward(self, x, loads):
        return x * READ
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.loads, self.middle, self.host = Loads(), nn.Linear(4, 4), Host()
    def forward(self, x):
        y, loads = self.loads(x)
        return self.host(self.middle(y), loads BETWEEN)
"""
READ = "torch.as_tensor(loads{}.numpy() + 1)"


@pytest.mark.parametrize("weightless", [False, True])
@pytest.mark.parametrize("between", ["", "* 2"])
@pytest.mark.parametrize("read", [READ.format(""), "loads.requires_grad_(False)"])
def test_a_module_that_wants_no_gradient_of_what_another_gave_is_refused_by_name(
    read: str, between: str, weightless: bool, tmp_path: Path
) -> None:
    text = HEAD + READS_A_NUMBER.replace("READ", read).replace("BETWEEN", between) + REST
    if read == "loads.requires_grad_(False)":
        text = text.replace("return x * loads", "if x.sum() > 1e9: return x\n        return x * loads")
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        capture(load_model_file(path), microbatch_size=2, weightless=weightless)
    message = caught.value.message
    assert "\n" not in message
    assert message.startswith(f"{path}: module 1.host, which is kept whole, raised RuntimeError: ")
    assert f"({path}:" in message
    assert "detach()" in (caught.value.hint or "")


@pytest.mark.parametrize("between", ["", "* 2"])
def test_a_module_that_detaches_what_another_gave_is_equal_on_any_cut(between: str, tmp_path: Path) -> None:
    text = READS_A_NUMBER.replace("READ", READ.format(".detach()")).replace("BETWEEN", between)
    path = tmp_path / "model.py"
    path.write_text(HEAD + text + REST)
    captured = capture(load_model_file(path), microbatch_size=2)
    batch = captured.model_file.batch(6)
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, 3, actions=gpipe(1, 3))
    for stages in (2, len(captured.layers)):
        cut = Pipeline(captured, even_cut(captured, stages)).step(batch, 3, actions=gpipe(stages, 3))
        assert differences(whole, cut) == []


@pytest.mark.parametrize("where", ["eager", "graph"])
def test_memory_that_runs_out_in_a_module_kept_whole_is_no_fault_of_the_model(where: str, tmp_path: Path) -> None:
    read = "torch.empty(1 << 50)" if where == "eager" else "(torch.empty(1 << 50) if loads.requires_grad else 1)"
    text = READS_A_NUMBER.replace("READ", read).replace("BETWEEN", "")
    text = text.replace("return x * ", "if x.sum() > 1e9: return x\n        return x * ")
    path = tmp_path / "model.py"
    path.write_text(HEAD + text + REST)
    with pytest.raises(RuntimeError, match="allocate"):
        capture(load_model_file(path), microbatch_size=2)
