"""The profiles that ship are whole, and of the models that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.capture import capture, load_model_file
from planner.profile import read_profile

RECORDED = sorted((Path(__file__).parents[2] / "profiles" / "recorded").glob("*.json"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if "llama" in path.stem else (), id=path.stem) for path in RECORDED],
)
def test_a_recorded_profile_is_of_its_model(path: Path) -> None:
    profile = read_profile(path)
    assert profile.provenance == ("estimated" if path.stem.startswith("h100") else "measured")
    source = (path.parent / profile.model.source).resolve()
    if "llama" in path.stem:
        pytest.importorskip("transformers")
    captured = capture(load_model_file(source), microbatch_size=1, weightless=True)
    assert captured.fingerprint == profile.model.fingerprint
    assert [layer.name for layer in captured.layers] == [layer.name for layer in profile.layers]
    for layer, cost in ((layer, layer.costs[0]) for layer in profile.layers):
        assert cost.microbatch_size == 1
        assert cost.forward_s > 0
        assert (cost.spread is None) == (profile.provenance == "estimated"), layer.name


def test_there_are_recorded_profiles() -> None:
    names = {path.stem for path in RECORDED}
    assert {"cpu-gpt", "cpu-unet", "h100-sxm-llama_2_7b"} <= names
