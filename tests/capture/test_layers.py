"""Layers, edges and what they hold: the user's names, one fingerprint, bytes that add up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import planner.examples
from planner.capture import Capture, RandomKey, Stage, capture_as, load_model_file
from planner.capture.batch import leaves
from planner.errors import InputError
from tests.capture.captures import captured_at

EXAMPLES = Path(planner.examples.__file__).parent
MODELS = Path(__file__).parent / "models"
ALL = [EXAMPLES / "unet.py", *sorted(MODELS.glob("*.py"))]


VARYING = "opaque"
"""What this model saves hangs on the values that it meets."""


@pytest.fixture(scope="module", params=ALL, ids=lambda path: path.stem)
def captured(request: pytest.FixtureRequest) -> Capture:
    return captured_at(request.param)


def test_a_gpt_is_cut_at_its_blocks_and_within_where_they_are_few(tmp_path: Path) -> None:
    """A norm stays with what it is for. In 24 blocks none is too large to be one layer."""
    layers = captured_at(EXAMPLES / "gpt.py").layers
    halves = [f"blocks.{index}.{half}" for index in range(12) for half in ("attention", "mlp")]
    assert [layer.name for layer in layers] == ["token", "position", *halves, "norm", "head"]
    assert len(layers[3].modules) > 1
    path = tmp_path / "deep.py"
    text = (EXAMPLES / "gpt.py").read_text()
    path.write_text(re.sub(r"^BLOCKS = .*$", "BLOCKS = 24", text, flags=re.MULTILINE))
    names = [layer.name for layer in captured_at(path, weightless=True).layers]
    assert names == ["token", "position", *(f"blocks.{index}" for index in range(24)), "norm", "head"]


TOWER = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, width), nn.Linear(width, 32)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())
def model():
    return nn.Sequential(*(Block(width) for width in {widths}))
def batch(size):
    return torch.randn(size, 32), torch.randn(size, 32)
def loss(output, target):
    return (output - target).square().mean()
"""


def test_one_layer_that_is_much_of_the_whole_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "tower.py"
    path.write_text(TOWER.format(widths=[64] * 20 + [4096] + [64] * 20))
    names = [layer.name for layer in captured_at(path, weightless=True).layers]
    assert names == [*map(str, range(20)), "20.up", "20.down", *map(str, range(21, 41))]


