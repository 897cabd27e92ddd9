"""Real models, from small configurations without weights: cut into 4 and 8 stages, equal to the bit to one stage."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch

from planner.capture import EagerReference, capture, load_model_file
from planner.capture.lifted import op_of
from tests.capture.pipelines import Pipeline, Trained, differences, even_cut, gpipe
from tests.capture.real_models import REAL_MODELS

MICROBATCHES = 2
MORE = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "more").glob("*.py"))}
"""Experts, state spaces, two encoders, windows, adapters, loops, arguments that are no tensors."""
MODELS = REAL_MODELS | MORE

needs = {
    name: pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in ("transformers", "diffusers") if package in text),
        reason="needs the packages of the extra 'models': pip install pipeplan[models]",
    )
    for name, text in MODELS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in needs.items()])
def test_a_real_model_equals_one_stage_and_plain_pytorch(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = tmp_path / f"{name}.py"
    path.write_text(MODELS[name])
    captured = capture(load_model_file(path), microbatch_size=2)
    assert len(captured.layers) >= 8
    batch = next(captured.model_file.data(2 * MICROBATCHES))
    whole = Pipeline(captured, even_cut(captured, 1)).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))
    for stages in (4, 8):
        for split in (False, True):
            pipeline = Pipeline(captured, even_cut(captured, stages), recompute=split)
            step = pipeline.step(batch, MICROBATCHES, actions=gpipe(stages, MICROBATCHES, split=split))
            assert differences(whole, step) == [], (stages, split)
    eager = EagerReference(captured)
    losses = eager.step(batch, seed=7, step=0)
    gradients = {key: parameter.grad for key, parameter in eager.module.named_parameters()}
    found = set(differences(whole, Trained(losses, gradients, dict(eager.module.named_buffers()))))
    assert eager.aligned
    readers = Counter(key for layer in captured.layers for key in layer.parameters)
    # Parameters of several layers: their gradients are summed layer by layer, in plain PyTorch use by use.
    assert found <= {key for key, count in readers.items() if count > 1}
    for key in found:
        torch.testing.assert_close(whole.gradients[key], gradients[key], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in ("gpt2", "llama", "bert", "vit")])
def test_attention_keeps_its_fast_kernel(name: str, tmp_path: Path) -> None:
    """No mask is left that says what is_causal says, or nothing."""
    path = tmp_path / f"{name}.py"
    path.write_text(REAL_MODELS[name])
    nodes = capture(load_model_file(path), microbatch_size=2).analysis.flow.live
    calls = [node for node in nodes if op_of(node) is torch.ops.aten.scaled_dot_product_attention.default]
    assert len(calls) == 8
    for node in calls:
        assert (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) is None
        causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
        assert causal == (name in ("gpt2", "llama"))
