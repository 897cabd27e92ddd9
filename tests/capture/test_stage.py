"""What a stage does beside being equal: recompute once, free what it held, hand nothing on where nothing is wanted."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from planner.capture import Capture, RandomKey, Stage
from tests.capture.captures import captured_at
from tests.capture.pipelines import Pipeline, differences, even_cut, gpipe, one_f_one_b

MODELS = Path(__file__).parent / "models"


@pytest.fixture(scope="module")
def naps() -> Capture:
    return captured_at(MODELS / "custom.py")


@pytest.mark.parametrize("split", [False, True])
def test_recompute_runs_the_forward_once_more(naps: Capture, split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    batch = next(naps.model_file.data(4))
    for recompute, forwards in ((False, 1), (True, 2)):
        slept.clear()
        pipeline = Pipeline(naps, even_cut(naps, 4), recompute=recompute)
        pipeline.step(batch, 2, actions=gpipe(4, 2, split=split))
        assert len(slept) == 2 * len(naps.layers) * (forwards + 1)  # micro-batches x layers x (forwards, a backward)


@pytest.mark.parametrize(("name", "granularity"), [("pieces", "op"), ("tied", "module")])
def test_any_granularity(name: str, granularity: str) -> None:
    captured = captured_at(MODELS / f"{name}.py", granularity=granularity)
    batch = next(captured.model_file.data(6))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, 3, actions=gpipe(1, 3))
    for split in (False, True):
        step = Pipeline(captured, even_cut(captured, 4)).step(batch, 3, actions=one_f_one_b(4, 3, split=split))
        assert differences(whole, step) == []


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_nothing_of_a_micro_batch_outlives_its_backward(split: bool, recompute: bool) -> None:
    captured = captured_at(MODELS / "skips.py")
    names = [layer.name for layer in captured.layers]
    program = captured.program(names[1:-1])
    stage = Stage(program, captured.module, recompute=recompute)
    received = {b.name: torch.randn(b.shape).as_strided(b.shape, b.stride) for b in program.receives}
    done = stage.forward(0, captured.batch.inputs, captured.batch.target, received, RandomKey(0, 0, 0), split=split)
    gradients = {name: torch.ones_like(done.sent[name]) for name in program.roots}
    held = [weakref.ref(tensor) for tensor in (*received.values(), *done.sent.values(), *gradients.values())]
    if split:
        returned = stage.backward_input(0, gradients, 1.0)
        stage.backward_weight(0)
    else:
        returned = stage.backward(0, gradients, 1.0)
    assert sorted(returned) == sorted(program.returns)
    del received, done, gradients, returned
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_a_stage_that_hands_nothing_on_leaves_all_to_w(naps: Capture) -> None:
    (program,) = naps.stages([[layer.name for layer in naps.layers]])
    stage = Stage(program, naps.module)
    stage.forward(0, naps.batch.inputs, naps.batch.target, {}, RandomKey(0, 0, 0), split=True)
    assert stage.backward_input(0, {}, 1.0) == {}
    assert all(leaf.grad is None for leaf in stage._leaves)
    stage.backward_weight(0)
    assert all(leaf.grad is not None for leaf in stage._leaves)
