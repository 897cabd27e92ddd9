"""A model file that is wrong gets one line: the function, the user's own line, the mend."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from planner.capture import ModelFile, capture, load_model_file
from planner.errors import InputError

HEAD = "import torch\nfrom torch import nn\n"
MODEL = "def model():\n    return nn.Linear(4, 4)\n"
BATCH = "def batch(size):\n    return torch.randn(size, 4), torch.randn(size, 4)\n"
LOSS = "def loss(output, target):\n    return (output - target).square().mean()\n"
GOOD = HEAD + MODEL + BATCH + LOSS


def net(forward: str, extra: str = "") -> str:
    """A model file whose module has this forward (from line 7 + the lines of ``extra`` on)."""
    lines = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.inner = nn.Linear(4, 4)",
        "    def forward(self, x):",
        *(f"        {line}" for line in forward.splitlines()),
        "def model():",
        "    return nn.Sequential(nn.Linear(4, 4), Net())",
    ]
    return HEAD + extra + "\n".join(lines) + "\n" + BATCH + LOSS


PAIR = """class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
    def forward(self, x):
        return self.parts[0](x)
"""


def whole_net(forward: str, extra: str = "") -> str:
    """The same module as the whole model."""
    return net(forward, extra).replace("nn.Sequential(nn.Linear(4, 4), Net())", "Net()")


DOUBLED = """class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""

