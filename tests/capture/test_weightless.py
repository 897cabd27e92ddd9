"""Captured without the memory of weights: the same layers, edges and sizes, and no memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.capture import Capture, capture, load_model_file
from planner.capture.layers import Granularity
from planner.errors import InputError
from planner.examples import example_text
from planner.measure.held import measure_held
from tests.capture.captures import captured_at
from tests.capture.odd_models import ODD_MODELS
from tests.capture.real_models import REAL_MODELS

MODELS = sorted(path.stem for path in (Path(__file__).parent / "models").glob("*.py"))


def both(path: Path, granularity: Granularity = "block") -> tuple[Capture, Capture]:
    real, without = (captured_at(path, granularity=granularity, weightless=weightless) for weightless in (False, True))
    return real, without


UNLIKE = {"mixture": ("lstm",), "sized": ("",), "opaque": ("branch",)}
"""Layers of which a kernel saves something of its own, or whose sizes hang on values: how their names start."""


def assert_same(real: Capture, without: Capture) -> None:
    for one, other in zip(real.layers, without.layers, strict=True):
        if one.name.startswith(UNLIKE.get(real.model_file.name, ())):
            other = replace(other, saved_bytes=one.saved_bytes, forward_flops=one.forward_flops)
        assert other == one
    assert without.edges == real.edges
    assert without.fingerprint == real.fingerprint
    assert all(parameter.is_meta for parameter in without.module.parameters())
    assert not any(buffer.is_meta for buffer in without.module.buffers())


@pytest.mark.parametrize("granularity", ["block", pytest.param("op", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_the_layers_are_those_of_the_model_with_weights(name: str, granularity: Granularity) -> None:
    assert_same(*both(Path(__file__).parent / "models" / f"{name}.py", granularity))


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["block", "op"])
@pytest.mark.parametrize("name", ["gpt", "unet", "vgg16", *REAL_MODELS])
def test_the_layers_of_real_models_too(name: str, granularity: Granularity, tmp_path: Path) -> None:
    if name in REAL_MODELS:
        pytest.importorskip("transformers")
        pytest.importorskip("diffusers")
    path = tmp_path / f"real_{name}.py"
    path.write_text(REAL_MODELS[name] if name in REAL_MODELS else example_text(name))
    assert_same(*both(path, granularity))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_whose_kernel_reads_lengths_needs_no_values(reduction: str, tmp_path: Path) -> None:
    """It saves as much as it does for the longest that there can be."""
    text = (
        ODD_MODELS["ctc"]
        .replace("randint(2, 6,", "randint(5, 6,")
        .replace(", lengths)\n", f", lengths, 0, {reduction!r}).mean()\n")
    )
    path = tmp_path / f"odd_{reduction}.py"
    path.write_text(text)
    assert_same(*both(path))


def test_what_the_input_decides_is_decided_without_weights_too(tmp_path: Path) -> None:
    """Around modules kept whole, which fakes cannot run, it is not kept whole itself."""
    path = tmp_path / "odd_around.py"
    path.write_text(ODD_MODELS["decides_around_whole"])
    real, without = both(path)
    assert_same(real, without)
    assert [layer.name for layer in real.layers] == [*(f"0.blocks.{block}" for block in range(4)), "1"]


MORE = sorted((Path(__file__).parent / "more").glob("*.py"))
"""Experts, state spaces, two encoders, windows, adapters, loops, arguments that are no tensors."""


@pytest.mark.slow
@pytest.mark.parametrize("path", MORE, ids=lambda path: path.stem)
def test_models_of_more_kinds(path: Path) -> None:
    """With weights and without they have the same layers, and all of these run, each alone."""
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    real, without = both(path)
    assert [layer.name for layer in without.layers] == [layer.name for layer in real.layers]
    assert without.fingerprint == real.fingerprint
    assert len(measure_held(real)) == len(real.layers) >= 8


LARGE = """
import torch
from torch import nn
def model():
    return nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range({count})))
def batch(size):
    return torch.randn(size, 8192), torch.randn(size, 8192)
def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.slow
def test_no_memory_is_taken_for_weights(tmp_path: Path) -> None:
    """64 GB of weights in a process that may take 2 GB more than it has."""
    path = tmp_path / "large.py"
    path.write_text(LARGE.format(count=256))
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from planner.capture import capture, load_model_file\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))\n"
        f"found = capture(load_model_file(Path({str(path)!r})), microbatch_size=1, weightless=True)\n"
        "print(len(found.layers), sum(layer.parameter_bytes for layer in found.layers))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["256", str(256 * 8192 * 8192 * 4)], done.stderr


def test_faults_are_the_models_own(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(LARGE.format(count=2).replace("randn(size, 8192), ", "randn(size, 8191), "))
    with pytest.raises(InputError, match=r"cannot be multiplied|size mismatch|must have same"):
        capture(load_model_file(path), microbatch_size=1, weightless=True)
