"""What ``solve --explain`` says: figures against their definition, the right sentence, nothing cut at 80 columns."""

from __future__ import annotations

import dataclasses
import random
import re
from functools import cache
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console
from support.chains import chain
from support.random_profiles import random_cluster, random_profile
from support.rows import with_tensor_rows

from planner.cluster import Cluster, ClusterLinks, Link, memory_limit, resolve
from planner.errors import NothingFitsError
from planner.profile import Cost, Layer, Profile
from planner.report.boundaries import REACH, boundaries_of
from planner.report.contest import best_by_schedule, contenders, frontier
from planner.report.explain import told
from planner.report.plans import others, plans_table, table
from planner.report.summary import named
from planner.schedules import ScheduleName
from planner.search import Asked, Found, solve
from planner.units import format_bytes, format_seconds, parse_bytes

NAMES = tuple(ScheduleName)


@cache
def found_for(seed: int) -> Found:
    """What a search finds on a random small question; the next one's where nothing fits."""
    rng = random.Random(seed)
    profile = random_profile(rng, chain=rng.random() < 0.5, most_layers=6)
    asked = Asked(
        gpus=rng.randint(1, 4),
        global_batch=rng.choice((2, 4)),
        cluster=resolve(random_cluster(rng, memory=rng.choice((None, 900))), profile),
        schedules=NAMES,
        virtual=(1, 2),
        data=(1, 2),
    )
    try:
        return solve(profile, asked)
    except NothingFitsError:
        return found_for(seed + 1000)


FOUND = pytest.mark.parametrize("seed", range(10))


def text_of(found: Found, *, explain: bool) -> str:
    console = Console(file=StringIO(), width=80)
    for part in told(found, explain=explain):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@FOUND