WRONG = {
    "no model": (HEAD + BATCH + LOSS, ": has no model()", "def model()"),
    "no batch": (HEAD + MODEL + LOSS, ": has no batch()", "def batch(size)"),
    "model is no function": (HEAD + "model = 3\n" + BATCH, ": model is 3, no function", "def model(...)"),
    "syntax": ("def model(:\n", ":1: is no valid Python", "syntax"),
    "missing import": ("import nosuchmodule\n", ":1: raised ModuleNotFoundError", "install"),
    "relative import": ("from .parts import Block\n", ":1: raised ImportError: attempted relative", "its name alone"),
    "raises at top": (HEAD + "x = 1 / 0\n", ":3: raised ZeroDivisionError", "mend"),
    "leaves at top": (HEAD + "import sys\nsys.exit(3)\n", ":4: raised SystemExit: 3", "mend"),
    "model leaves": (
        HEAD + "def model():\n    quit()\n" + BATCH + LOSS,
        ":4: model() raised SystemExit",
        "mend",
    ),
    "forward leaves": (
        net("import sys\nsys.exit()"),
        ":9: model()'s forward() raised RuntimeError: sys.exit(None) was called",
        "mend",
    ),
    "global_batch": (GOOD + "global_batch = 0\n", "global_batch is 0", "1 or more"),
    "leaves": (GOOD + "leaves = 'a'\n", "leaves is 'a'", "module names"),
    "leaves of no module": (GOOD + "leaves = ['zz']\n", "leaves names 'zz'", "correct"),
    "leaves of the whole": (GOOD + "leaves = ['']\n", "leaves names ''", "correct"),
    "leaves that nobody calls": (
        HEAD
        + "def model():\n    return nn.Sequential(nn.ModuleDict({'a': nn.Linear(4, 4)})['a'], Pair())\n"
        + PAIR
        + "leaves = ['1.parts']\n"
        + BATCH
        + LOSS,
        ": leaves names '1.parts', which is never called",
        "one of its children",
    ),
    "model raises": (
        HEAD + "def model():\n    return nn.Linear(4, 'a')\n" + BATCH + LOSS,
        ":4: model() raised TypeError",
        "mend",
    ),
    "model raises in several lines": (
        HEAD
        + "def model():\n    raise ValueError('wrong field:\\n  depth is not a number\\nand so on')\n"
        + BATCH
        + LOSS,
        ":4: model() raised ValueError: wrong field: depth is not a number",
        "mend",
    ),
    "model of the wrong kind": (
        HEAD + "def model():\n    return 3\n" + BATCH + LOSS,
        ":3: model() returned int 3, no module",
        "torch.nn.Module",
    ),
    "no parameters": (
        HEAD + "def model():\n    return nn.ReLU()\n" + BATCH + LOSS,
        ":3: model() returned a module without parameters",
        "nothing to train",
    ),
    "a hook on a gradient": (
        HEAD
        + "def model():\n    made = nn.Linear(4, 4)\n    made.weight.register_hook(lambda g: g / 2)\n    return made\n"
        + BATCH
        + LOSS,
        ":3: model() put a hook on the gradient of weight",
        "optimizer",
    ),
    "all frozen": (
        HEAD + "def model():\n    return nn.Linear(4, 4).requires_grad_(False)\n" + BATCH + LOSS,
        "all frozen",
        "leave some to train",
    ),
    "batch is no pair": (
        HEAD + MODEL + "def batch(size):\n    return torch.randn(size, 4)\n" + LOSS,
        ":5: batch() gave Tensor, no pair",
        "(inputs, target)",
    ),
    "batch of objects": (
        HEAD + MODEL + "def batch(size):\n    return [object()], torch.randn(size, 4)\n" + LOSS,
        "inputs[0] is of type object",
        "a tuple or a dict of tensors",
    ),
    "ragged batch": (
        HEAD + MODEL + "def batch(size):\n    return {'a': torch.randn(size, 4)}, torch.randn(4, size)\n" + LOSS,
        ":5: batch(): target has shape [4, 2], where 2 samples were asked for",
        "dimension 0",
    ),
    "batch takes no size": (
        HEAD + MODEL + "def batch():\n    return torch.randn(2, 4), torch.randn(2, 4)\n" + LOSS,
        ":5: batch() raised TypeError",
        "mend",
    ),
    "batch on meta": (
        HEAD
        + MODEL
        + "def batch(size):\n    return torch.randn(size, 4, device='meta'), torch.randn(size, 4)\n"
        + LOSS,
        ":5: batch(): inputs is on the device meta",
        "CPU",
    ),
    "batch raises": (
        HEAD + MODEL + "def batch(size):\n    return torch.randn(size, 4).view(3, 7), None\n" + LOSS,
        ":6: batch() raised RuntimeError",
        "mend",
    ),
    "forward raises": (net("return self.inner(x[:, :2])"), ":8: model()'s forward() raised RuntimeError", "mend"),
    "loss is no scalar": (
        HEAD + MODEL + BATCH + "def loss(output, target):\n    return output - target\n",
        ":7: loss() gave a loss of shape [2, 4], no scalar",
        "mean",
    ),
    "loss is a number": (
        HEAD + MODEL + BATCH + "def loss(output, target):\n    return 3.0\n",
        ":7: loss() gave a loss of type float",
        "scalar tensor",
    ),
    "loss is an integer": (
        HEAD + MODEL + BATCH + "def loss(output, target):\n    return output.argmax()\n",
        ":7: loss() gave a loss of torch.int64",
        "floating-point",
    ),
    "loss raises": (
        HEAD + MODEL + BATCH + "def loss(output, target):\n    return output @ target.foo\n",
        ":8: loss() raised AttributeError: 'Tensor' object has no attribute 'foo'",
        "mend",
    ),
    "no loss": (HEAD + MODEL + BATCH, ":3: model() returned no scalar", "add loss(output, target)"),
    "detached loss": (
        HEAD + MODEL + BATCH + "def loss(output, target):\n    return output.detach().mean()\n",
        ": no gradient reaches the loss",
        "trainable parameters",
    ),
    "branch on values in the model itself": (
        whole_net("if x.sum() > 0:\n    return self.inner(x)\nreturn x"),
        ":8: the model's own forward() takes a value of a tensor in Python that is another in each batch",
        "module of its own",
    ),
    "branch by chance in the model itself": (
        whole_net("if torch.rand(()) < 0.01:\n    return x\nreturn self.inner(x)"),
        ":8: the model's own forward() decides by chance",
        "module of its own",
    ),
    "branch on values in the loss": (
        HEAD
        + MODEL
        + BATCH
        + "def loss(output, target):\n    return output.mean() if output.sum() > 0 else output.sum()\n",
        ":8: loss() takes a value of a tensor in Python that is another in each batch",
        "module of its own",
    ),
    "lost backward in the model itself": (
        whole_net("return Doubled.apply(self.inner(x))", DOUBLED),
        ": the model's own forward() uses the autograd.Function Doubled",
        "register_autograd",
    ),
    "lost backward in the loss": (
        HEAD + DOUBLED + MODEL + BATCH + "def loss(output, target):\n    return Doubled.apply(output).mean()\n",
        ": loss() uses the autograd.Function Doubled",
        "register_autograd",
    ),
    "Python's random numbers": (
        whole_net("import random\nreturn self.inner(x) * random.random()"),
        ": the model's own forward() draws random numbers from Python's",
        "module of its own",
    ),
    "a module kept whole raises": (
        net("if x.sum() != 0:\n    raise ValueError('odd')\nreturn x"),
        ":9: model()'s forward() raised ValueError: odd",
        "mend",
    ),
    "parameter changed in forward": (
        net("with torch.no_grad():\n    self.inner.weight.clamp_(-1, 1)\nreturn self.inner(x)"),
        ": the model changes its parameter 1.inner.weight in place",
        "optimizer",
    ),
}


