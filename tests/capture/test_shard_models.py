"""Models of many kinds on several tensor ranks: as one process trains them, with what stays whole said and why."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from planner.capture.shard import shard
from tests.capture.pipelines import differences
from tests.capture.split_models import SPLIT_MODELS
from tests.capture.tensor_ranks import Step, largest_difference
from tests.capture.test_real_models import MORE
from tests.capture.test_shard import captured_of, sharded_steps, share_of, whole_step

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs the packages of the extra 'models': pip install pipeplan[models]",
)
TEXTS = SPLIT_MODELS | MORE

MOST = {
    "gemma": 0.53,
    "gemma3": 0.51,
    "falcon": 0.61,
    "falcon_new": 0.51,
    "falcon_alibi": 0.52,
    "neox": 0.51,
    "phi": 0.51,
    "opt": 0.515,
    "qwen2": 0.51,
    "qwen3": 0.51,
    "qwen3moe": 0.51,
    "mpt": 0.51,
    "gptj": 0.51,
    "bigcode": 0.61,
    "cohere": 0.51,
    "olmo2": 0.51,
    "deepseek": 0.55,
    "gptoss": 0.52,
    "t5gated": 0.51,
    "marian": 0.515,
    "llama_masked": 0.51,
    "llama_eager": 0.51,
    "encoder": 0.51,
    "mha": 0.51,
    "conv": 0.57,
    "lora_tied": 0.52,
    "moe_dense": 0.501,
    "moe_bmm": 0.501,
    "mixer": 0.53,
    "lstm": 0.87,
    "mlp_resnet": 0.53,
    "dlrm": 0.51,
    "glu_perceiver": 0.52,
    "bart": 0.73,
    "bloom": 0.82,
    "deberta": 0.545,
    "gemma2": 0.51,
    "lora": 0.51,
    "mamba": 0.95,
    "modernbert": 0.52,
    "swin": 0.56,
    "universal": 0.7,
    "expert_loop": 0.89,
    "llama4": 0.51,
    "funnel": 0.515,
    "convnextv2": 0.7,
    "beit": 0.57,
    "nystrom": 0.71,
    "mamba2": 0.65,
    "dit": 0.62,
    "sd3": 0.64,
    "linear_attention": 0.54,
    "gru": 0.69,
}
"""The share of the parameters that one of two ranks may hold."""

WHOLE = {
    "conv": ("0", "conv2d has no rule"),
    "lstm": ("rnn", "lstm has no rule"),
    "bloom": ("transformer.h.0.mlp.dense_h_to_4h", "run as it is"),
    "mamba": ("backbone.layers.0.mixer.in_proj", "conv1d has no rule"),
    "falcon": ("transformer.h.0.self_attention.query_key_value", "index picks entries of the split dimension"),
    "gemma": ("model.layers.0.self_attn.k_proj", "attention over a split dimension"),
    "llama4": ("model.layers.0.feed_forward.router", "topk runs over the split dimension"),
    "convnextv2": ("convnextv2.encoder.stages.0.layers.0.dwconv", "conv2d has no rule"),
    "dit": ("transformer_blocks.0.norm1.linear", "layer_norm runs over the split dimension"),
    "gru": ("rnn", "gru has no rule"),
}
"""A module of each that is left whole, and words of the reason."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=NEEDED if "transformers" in TEXTS[name] or "diffusers" in TEXTS[name] else ())
        for name in MOST
    ],
)
def test_a_model_on_several_ranks_is_that_of_one(name: str, tmp_path: Path) -> None:
    """In float64, but for what models themselves compute in float32; with tokens in parts too."""
    torch.set_default_dtype(torch.float64)
    try:
        captured = captured_of(tmp_path / f"{name}.py", TEXTS[name])
        whole = whole_step(captured)
        for size in (2, 4):
            one, other = sharded_steps(
                captured, size, Step(), Step(min(3, len(captured.layers)), split=True, recompute=True)
            )
            (tokens,) = sharded_steps(captured, size, Step(), sequence=True)
            for made in (one, tokens):
                difference, where = largest_difference(whole, made)
                assert difference < 1e-6, (size, where)
            assert differences(one, other) == [], size
    finally:
        torch.set_default_dtype(torch.float32)
    assert share_of(captured, 2) <= MOST[name]
    sharding = shard(captured, tensor=2).sharding
    assert sharding is not None
    told = {module: why for layer in sharding.layers for module, why in layer.whole}
    for module, why in [WHOLE[name]] if name in WHOLE else []:
        assert why in told[module]