@pytest.mark.slow
def test_hundreds_of_small_layers_are_fewer(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(TOWER.format(widths=[64] * 300))
    layers = captured_at(path, weightless=True).layers
    assert len(layers) <= 256
    assert [module for layer in layers for module in layer.modules] == [str(index) for index in range(300)]


@pytest.mark.slow  # the fingerprints at another size say so too
@pytest.mark.parametrize("name", ["mixture", "skips", "inplace", "tied"])
def test_layers_do_not_hang_on_the_micro_batch_size(name: str) -> None:
    made = [
        [(layer.name, layer.modules) for layer in captured_at(MODELS / f"{name}.py", microbatch_size=size).layers]
        for size in (1, 2, 5)
    ]
    assert made[0] == made[1] == made[2]


def test_too_large_layers_are_opened_and_what_has_no_parameters_joins() -> None:
    layers = captured_at(EXAMPLES / "vgg16.py").layers
    assert layers[1].name == "features.2"
    assert layers[1].modules == ("features.2", "features.3", "features.4")
    assert all(layer.parameters for layer in layers)


def test_granularity() -> None:
    made = {grain: captured_at(EXAMPLES / "gpt.py", granularity=grain).layers for grain in ("block", "module", "op")}
    assert len(made["block"]) < len(made["module"]) < len(made["op"])
    made["module"] = captured_at(MODELS / "skips.py", granularity="module").layers
    made["op"] = captured_at(MODELS / "skips.py", granularity="op").layers
    assert {"units.2.conv", "units.2.norm"} <= {layer.name for layer in made["module"]}
    assert {"units.2.conv.conv2d", "units.2.norm.batch_norm"} <= {layer.name for layer in made["op"]}
    with pytest.raises(InputError, match="granularity"):
        captured_at(MODELS / "skips.py", granularity="layer")


@pytest.mark.parametrize("granularity", ["block", "module", "op"])
def test_a_fingerprint_brings_its_granularity_back(granularity: str) -> None:
    model_file = load_model_file(MODELS / "skips.py")
    profiled = captured_at(model_file.path, granularity=granularity)
    again = capture_as(model_file, fingerprint=profiled.fingerprint, microbatch_size=2, seed=3)
    assert again.layers == profiled.layers
    other = capture_as(model_file, fingerprint="another model's", microbatch_size=2)
    assert other.fingerprint == captured_at(model_file.path).fingerprint


def test_calls_of_one_module_are_layers_of_their_own() -> None:
    names = [layer.name for layer in captured_at(MODELS / "inputs.py").layers]
    assert {"shared.0", "shared.0@1", "embed", "embed@1"} <= set(names)
    tied = [layer for layer in captured_at(MODELS / "tied.py").layers if "token.weight" in layer.parameters]
    assert [layer.name for layer in tied] == ["token", "token@1", "head"]
    assert all(layer.parameter_bytes >= 29 * 16 * 4 for layer in tied)


def test_another_model_has_another_fingerprint(tmp_path: Path) -> None:
    text = (MODELS / "custom.py").read_text()
    prints = set()
    for old, new in [("", ""), ("torch.rand(8)", "torch.rand(1)"), ("range(8)", "range(7)"), ("Nap", "Sleep")]:
        path = tmp_path / "custom.py"
        path.write_text(text.replace(old, new) if old else text)
        prints.add(captured_at(path).fingerprint)
    assert len(prints) == 4


def test_edges_are_a_graph_in_order(captured: Capture) -> None:
    number = {layer.name: index for index, layer in enumerate(captured.layers)}
    assert len(number) == len(captured.layers)
    assert all(number[edge.source] < number[edge.target] for edge in captured.edges)


def test_edges_and_fingerprint_are_those_of_the_model_at_any_size(captured: Capture) -> None:
    larger = captured_at(captured.model_file.path, microbatch_size=5, seed=1)
    if captured.model_file.name != VARYING:
        assert larger.edges == captured.edges
    assert larger.fingerprint == captured.fingerprint


def test_a_cut_against_the_edges_is_refused(captured: Capture) -> None:
    names = [layer.name for layer in captured.layers]
    with pytest.raises(InputError, match="no stage holds layer"):
        captured.stages([names[1:]])
    with pytest.raises(InputError, match="stands in stage"):
        captured.stages([names, names[:1]])
    with pytest.raises(InputError, match="there is no layer 'nowhere'"):
        captured.stages([[*names, "nowhere"]])
    for edge in captured.edges[:1]:
        with pytest.raises(InputError, match=f"holds layer '{edge.target}', which needs '{edge.source}' of stage"):
            captured.stages([[edge.target], [name for name in names if name != edge.target]])


# --- what a layer holds -----------------------------------------------------------------------------------------------


def walked(captured: Capture) -> Iterator[tuple[int, Stage, dict[str, Tensor], dict[int, int]]]:
    """Each layer alone on real inputs: number, stage, what it received, and storages that it saved with their sizes."""
    made: dict[str, Tensor] = {}
    module = captured.module
    for index, layer in enumerate(captured.layers):
        stage = Stage(captured.program([layer.name]), module)
        received = {boundary.name: made[boundary.name] for boundary in stage.program.receives}
        given = [*module.parameters(), *module.buffers(), *(x for x in _flat(captured) if isinstance(x, Tensor))]
        excluded = {tensor.untyped_storage().data_ptr() for tensor in (*given, *stage.program.constants)}
        saved: dict[int, int] = {}
        alive = []  # an address may not be used twice

        def pack(
            tensor: Tensor, saved: dict[int, int] = saved, excluded: set[int] = excluded, alive: list[Any] = alive
        ) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                saved[storage.data_ptr()] = storage.nbytes()
                alive.append((storage, StorageWeakRef(storage)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            done = stage.forward(0, captured.batch.inputs, captured.batch.target, received, RandomKey(0, 0, 0))
        made |= done.sent
        yield index, stage, received, saved


def _flat(captured: Capture) -> tuple[Any, ...]:
    return leaves(captured.batch)


def test_saved_bytes_are_those_that_autograd_saves(captured: Capture) -> None:
    """A layer's own storages, and those that other layers made and it saves, flagged on the edge."""
    if captured.model_file.name == VARYING:
        return
    flagged: dict[str, dict[str, bool]] = {layer.name: {} for layer in captured.layers}
    saved_elsewhere: dict[str, dict[str, int]] = {layer.name: {} for layer in captured.layers}
    sizes: dict[str, int] = {}
    for edge in captured.edges:
        for tensor in edge.tensors:
            flagged[edge.target][tensor.name] = tensor.saved
            sizes[tensor.name] = tensor.bytes_per_sample * captured.microbatch_size + tensor.fixed_bytes
            if tensor.saved:
                saved_elsewhere[edge.source][tensor.name] = sizes[tensor.name]
    changed_in_place = captured.model_file.name == "inplace"  # a received tensor is copied before it is changed
    for index, stage, received, saved in walked(captured):
        layer = captured.layers[index]
        foreign = 0
        for name, tensor in received.items():
            address = tensor.untyped_storage().data_ptr()
            if not changed_in_place:
                assert flagged[layer.name][name] == (address in saved), (layer.name, name)
            foreign += saved.pop(address, 0)
        own = sum(saved.values())
        upper = own + sum(saved_elsewhere[layer.name].values())
        slack = sum(sizes[name] for name in received) if changed_in_place else 0
        assert own - slack <= layer.saved_bytes <= upper, layer.name
        assert stage.program.layers == (layer.name,)


def test_bytes_that_wait_for_weight_gradients(captured: Capture) -> None:
    """What waits between I and W is there after I, and gone after W."""
    names = [layer.name for layer in captured.layers]
    (program,) = captured.stages([names])
    stage = Stage(program, captured.module, defer=False)
    stage.forward(0, captured.batch.inputs, captured.batch.target, {}, RandomKey(0, 0, 0), split=True)
    stage.backward_input(0, {}, 1.0)
    waiting = stage.waiting_for_weight(0)
    assert bool(waiting) == bool(program.split or program.derived)
    stage.backward_weight(0)
    stage.finish_gradients()
    assert all(p.grad is not None for name, p in captured.module.named_parameters() if _is_trained(captured, name))
    captured.module.zero_grad()


def _is_trained(captured: Capture, name: str) -> bool:
    parameter = captured.module.get_parameter(name)
    return parameter.requires_grad and any(name in layer.parameters for layer in captured.layers)