def load(folder: Path, text: str) -> ModelFile:
    path = folder / "wrong.py"
    path.write_text(text)
    return load_model_file(path)


@pytest.mark.parametrize("case", WRONG)
def test_one_line_names_the_fault_and_the_mend(case: str, tmp_path: Path) -> None:
    text, fact, mend = WRONG[case]
    with pytest.raises(InputError) as caught:
        capture(load(tmp_path, text), microbatch_size=2)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / "wrong.py"))
    assert fact in line
    assert mend in caught.value.hint
    assert "\n" not in line
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "what comes after it can run backwards"


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        ("def data(size):\n    return []\n", ":9: data() gave nothing"),
        ("def data(size):\n    return 3\n", ":9: data() returned int 3, no iterable"),
        (
            "def data(size):\n    yield batch(size)\n    raise ValueError('spent')\n",
            ":11: data() raised ValueError: spent",
        ),
        ("def data(size):\n    yield batch(size + 1)\n", ":9: data(): inputs has shape [5, 4]"),
        ("def data(size):\n    yield batch(size)[0]\n", ":9: data() gave Tensor, no pair"),
    ],
)
def test_faults_of_data(function: str, fact: str, tmp_path: Path) -> None:
    items = load(tmp_path, GOOD + function).data(4)
    with pytest.raises(InputError) as caught:
        list(islice(items, 3))
    assert fact in str(caught.value)


def test_optimizer(tmp_path: Path) -> None:
    default = load(tmp_path, GOOD)
    assert isinstance(default.optimizer(default.model().parameters()), torch.optim.AdamW)
    own = load(tmp_path, GOOD + "def optimizer(params):\n    return torch.optim.SGD(params, lr=0.5)\n")
    assert own.optimizer(own.model().parameters()).defaults["lr"] == 0.5
    wrong = load(tmp_path, GOOD + "def optimizer(params):\n    return 3\n")
    with pytest.raises(InputError, match=r"optimizer\(\) returned int 3"):
        wrong.optimizer(own.model().parameters())


def test_data_that_ends_is_started_again(tmp_path: Path) -> None:
    text = "def data(size):\n    for start in range(3):\n        yield torch.full((size, 4), float(start)), None\n"
    items = load(tmp_path, GOOD + text).data(2)
    assert [next(items).inputs[0, 0].item() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("function", ["", "def data(size):\n    while True:\n        yield batch(size)\n"])
def test_data_hangs_on_the_seed_alone(function: str, tmp_path: Path) -> None:
    model_file = load(tmp_path, GOOD + function)
    first, other = model_file.data(2, seed=5), model_file.data(2, seed=6)
    plain = [next(first).inputs for _ in range(3)]
    assert not torch.equal(plain[0], next(other).inputs)
    assert not torch.equal(plain[0], plain[1])
    again = model_file.data(2, seed=5)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(next(again).inputs, plain[0])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)  # what others draw in between changes nothing
    assert torch.equal(next(again).inputs, plain[1])


def test_weights_are_those_of_model_after_manual_seed(tmp_path: Path) -> None:
    model_file = load(tmp_path, GOOD)
    torch.manual_seed(11)
    plain = model_file.model()
    captured = capture(model_file, microbatch_size=2, seed=11)
    assert torch.equal(captured.module.weight, plain.weight)


def test_a_file_that_parses_arguments_gets_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``python model.py``: what this command was given is none of its business, and stays what it was."""
    command = ["pipeplan", "profile", "model.py", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", command)
    parser = "import argparse\nparser = argparse.ArgumentParser()\n"
    path = tmp_path / "model.py"
    path.write_text(
        parser
        + "parser.add_argument('--size', type=int, default=7)\n"
        + GOOD
        + ("global_batch = parser.parse_args().size\n")
    )
    assert load_model_file(path).global_batch == 7
    path.write_text(GOOD + "raise ValueError\n")
    with pytest.raises(InputError):
        load_model_file(path)
    assert sys.argv is command


def test_what_export_stops_at_in_a_library_is_placed(tmp_path: Path) -> None:
    """No line of the user's file is on the way: the library's own is told."""
    (tmp_path / "library_of_nets.py").write_text(
        HEAD
        + """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        y = self.inner(x)
        if (x > 0).nonzero().shape[0] == 7:
            y = y * 2
        return y
"""
    )
    path = tmp_path / "model.py"
    path.write_text("import library_of_nets\ndef model():\n    return library_of_nets.Net()\n" + HEAD + BATCH + LOSS)
    with pytest.raises(InputError, match=r"library_of_nets\.py:9\)"):
        capture(load_model_file(path), microbatch_size=2)
