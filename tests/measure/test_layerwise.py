"""Layers measured one by one: the figures of the model measured whole, in the memory of one layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.capture import capture, load_model_file
from planner.measure.held import measure_held
from planner.measure.layerwise import TooLargeError, measure_layerwise
from planner.measure.room import fits_whole
from planner.profile import Profile, read_profile
from tests.measure.test_profiler import EXAMPLES, _copy, _measured

MODELS = Path(__file__).parents[1] / "capture" / "models"


def _both(path: Path, size: int = 2) -> tuple[Profile, Profile]:
    whole, layerwise = (_measured(path, (size,), layerwise=wanted).profile for wanted in (False, True))
    return whole, layerwise


@pytest.mark.parametrize(
    "name", [pytest.param("tied", marks=pytest.mark.slow), "skips", pytest.param("opaque", marks=pytest.mark.slow)]
)
def test_the_layers_are_those_of_the_model_measured_whole(name: str) -> None:
    """Tied weights, skips over layers, modules kept whole: all but the times is the same."""
    torch.set_num_threads(1)
    whole, layerwise = _both(MODELS / f"{name}.py")
    assert layerwise.model == whole.model
    assert layerwise.edges == whole.edges
    for one, other in zip(layerwise.layers, whole.layers, strict=True):
        assert (one.name, one.kind, one.modules, one.shared) == (other.name, other.kind, other.modules, other.shared)
        assert one.parameter_bytes == other.parameter_bytes
        assert one.trainable_bytes == other.trainable_bytes
        assert one.buffer_bytes == other.buffer_bytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "gpt" else pytest.mark.slow) for n in EXAMPLES])
def test_bytes_are_those_of_the_model_measured_whole(name: str, tmp_path: Path) -> None:
    model_file = load_model_file(_copy(name, tmp_path))
    real = capture(model_file, microbatch_size=2)
    without = capture(model_file, microbatch_size=2, weightless=True)
    _, held = measure_layerwise(without, free_bytes=2**32, progress=lambda what, done: None)
    expected = measure_held(real)
    assert [one.saved_for_weight for one in held] == [one.saved_for_weight for one in expected]
    for one, other in zip(held, expected, strict=True):
        # a real gradient may be expanded or have gaps (of a mean, of a concatenation): made up, it is dense
        assert one.workspace == pytest.approx(other.workspace, rel=0.3, abs=2**16)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_times_are_those_of_the_model_measured_whole(name: str, tmp_path: Path) -> None:
    whole, layerwise = _both(_copy(name, tmp_path))
    totals = [
        sum(c.forward_s + c.backward_input_s + c.backward_weight_s for layer in profile.layers for c in layer.costs)
        for profile in (whole, layerwise)
    ]
    assert totals[1] == pytest.approx(totals[0], rel=0.2)


def test_one_layer_that_needs_more_than_there_is_is_named(tmp_path: Path) -> None:
    captured = capture(load_model_file(_copy("gpt", tmp_path)), microbatch_size=1, weightless=True)
    with pytest.raises(TooLargeError, match=r"^layer token alone needs [0-9]+ bytes, of which 1000 are free"):
        measure_layerwise(captured, free_bytes=1000, progress=lambda what, done: None)


LARGE = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())
def model():
    return nn.Sequential(*(Block() for _ in range({count})))
def batch(size):
    return torch.randn(size, 16, 1024), torch.randn(size, 16, 1024)
def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.slow
def test_a_model_larger_than_the_machine_is_profiled(tmp_path: Path) -> None:
    """A terabyte of weights: nobody asks for it to be taken layer by layer, and it takes a few layers' memory."""
    path = tmp_path / "large.py"
    path.write_text(LARGE.format(count=400).replace("1024", "8192").replace("4096", "32768"))
    assert not fits_whole(load_model_file(path), "cpu", neighbours=0)
    path.write_text(LARGE.format(count=80))  # 2.7 GB
    code = (
        "import atexit, re, sys\n"
        "from pathlib import Path\n"
        "from planner.cli.main import main\n"
        # not getrusage's: that of a child begins with what its parent held
        "peak = lambda: re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
        f"main(['profile', {str(path)!r}, '--device', 'cpu', '--layerwise', '--microbatch', '1', '-o', 'p.json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "layer by layer" in done.stdout
    assert int(done.stderr.split()[-1]) * 1024 < 1.4 * 2**30, "held more than a few layers at once"
    profile = read_profile(tmp_path / "p.json")
    assert len(profile.layers) == 80
    assert profile.device.software["measured"] == "layer by layer"
    assert len({layer.costs[0].saved_bytes for layer in profile.layers[:-1]}) == 1
