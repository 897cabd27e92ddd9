"""How far one profile is from another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.measure.compare import difference
from planner.profile import Cost, Device, Layer, OptimizerCost, Profile, ProfiledModel


def _profile(*seconds: float, fingerprint: str = "f", device: str = "this") -> Profile:
    layers = tuple(
        Layer(
            name=f"layer{index}",
            kind="Linear",
            modules=(),
            parameter_bytes=0,
            trainable_bytes=0,
            buffer_bytes=0,
            costs=(
                Cost(
                    microbatch_size=2,
                    forward_s=value / 2,
                    backward_input_s=value / 4,
                    backward_weight_s=value / 4,
                    saved_bytes=0,
                    saved_for_weight_bytes=0,
                    workspace_bytes=0,
                ),
            ),
        )
        for index, value in enumerate(seconds)
    )
    return Profile(
        model=ProfiledModel(name="m", source="m.py", fingerprint=fingerprint),
        device=Device(kind="cpu", name=device, memory_bytes=0, software={}),
        provenance="measured",
        dtype="float32",
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=OptimizerCost(name="SGD", state_bytes_per_trainable_byte=0.0, step_s_per_trainable_byte=0.0),
        layers=layers,
        edges=(),
    )


def test_median_and_largest_with_their_place() -> None:
    found = difference(_profile(1.0, 1.0, 1.0), _profile(1.1, 0.5, 1.2))
    assert found is not None
    assert found.median == pytest.approx(0.2)
    assert found.largest == pytest.approx(-0.5)
    assert (found.layer, found.microbatch_size) == ("layer1", 2)


def test_other_models_and_other_machines_are_not_compared() -> None:
    assert difference(_profile(1.0), _profile(1.0, fingerprint="g")) is None
    assert difference(_profile(1.0), _profile(1.0, device="that")) is None


def test_only_rows_that_both_have() -> None:
    later = _profile(3.0, 1.0)
    odd = replace(later.layers[0], costs=(replace(later.layers[0].costs[0], microbatch_size=4),))
    found = difference(_profile(1.0, 1.0), replace(later, layers=(odd, later.layers[1])))
    assert found is not None
    assert found.largest == 0
    assert difference(_profile(1.0), replace(later, layers=(odd,))) is None
