"""The example models, cut and run as pipelines in one process: equal to the bit to the same graph whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import planner.examples
from planner.capture import Capture, capture, load_model_file
from tests.capture.pipelines import Pipeline, differences, even_cut, gpipe, one_f_one_b

MICROBATCHES = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["gpt", "unet", "vgg16"])
def captured(request: pytest.FixtureRequest) -> Capture:
    path = Path(planner.examples.__file__).parent / f"{request.param}.py"
    return capture(load_model_file(path), microbatch_size=2)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_every_cut_equals_one_stage(captured: Capture, stages: int) -> None:
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))
    assert all(gradient is not None for gradient in whole.gradients.values())
    for order in (gpipe, one_f_one_b):
        for split in (False, True):
            for recompute in (False, True):
                pipeline = Pipeline(captured, even_cut(captured, stages), recompute=recompute)
                step = pipeline.step(batch, MICROBATCHES, actions=order(stages, MICROBATCHES, split=split))
                assert differences(whole, step) == [], (order.__name__, split, recompute)
