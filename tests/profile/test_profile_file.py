"""Profile files: what is written is read, and each rule between their entries is kept by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from support.plans import profiles

from planner.errors import InputError
from planner.profile import Profile, read_profile, write_profile


@given(profiles())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile


@pytest.fixture
def document() -> dict[str, Any]:
    """Two layers, as the format has them at its shortest."""
    cost = {
        "microbatch_size": 1,
        "tensor": 1,
        "forward_s": 1,
        "backward_input_s": 1e-3,
        "backward_weight_s": 0,
        "saved_bytes": 4,
        "saved_for_weight_bytes": 4,
        "workspace_bytes": 0,
    }
    layer = {
        "kind": "Linear",
        "modules": ["a"],
        "parameter_bytes": 8,
        "trainable_bytes": 8,
        "buffer_bytes": 0,
        "shared": {"weight": {"bytes": 8, "trainable": True}},
    }
    tensor = {"name": "x", "bytes_per_sample": 4, "fixed_bytes": 0, "grad": True}
    return {
        "format": "pipeplan-profile/1",
        "model": {"name": "m", "source": "m.py", "fingerprint": "f"},
        "device": {"kind": "cpu", "name": "d", "memory_bytes": 0, "software": {}},
        "provenance": "measured",
        "dtype": "float32",
        "gradient_bytes_per_trainable_byte": 1,
        "optimizer": {"name": "sgd", "state_bytes_per_trainable_byte": 0, "step_s_per_trainable_byte": 0},
        "layers": [
            {"name": "a", **layer, "costs": [dict(cost), {**cost, "microbatch_size": 2}]},
            {"name": "b", **layer, "costs": [dict(cost)]},
        ],
        "edges": [{"source": "a", "target": "b", "tensors": [tensor]}],
    }


def _twice(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[key].append(data[key][0])


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last, value = path

    def edit(data: Any) -> None:
        for part in parents:
            data = data[part]
        data[last] = value

    return edit


def _tensor_again(size: int) -> Callable[[dict[str, Any]], None]:
    def edit(data: dict[str, Any]) -> None:
        tensor = data["edges"][0]["tensors"][0]
        data["layers"].append({**data["layers"][1], "name": "c"})
        data["edges"].append({"source": "a", "target": "c", "tensors": [{**tensor, "bytes_per_sample": size}]})

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_twice("layers"), "layers[2].name: 'a' is also the name of layers[0]"),
        (_twice("edges"), "edges[1]: repeats edges[0]"),
        (_set("layers", 0, "trainable_bytes", 9), "layers[0].trainable_bytes: is more than parameter_bytes"),
        (_set("layers", 0, "shared", "weight", "bytes", 9), "layers[0].shared: is more than parameter_bytes"),
        (
            _set("layers", 0, "shared", {"weight": {"bytes": 4}}),
            "layers[1].shared.weight: 8 bytes here, 4 in layer 'a'",
        ),
        (_set("layers", 0, "trainable_bytes", 7), "layers[0].shared: its trainable ones are more than trainable_bytes"),
        (_set("layers", 0, "costs", 1, "microbatch_size", 1), "layers[0].costs[1]: micro-batch size 1 with tensor 1"),
        (_set("layers", 0, "costs", 1, "tensor", 2), "layers[0].costs[1].parameter_bytes: is missing"),
        (_set("layers", 0, "costs", 1, "buffer_bytes", 2), "layers[0].costs[1].buffer_bytes: belongs to rows with"),
        (_set("layers", 0, "costs", []), "layers[0].costs: "),
        (_set("layers", 0, "costs", 0, "forward_s", -1), "layers[0].costs[0].forward_s: must be at least 0, not -1"),
        (_set("layers", 0, "costs", 0, "forward_s", "1"), "layers[0].costs[0].forward_s: must be a number"),
        (_set("layers", 0, "costs", 0, "forward_s", None), "layers[0].costs[0].forward_s: must be a number, not null"),
        (_set("layers", 0, "color", 1), "layers[0].color: is no key of this format"),
        (_set("layers", []), "layers: "),
        (_set("edges", 0, "source", "z"), "edges[0].source: there is no layer 'z'"),
        (_set("edges", 0, "target", "a"), "edges[0]: goes from 'a' back to 'a'"),
        (_set("edges", 0, "grad", True), "edges[0].grad: is no key of this format"),
        (_tensor_again(5), "edges[1].tensors[0]: 'x' of 'a' has another size in an earlier edge"),
        (_set("format", "pipeplan-profile/2"), "format: pipeplan-profile/2 is not the version read here"),
        (_set("format", "pipeplan-plan/1"), "format: is 'pipeplan-plan/1'; this file must begin with"),
        (_set("format", 1), "format: is 1; this file must begin with"),
        (_set("provenance", "guessed"), "provenance: must be 'measured', 'estimated' or 'imported'"),
    ],
)
def test_a_broken_rule_is_named(
    document: dict[str, Any], tmp_path: Path, edit: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    read_profile(path)
    data = json.loads(json.dumps(document))
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as raised:
        read_profile(path)
    assert str(raised.value).startswith(f"{path}: {said}")


def test_a_cycle_is_a_step_back(document: dict[str, Any], tmp_path: Path) -> None:
    document["edges"].append({"source": "b", "target": "a", "tensors": []})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="goes from 'b' back to 'a'; edges form no cycle"):
        read_profile(path)


def test_a_tensor_of_one_source_is_one_tensor(document: dict[str, Any], tmp_path: Path) -> None:
    _tensor_again(4)(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    assert len(read_profile(path).edges) == 2
