"""What a rank holds is what was planned, whichever of the ranks is slower than planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import pipeplan


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_memory_is_as_planned_whoever_is_slow(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large messages that skip layers; the plan has the later layers take ``factor`` of what they take."""
    monkeypatch.chdir(tmp_path)
    assert pipeplan("example", "unet").code == 0
    assert pipeplan("profile", "unet.py", "--microbatch", "2").code == 0
    path = tmp_path / "profiles" / "unet.json"
    profile = json.loads(path.read_text())
    for layer in profile["layers"]:
        if layer["name"].startswith("up."):
            for row in layer["costs"]:
                row |= {name: factor * row[name] for name in ("forward_s", "backward_input_s", "backward_weight_s")}
    path.write_text(json.dumps(profile))
    asked = ["--gpus", "2", "--pipeline", "2", "--virtual", "1", "--schedule", "1f1b", "--batch", "16"]
    assert pipeplan("solve", *asked, "--microbatch", "2").code == 0
    answer = pipeplan("run", "plan.yaml", "--steps", "2", "--json")
    assert answer.code == 0, answer
    said = json.loads(answer.out)
    for planned, measured in zip(said["predicted"]["ranks"], said["ranks"], strict=True):
        assert 0.92 <= measured["peak_memory_bytes"] / planned["peak_memory_bytes"] <= 1.01
