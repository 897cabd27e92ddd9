"""Models of every kind, cut and run as pipelines in one process: equal to the bit to the graph whole, and to eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import planner.examples
from planner.capture import Capture
from tests.capture.captures import captured_at
from tests.capture.pipelines import Pipeline, Trained, differences, eager_step, even_cut, gpipe, one_f_one_b

MICROBATCHES = 3
EXAMPLES = Path(planner.examples.__file__).parent
MODELS = Path(__file__).parent / "models"
SUMMED_BY_LAYER = {
    "tied": {"token.weight"},
    "opaque": {"dropped.inner.0.weight", "dropped.inner.0.bias"},
    "inputs": {"embed.weight", "shared.0.weight", "shared.0.bias", "shared.2.weight", "shared.2.bias"},
}
"""Parameters that several layers read: summed layer by layer here, use by use in plain PyTorch."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


FILES = {
    **{name: EXAMPLES / f"{name}.py" for name in ("gpt", "unet", "vgg16")},
    **{path.stem: path for path in sorted(MODELS.glob("*.py"))},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name == "vgg16" else ()) for name in FILES],
)
def captured(request: pytest.FixtureRequest) -> Capture:
    return captured_at(FILES[request.param])


@pytest.fixture(scope="module")
def whole(captured: Capture) -> Trained:
    """K = 1, whole backwards, micro-batches in order: what everything else is compared with."""
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    return Pipeline(captured, even_cut(captured, 1)).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))


WAYS = tuple((order, split, split == (order is gpipe)) for order in (gpipe, one_f_one_b) for split in (False, True))
"""Order of actions, split backward, recompute."""


@pytest.mark.parametrize(
    ("stages", "ways"),
    [
        (2, WAYS[1:2]),
        (4, WAYS[2:3]),
        (8, (WAYS[0], WAYS[3])),
        *(pytest.param(k, WAYS, marks=pytest.mark.slow) for k in (2, 4, 8)),
    ],
)
def test_every_cut_equals_one_stage(captured: Capture, whole: Trained, stages: int, ways: tuple[Any, ...]) -> None:
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    for order, split, recompute in ways:
        pipeline = Pipeline(captured, even_cut(captured, stages), recompute=recompute)
        step = pipeline.step(batch, MICROBATCHES, actions=order(stages, MICROBATCHES, split=split))
        assert differences(whole, step) == [], (order.__name__, split, recompute)


def test_split_backward_of_all_layers_equals_whole_backward(captured: Capture, whole: Trained) -> None:
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    pipeline = Pipeline(captured, even_cut(captured, 1))
    pipeline.stages[0]._defer = False
    step = pipeline.step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES, split=True))
    assert differences(whole, step) == []


def test_one_stage_equals_plain_pytorch(captured: Capture, whole: Trained) -> None:
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    plain, aligned = eager_step(captured, batch)
    assert aligned
    found = set(differences(whole, plain))
    assert found <= SUMMED_BY_LAYER.get(captured.model_file.name, set())
    for name in found:
        torch.testing.assert_close(whole.gradients[name], plain.gradients[name], rtol=1e-5, atol=1e-7)


def test_stages_name_every_parameter_and_gradient(captured: Capture, whole: Trained) -> None:
    trained = {name for name, parameter in captured.module.named_parameters() if parameter.requires_grad}
    used = {name for layer in captured.layers for name in layer.parameters}
    assert used & trained == {name for name, gradient in whole.gradients.items() if gradient is not None}
