"""``pipeplan show``: a plan or a profile on one screen, or as one document."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import pipeplan, refused
from support.damage import PIPEDREAM
from support.plans import chain_profile, fresh_plan, plans, profiles, save

from planner.profile import Collective, Collectives, Edge, EdgeTensor, Profile, write_profile
from planner.schedules import ScheduleName
from planner.units import format_bytes, format_seconds


def _plan(folder: Path, num_layers: int, num_stages: int, **shape: Any) -> Path:
    profile = chain_profile(num_layers)
    names = [layer.name for layer in profile.layers]
    each = num_layers // num_stages
    cut = [names[place : place + each] for place in range(0, num_layers, each)]
    plan = fresh_plan(profile, cut, **{"ranks": num_stages, "microbatches": 8, **shape})
    assert plan.predicted is not None
    return save(plan, profile, folder, bound_s=plan.predicted.iteration_s / 1.03)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def _lines(*words: object) -> list[str]:
    """What is shown on a screen of 80 columns, line by line."""
    answer = pipeplan("show", *words)
    assert (answer.code, answer.err) == (0, "")
    lines = [line.rstrip() for line in answer.out.splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


@pytest.mark.usefixtures("screen")
def test_a_plan_on_one_screen(tmp_path: Path) -> None:
    path = _plan(tmp_path, 8, 4)
    predicted = json.loads(pipeplan("show", path, "--json").out)["predicted"]
    lines = _lines(path)
    assert len(lines) < 24
    text = "\n".join(lines)
    assert lines[0] == "chain: 4 GPUs, 4 stages, 8 micro-batches of 1, 1f1b"
    assert lines[1].startswith(f"{format_seconds(predicted['iteration_s'])} an iteration, ")
    assert "3.00 % over the bound, no named schedule is faster" in " ".join(lines)
    assert lines[3].startswith(f"idle {100 * predicted['bubble_fraction']:.1f} %: ends ")
    for stage in range(4):
        assert any(line.startswith(f"{stage}     block.{2 * stage}..{2 * stage + 1} (2)") for line in lines)
    for rank in predicted["ranks"]:
        row = next(line for line in lines if line.startswith(f"rank {rank['rank']} "))
        assert row.endswith(format_bytes(rank["peak_memory_bytes"]))
    assert "F forward, B backward, · idle" in text


@pytest.mark.usefixtures("screen")
@pytest.mark.parametrize(
    ("num_stages", "shape"),
    [
        (64, {}),
        (64, {"ranks": 32, "name": ScheduleName.INTERLEAVED, "microbatches": 32}),
        (16, {"ranks": 8, "name": ScheduleName.ZB_V, "microbatches": 16, "data": 2}),
        (12, {}),
        (1, {}),
    ],
)
def test_any_plan_fits_a_screen_and_all_of_it_is_there_when_asked(
    tmp_path: Path, num_stages: int, shape: dict[str, Any]
) -> None:
    path = _plan(tmp_path, 2 * num_stages, num_stages, **shape)
    assert len(_lines(path)) < 24
    everything = _lines(path, "--all")
    assert sum("block." in line for line in everything) == num_stages
    assert sum(line.startswith("rank ") for line in everything) == shape.get("ranks", num_stages)


@pytest.mark.usefixtures("screen")
def test_a_profile_on_one_screen(tmp_path: Path) -> None:
    profile = chain_profile(5)
    write_profile(profile, tmp_path / "profile.json")
    lines = _lines(tmp_path / "profile.json", "--microbatch", "2")
    assert len(lines) < 24
    assert lines[0] == f"chain: 5 layers, a chain, {format_bytes(20_000)} of parameters, float32"
    for layer in profile.layers:
        cost = layer.costs[1]
        row = next(line for line in lines if line.startswith(f"{layer.name} "))
        for figure in (cost.forward_s, cost.backward_input_s, cost.backward_weight_s):
            assert format_seconds(figure) in row
        assert row.endswith(format_bytes(0 if layer is profile.layers[-1] else 2000))


@pytest.mark.usefixtures("screen")
def test_a_thousand_layers_fit_a_screen_in_runs_that_hold_all_of_them(tmp_path: Path) -> None:
    write_profile(chain_profile(1000), tmp_path / "profile.json")
    lines = _lines(tmp_path / "profile.json")
    assert len(lines) < 24
    counted = [int(found[1]) for line in lines if (found := re.match(r"b\S+ \((\d+)\)", line))]
    assert sum(counted) == 1000
    assert sum(line.startswith("block.") for line in _lines(tmp_path / "profile.json", "--all")) == 1000


@pytest.mark.usefixtures("screen")
def test_a_profile_says_where_it_is_from_and_what_is_special(tmp_path: Path) -> None:
    profile = chain_profile(4)
    whole = dataclasses.replace(
        profile.layers[1], costs=tuple(dataclasses.replace(c, backward_weight_s=0.0) for c in profile.layers[1].costs)
    )
    none = Collective(count=0, bytes=0)
    split = dataclasses.replace(
        profile.layers[2].costs[0],
        tensor=2,
        parameter_bytes=2000,
        trainable_bytes=2000,
        buffer_bytes=8,
        collectives=Collectives(forward=none, backward_input=none),
    )
    shared = dataclasses.replace(profile.layers[2], costs=(*profile.layers[2].costs, split))
    layers = (profile.layers[0], whole, shared, profile.layers[3])
    profile = dataclasses.replace(profile, provenance="estimated", layers=layers)
    write_profile(profile, tmp_path / "profile.json")
    lines = _lines(tmp_path / "profile.json")
    assert any("ESTIMATED for a cpu" in line for line in lines)
    assert next(line for line in lines if line.startswith("block.1 ")).startswith("block.1 *")
    assert next(line for line in lines if line.startswith("block.2 ")).startswith("block.2 T")
    document = json.loads(pipeplan("show", tmp_path / "profile.json", "--json").out)
    assert document["provenance"] == "estimated"
    assert [layer["whole_backward"] for layer in document["layers"]] == [False, True, False, False]
    assert [layer["tensor"] for layer in document["layers"]] == [[1], [1], [1, 2], [1]]


@pytest.mark.usefixtures("screen")
def test_long_names_in_short_still_tell_layers_apart(tmp_path: Path) -> None:
    profile = chain_profile(16)
    names = [f"encoder.layer.{index}.attention.self.{end}" for index in range(8) for end in ("query_key", "value_out")]
    renamed = dict(zip((layer.name for layer in profile.layers), names, strict=True))
    layers = tuple(dataclasses.replace(layer, name=renamed[layer.name]) for layer in profile.layers)
    edges = tuple(
        dataclasses.replace(edge, source=renamed[edge.source], target=renamed[edge.target]) for edge in profile.edges
    )
    write_profile(dataclasses.replace(profile, layers=layers, edges=edges), tmp_path / "profile.json")
    rows = [line.split()[0] for line in _lines(tmp_path / "profile.json", "--all") if line.startswith("e")]
    assert len(set(rows)) == len(rows) == 16
    assert all(re.fullmatch(r"e[.\w]*\.\d\.[.\w]+", row) for row in rows), rows


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_document_of_any_plan_is_what_the_plan_says(tmp_path: Path, data: st.DataObject) -> None:
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    path = save(plan, profile, tmp_path)
    answer = pipeplan("show", path, "--json")
    document = json.loads(answer.out)
    assert answer.err == ""
    simulated = json.loads(pipeplan("simulate", path, "--json").out)
    bubble = simulated.pop("bubble")
    assert document["predicted"] == simulated
    assert document["bubble"] == bubble
    assert [stage["layers"] for stage in document["stages"]] == [list(stage.layers) for stage in plan.stages]
    assert [layer["name"] for layer in document["layers"]] == [name for stage in plan.stages for name in stage.layers]
    _check_cuts(document["layers"], profile, plan.batch.microbatch)


def _check_cuts(layers: list[dict[str, Any]], profile: Profile, size: int) -> None:
    """Each cut by its definition: the tensors made on one side that the other reads, each once."""
    place = {layer["name"]: position for position, layer in enumerate(layers)}
    for position, layer in enumerate(layers):
        crossing = {
            (edge.source, tensor.name): round(tensor.bytes_per_sample * size) + tensor.fixed_bytes
            for edge in profile.edges
            for tensor in edge.tensors
            if place[edge.source] <= position < place[edge.target]
        }
        assert layer["cut_bytes"] == sum(crossing.values())
        made = {key: bytes_ for key, bytes_ in _outputs(profile, size).items() if key[0] == layer["name"]}
        assert layer["output_bytes"] == sum(made.values())


def _outputs(profile: Profile, size: int) -> dict[tuple[str, str], int]:
    return {
        (edge.source, tensor.name): round(tensor.bytes_per_sample * size) + tensor.fixed_bytes
        for edge in profile.edges
        for tensor in edge.tensors
    }


def test_a_tensor_that_several_layers_read_is_cut_once(tmp_path: Path) -> None:
    profile = chain_profile(4)
    mask = EdgeTensor(name="mask", bytes_per_sample=8.0, fixed_bytes=4, grad=False)
    reads = tuple(Edge(source="block.0", target=f"block.{target}", tensors=(mask,)) for target in (2, 3))
    write_profile(dataclasses.replace(profile, edges=(*profile.edges, *reads)), tmp_path / "profile.json")
    layers = json.loads(pipeplan("show", tmp_path / "profile.json", "--json").out)["layers"]
    assert [layer["cut_bytes"] for layer in layers] == [1012, 1012, 1012, 0]
    assert layers[0]["readers"] == [
        {"layer": "block.1", "bytes": 1000},
        {"layer": "block.2", "bytes": 12},
        {"layer": "block.3", "bytes": 12},
    ]


def test_stale_figures_are_said_and_another_profile_is_refused(tmp_path: Path) -> None:
    path = _plan(tmp_path, 4, 2)
    text = path.read_text()
    path.write_text(
        text.replace("layers: [block.0, block.1]", "layers: [block.0]").replace("[block.2, ", "[block.1, block.2, ")
    )
    assert path.read_text() != text
    answer = pipeplan("show", path)
    assert answer.code == 0
    assert " ".join(answer.err.split()).startswith("remark: figures of ")
    write_profile(chain_profile(5), tmp_path / "profile.json")
    assert "is not the profile" in refused(pipeplan("show", path))
    (tmp_path / "profile.json").unlink()
    assert "profile.json" in refused(pipeplan("show", path))


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    profile = chain_profile(4)
    plan = fresh_plan(profile, [["block.0", "block.1"], ["block.2", "block.3"]], ranks=2)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, memory_bytes=1000))
    path = save(plan, profile, tmp_path)
    assert "DOES NOT FIT" in pipeplan("show", path).out
    assert json.loads(pipeplan("show", path, "--json").out)["fits"] is False


@pytest.mark.parametrize("text", ["", "hello", "{}", "format: pipeplan-cluster/1", "\x00\x01"])
def test_what_is_neither_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert "neither a plan nor a profile" in refused(pipeplan("show", tmp_path / "x"))


def test_a_size_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    path = _plan(tmp_path, 4, 2)
    assert "there are 1, 2" in refused(pipeplan("show", tmp_path / "profile.json", "--microbatch", "3"))
    assert "--microbatch is for profiles" in refused(pipeplan("show", path, "--microbatch", "1"))


@pytest.mark.parametrize("option", ["--html", "--svg", "--trace"])
def test_only_what_show_wrote_is_written_over(tmp_path: Path, option: str) -> None:
    path, output = _plan(tmp_path, 4, 2), tmp_path / "output"
    for file in (path, tmp_path / "profile.json"):
        before = file.read_bytes()
        assert f"name another file with {option}" in refused(pipeplan("show", path, option, file))
        assert file.read_bytes() == before
    for _ in range(2):
        assert pipeplan("show", path, option, output).code == 0
    written = output.read_bytes()
    for other in {"--html", "--svg", "--trace"} - {option}:
        assert f"name another file with {other}" in refused(pipeplan("show", path, other, output))
    assert output.read_bytes() == written
    assert "is a folder" in refused(pipeplan("show", path, option, tmp_path))


def test_no_torch_is_imported(tmp_path: Path) -> None:
    path = _plan(tmp_path, 4, 2)
    code = (
        "import sys\nfrom planner.cli.main import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    print(ended.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    words = ["show", str(path), "--html", str(tmp_path / "page.html"), "--trace", str(tmp_path / "trace.json")]
    made = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert made.stderr.splitlines()[-1] == "0 False"


def test_an_imported_profile_says_from_where_once(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(PIPEDREAM)
    profile = tmp_path / "profile.json"
    words = ["--from", "pipedream", "--microbatch-size", 2, "-o", profile]
    assert pipeplan("import", tmp_path / "graph.txt", *words).code == 0
    assert "\nimported from PipeDream at micro-batch sizes 2" in pipeplan("show", profile).out
