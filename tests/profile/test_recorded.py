"""The profiles that ship are whole, and of the models that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.capture import capture, load_model_file
from planner.profile import read_profile
from planner.profile.tensor_sizes import sizes_of
from planner.report.splits import share_of

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


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RECORDED if "llama" in path.stem], ids=lambda path: path.stem)
def test_what_tensor_ranks_of_a_decoder_hold_and_exchange(path: Path) -> None:
    """With tokens in parts a block gathers twice and scatters twice, and gathers twice more for its backward."""
    profile = read_profile(path)
    assert profile.sequence_parallel
    assert sizes_of(profile) == (1, 2, 4, 8)
    width = {"h100-sxm-llama_2_70b": 8192, "h100-sxm-llama_2_7b": 4096}[path.stem]
    for size in (2, 4, 8):
        assert share_of(profile, size) == pytest.approx(1 / size, rel=2e-3)
        for layer in profile.layers:
            whole = next(cost for cost in layer.costs if (cost.microbatch_size, cost.tensor) == (1, 1))
            part = next(cost for cost in layer.costs if (cost.microbatch_size, cost.tensor) == (1, size))
            if not layer.name.startswith("model.layers.") or layer.name.endswith(".0"):
                continue  # the first block may hold the embedding too
            assert part.forward_s < 1.25 * whole.forward_s / size + 1e-3
            assert part.saved_bytes == pytest.approx(whole.saved_bytes / size, rel=0.1)
            assert part.collectives is not None
            sums = part.collectives.forward, part.collectives.backward_input
            assert [one.count for one in sums] == [2, 3]
            assert [one.bytes for one in sums] == [count * 4096 * width * 2 for count in (2, 3)]
