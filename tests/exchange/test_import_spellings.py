"""Other systems' files in any spelling of their formats come in right; damaged ones are refused, nothing is written."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import case
from support.command import pipeplan, refused
from support.damage import damaged, damaged_texts
from support.foreign import FILES, Foreign, spelt
from support.plans import plans, profiles, save
from support.random_orders import random_order

from planner.plan import job_of, read_plan
from planner.profile import Profile, read_profile

REAL = {
    "pipedream": [f"pipedream/{name}.graph.txt" for name in ("vgg16", "resnet50", "alexnet", "gnmt", "densenet121")],
    "dnn-partitioning": [
        f"dnn-partitioning/{name}.json"
        for name in ("bert24_inference", "bert24_training", "gnmt_inference", "resnet50_inference")
    ],
    "piper": ["piper/bert32a100.json"],
}
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def _imported(folder: Path, system: str, content: bytes, *options: object) -> Profile | None:
    """The profile that comes of a file, read again as any is; None where the file is refused, with nothing written."""
    path, goal = folder / "file", folder / "profile.json"
    path.write_bytes(content)
    goal.unlink(missing_ok=True)
    answer = pipeplan("import", path, "--from", system, *options, "-o", goal)
    assert path.read_bytes() == content
    if answer.code:
        assert str(path) in refused(answer)
        assert list(folder.iterdir()) == [path]
        return None
    return read_profile(goal)


def _agrees(profile: Profile, foreign: Foreign) -> None:
    """Every layer, figure and edge of the file, and no other."""
    reads: dict[str, dict[str, float]] = {layer.name: {} for layer in profile.layers}
    for edge in profile.edges:
        (tensor,) = edge.tensors
        reads[edge.target][edge.source] = tensor.bytes_per_sample
    assert reads.keys() == foreign.layers.keys()
    done: set[str] = set()
    for layer in profile.layers:
        said, cost = foreign.layers[layer.name], layer.costs[0]
        assert cost.forward_s == pytest.approx(said.forward_s)
        assert cost.backward_input_s == cost.backward_weight_s == pytest.approx(said.backward_s / 2, abs=1e-9)
        assert layer.parameter_bytes == pytest.approx(said.parameter_bytes, abs=2)
        assert cost.saved_bytes == pytest.approx(said.saved_bytes, abs=2)
        assert reads[layer.name] == pytest.approx(said.reads)
        assert done >= said.reads.keys(), "no layer runs before what it reads"
        done.add(layer.name)


def _sound(system: str, data: st.DataObject) -> None:
    foreign = data.draw(FILES[system])
    with tempfile.TemporaryDirectory() as folder:
        profile = _imported(Path(folder), system, foreign.text.encode(), *foreign.options)
        assert profile is not None
        _agrees(profile, foreign)


def _broken(system: str, text: str, options: tuple[object, ...], data: st.DataObject) -> None:
    """Some of a file changed: what still comes in is a profile; all else is refused."""
    if system == "pipedream" or data.draw(st.booleans()):
        content = data.draw(damaged_texts(text))
    else:
        document: Any = json.loads(text)
        for _ in range(data.draw(st.integers(1, 3))):
            document = damaged(data.draw, document) if document else document
        content = json.dumps(document).encode()
    with tempfile.TemporaryDirectory() as folder:
        _imported(Path(folder), system, content, *options)


@pytest.mark.parametrize("system", FILES)
@quick
@given(data=st.data())
def test_any_spelling_comes_in_right(system: str, data: st.DataObject) -> None:
    _sound(system, data)


@pytest.mark.slow
@pytest.mark.parametrize("system", FILES)
@long
@given(data=st.data())
def test_many_spellings_come_in_right(system: str, data: st.DataObject) -> None:
    _sound(system, data)


@pytest.mark.parametrize("system", FILES)
@quick
@given(data=st.data())
def test_any_damage_is_refused_in_one_line(system: str, data: st.DataObject) -> None:
    foreign = data.draw(FILES[system])
    _broken(system, foreign.text, foreign.options, data)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "name"), [(system, name) for system, names in REAL.items() for name in names])
@settings(long, max_examples=60)
@given(data=st.data())
def test_any_damage_to_a_real_file_is_refused_in_one_line(system: str, name: str, data: st.DataObject) -> None:
    _broken(system, case(name).read_text(), ("--microbatch-size", 4), data)


def _schedule(data: st.DataObject, *, broken: bool) -> None:
    """Any order of a plan's actions comes in as it is; a damaged one as another that keeps all rules, or not at all."""
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    orders = [[str(a) for a in order] for order in random_order(rng, job_of(plan, profile), split=rng.random() < 0.5)]
    content = data.draw(spelt(orders)).encode()
    if broken:
        content = data.draw(damaged_texts(content.decode()))
    with tempfile.TemporaryDirectory() as folder:
        path = save(plan, profile, Path(folder))
        before = path.read_bytes()
        table, goal = path.with_name("table.csv"), path.with_name("new.yaml")
        table.write_bytes(content)
        answer = pipeplan("import", table, "--from", "torch-csv", "--plan", path, "-o", goal)
        assert table.read_bytes() == content
        assert path.read_bytes() == before
        if answer.code == 0:
            made = read_plan(goal)
            assert broken or [text.split() for text in made.actions or ()] == orders
            assert pipeplan("check", goal).code == 0
        else:
            assert broken or answer.code == 3, "random orders may hold more than fits"
            assert "table.csv" in refused(answer, code=answer.code)
            assert not goal.exists()


@quick
@given(data=st.data())
def test_any_spelling_of_a_schedule_comes_in_right(data: st.DataObject) -> None:
    _schedule(data, broken=False)


@quick
@given(data=st.data())
def test_any_damage_to_a_schedule_is_refused_in_one_line(data: st.DataObject) -> None:
    _schedule(data, broken=True)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
@long
@given(data=st.data())
def test_many_schedules(broken: bool, data: st.DataObject) -> None:
    _schedule(data, broken=broken)
