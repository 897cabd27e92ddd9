"""Real models of transformers, diffusers and torch through ``pipeplan profile`` itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import pipeplan

from planner.profile import read_profile
from tests.capture.real_models import REAL_MODELS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_are_profiled(name: str, tmp_path: Path) -> None:
    """Measured whole and layer by layer: the same model, the same bytes."""
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    path = tmp_path / f"profiled_{name}.py"
    path.write_text(REAL_MODELS[name])
    found = []
    for way in ("--whole", "--layerwise"):
        output = tmp_path / f"{way}.json"
        size = 2 if name == "resnet" else 1  # its last batch norms see one value a sample
        answer = pipeplan("profile", path, "--device", "cpu", "--microbatch", size, way, "-o", output)
        assert answer.code == 0, answer.err
        found.append(read_profile(output))
    whole, layerwise = found
    assert whole.model == layerwise.model
    assert [layer.costs[0].saved_bytes for layer in whole.layers] == [
        layer.costs[0].saved_bytes for layer in layerwise.layers
    ]
    assert all(layer.costs[0].forward_s > 0 for layer in whole.layers)