def test_all_of_it_is_there_in_80_columns(seed: int) -> None:
    found = found_for(seed)
    text = text_of(found, explain=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for candidate in (found.best, *others(found)[:4]):
        assert format_seconds(candidate.iteration_s) in text
        assert format_bytes(candidate.peak_memory_bytes) in text
    for stage in found.best.stages:
        assert f" {format_seconds(stage.forward_s)} " in text


@FOUND
def test_the_time_adds_up(seed: int) -> None:
    found = found_for(seed)
    lines = re.findall(r"^(\w+) +\S+ \S+ +([\d.]+)%  ", text_of(found, explain=True), re.MULTILINE)
    assert "work" in dict(lines)
    assert sum(float(share) for _, share in lines) == pytest.approx(100, abs=0.4)


@FOUND
def test_a_boundary_carries_what_its_position_says(seed: int) -> None:
    found = found_for(seed)
    graph, stages, size = found.graph, found.best.stages, found.best.configuration.microbatch_size
    tensor = found.best.configuration.tensor
    order = [name for stage in stages for name in stage.layers]
    for boundary in boundaries_of(graph, stages, microbatch_size=size, tensor=tensor):
        end = order.index(boundary.after_layer)
        for step, crossing in zip(range(-REACH, REACH + 1), boundary.bytes, strict=True):
            before = {graph.index[name] for name in order[: end + step + 1]}
            if not 0 <= end + step < len(order) - 1:
                assert crossing is None
                continue
            parted = [t for t in graph.tensors if t.source in before and {r.layer for r in t.readers} - before]
            assert crossing == sum(one.bytes(size, tensor) for one in parted)


@FOUND
def test_what_it_is_compared_with_fits_and_is_no_faster(seed: int) -> None:
    found = found_for(seed)
    limit = memory_limit(found.asked.cluster)
    every = contenders(found)
    for candidate in every:
        assert candidate.iteration_s >= found.best.iteration_s * (1 - 1e-9)
        assert limit is None or candidate.peak_memory_bytes <= limit
    assert {one.schedule for one in best_by_schedule(found, every)} == {one.schedule for one in every}
    kept = frontier(found, every, most=100)
    for candidate in every:
        assert any(
            one.iteration_s <= candidate.iteration_s * (1 + 1e-9)
            and one.peak_memory_bytes <= candidate.peak_memory_bytes / 0.99
            for one in kept
        )
    for faster, leaner in pairwise(kept):
        assert faster.iteration_s <= leaner.iteration_s * (1 + 1e-9)
        assert faster.peak_memory_bytes > leaner.peak_memory_bytes


@FOUND
def test_no_runner_up_repeats_what_stands_elsewhere(seed: int) -> None:
    found = found_for(seed)
    shapes = [(c.configuration.pipeline, c.configuration.data, c.configuration.virtual) for c in others(found)]
    best = found.best.configuration
    assert len(set(shapes)) == len(shapes)
    assert (best.pipeline, best.data, best.virtual) not in shapes
    assert all(pipeline > 1 for pipeline, _, _ in shapes)


def equal_layers(count: int, *, link: Link) -> tuple[Profile, Cluster]:
    rng = random.Random(3)
    profile = random_profile(rng, chain=True, most_layers=8)
    while len(profile.layers) != count:
        profile = random_profile(rng, chain=True, most_layers=8)

    def equal(layer: Layer) -> Layer:
        costs = tuple(
            dataclasses.replace(row, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0) for row in layer.costs
        )
        return dataclasses.replace(layer, costs=costs)

    layers = tuple(map(equal, profile.layers))
    edges = tuple(
        dataclasses.replace(
            edge, tensors=tuple(dataclasses.replace(t, bytes_per_sample=4, grad=True) for t in edge.tensors)
        )
        for edge in profile.edges
    )
    cluster = Cluster(links=ClusterLinks(intra_node=link))
    made = dataclasses.replace(
        profile,
        layers=layers,
        edges=edges,
        optimizer=dataclasses.replace(profile.optimizer, step_s_per_trainable_byte=0.0),
    )
    return made, resolve(cluster, made)


def test_fewer_gpus_and_data_parallel_are_said_in_a_sentence() -> None:
    slow = Link(latency_s=1000.0, bandwidth_bytes_per_s=1.0)
    profile, cluster = equal_layers(6, link=slow)
    asked = Asked(gpus=4, global_batch=8, cluster=cluster, schedules=NAMES, virtual=(1,), data=(1, 2, 4))
    text = " ".join(text_of(solve(profile, asked), explain=False).split())
    assert "use 1 of the 4 GPUs" in text
    assert "one GPU alone is faster than" in text
    free = Link(latency_s=0.0, bandwidth_bytes_per_s=1e18)
    profile, cluster = equal_layers(7, link=free)
    asked = dataclasses.replace(asked, cluster=cluster)
    text = " ".join(text_of(solve(profile, asked), explain=False).split())
    assert "plain data parallel is faster than" in text
    assert "use " not in text


def test_the_proof_is_in_plain_words() -> None:
    found = found_for(0)
    proven = text_of(dataclasses.replace(found, proven=True, interrupted=False), explain=False)
    assert "proven the best" in proven
    assert "not proven" not in proven
    for interrupted in (True, False):
        text = text_of(dataclasses.replace(found, proven=False, interrupted=interrupted), explain=False)
        assert "not proven the best" in text
        assert "the bound" in text
        assert "the gap" in text


def test_a_name_that_looks_like_markup_is_printed_as_it_is() -> None:
    console = Console(file=StringIO(), width=80)
    console.print(table(("layers",), [[("blocks[0].[bold]",)]], words=("layers",)))
    assert isinstance(console.file, StringIO)
    assert "blocks[0].[bold]" in console.file.getvalue()


@FOUND
def test_the_counts_add_up_to_all_there_is(seed: int) -> None:
    found = found_for(seed)
    assert min(found.solved, found.pruned, found.left) >= 0
    assert found.proven == (found.left == 0)
    text = " ".join(text_of(found, explain=False).split())
    counts = re.search(r"(\d+) configurations?: (\d+) solved, (\d+) ruled out by their bound(?:, (\d+) left)?\)", text)
    assert counts is not None
    every, *parts = (int(count or 0) for count in counts.groups())
    assert every == sum(parts) == found.configurations


def test_what_is_not_proven_says_how_to_search_on() -> None:
    found = dataclasses.replace(found_for(0), proven=False, configurations=100)
    assert "--effort 10 looks at more" in " ".join(text_of(found, explain=False).split())
    ended = dataclasses.replace(found, interrupted=True, asked=dataclasses.replace(found.asked, max_seconds=1.0))
    assert "a longer --max-seconds goes on" in " ".join(text_of(ended, explain=False).split())


def test_a_leaner_plan_that_is_hardly_slower_is_named_and_can_be_had() -> None:
    """Whole replicas in buckets are a little faster than a pipeline that holds two thirds."""
    profile, link = chain(24), Link(latency_s=5e-6, bandwidth_bytes_per_s=25e9)
    cluster = resolve(Cluster(links=ClusterLinks(intra_node=link, inter_node=link)), profile)
    found = solve(profile, Asked(gpus=4, global_batch=64, cluster=cluster))
    text = " ".join(text_of(found, explain=False).split())
    told = re.search(r"with less memory: .* takes ([\d.]+)% longer, .* --memory (\S+) keeps to that", text)
    assert told is not None
    memory = dataclasses.replace(cluster, memory_bytes=parse_bytes(told[2]))
    again = solve(profile, dataclasses.replace(found.asked, cluster=memory))
    assert again.best.iteration_s <= (1.0005 + float(told[1]) / 100) * found.best.iteration_s
    assert again.best.peak_memory_bytes <= found.best.peak_memory_bytes * 2 / 3 + 2**20


def test_a_leaner_plan_is_one_that_was_asked_for() -> None:
    """Baselines leave layers whole: they are no alternative to tensor ranks asked for, however fast and lean."""
    profile = with_tensor_rows(chain(6, sizes=(1,)), sequence=False)

    def heavy(cost: Cost) -> Cost:
        return dataclasses.replace(cost, saved_bytes=2000 * cost.saved_bytes) if cost.tensor == 2 else cost

    layers = (dataclasses.replace(one, costs=tuple(map(heavy, one.costs))) for one in profile.layers)
    profile = dataclasses.replace(profile, layers=tuple(layers))
    asked = Asked(gpus=4, global_batch=8, cluster=resolve(Cluster(), profile))
    whole = solve(profile, asked)
    found = solve(profile, dataclasses.replace(asked, tensor=(2,)))
    assert whole.best.iteration_s < found.best.iteration_s
    assert whole.best.peak_memory_bytes < found.best.peak_memory_bytes / 2
    for part in " ".join(text_of(found, explain=False).split()).split("with less memory: ")[1:]:
        assert " T=2 " in part.split(" longer,")[0]
        assert "takes -" not in part


def test_figures_are_never_cut_however_wide_they_are() -> None:
    """Replicas, tensor ranks and stages a rank in one column, minutes and gibibytes: words fold, figures do not."""
    headings = ("plan", "P·D·T·v", "b·M", "schedule", "iteration", "ratio", "idle", "memory")
    figures = ("64·16·8·4", "16·512", "59 min 59 s", "10.234", "100.0%", "999.9 GiB !")
    row = ("even by parameters", *figures[:2], "interleaved-1f1b", *figures[2:])
    console = Console(file=StringIO(), width=80)
    console.print(table(headings, [[row]], words=("plan", "schedule")))
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for word in (*figures, *(heading for heading in headings if heading not in ("plan", "schedule"))):
        assert word in text


def test_each_plan_stands_on_one_line() -> None:
    """Pipeline ranks, replicas, tensor ranks and stages a rank, what is done by hand under its own name."""
    profile = with_tensor_rows(chain(12, sizes=(1,)), sequence=False)
    found = solve(profile, Asked(gpus=16, global_batch=64, data=(2,), tensor=(2,), cluster=resolve(Cluster(), profile)))
    console = Console(file=StringIO(), width=80)
    console.print(plans_table(found))
    assert isinstance(console.file, StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()][2:]
    assert len(lines) == 1 + len(others(found)[:4]) + len(found.baselines)
    assert all("%" in line[-3] for line in lines)


def test_long_names_lose_their_middle_and_not_their_numbers() -> None:
    names = ("model.decoder.layers.10.encoder_attention.output", "model.decoder.layers.11.final_layer_norm")
    console = Console(file=StringIO(), width=80)
    figures = ("216 µs",) * 6
    console.print(table(("k", "layers", *"abcdef"), [[("0", named(names), *figures)]], layers="layers"))
    assert isinstance(console.file, StringIO)
    (row,) = [line for line in console.file.getvalue().splitlines() if "µs" in line]
    assert re.search(r"10\..*…?.*\(2\)", row)
