"""Bounds against what they bound: random orders, every cut, and each other."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_orders import random_order
from support.random_profiles import all_cuts, job_for, random_cluster, random_profile

from planner.cluster import memory_limit, resolve
from planner.graph import LayerGraph
from planner.schedules import Placement, Schedule, ranks_of
from planner.search.bound import cut_bound
from planner.search.cheap import Totals, cheap_bound
from planner.search.chunks import stages_bound
from planner.search.figures import Figures, LayerFigures
from planner.search.lattice import along, lattice_of
from planner.search.proof import prove
from planner.search.space import Configuration
from planner.search.suffix import Shape, SuffixBound
from planner.simulate import Job, Walk, simulate

SEEDS = st.integers(0, 10**9)


def fits(job: Job, schedule: Schedule) -> float:
    """The iteration's time; infinite where a rank needs more memory than there is."""
    timeline = simulate(job, schedule)
    limit = memory_limit(job.cluster)
    if limit is not None and max(use.peak_memory_bytes for use in timeline.ranks) > limit:
        return math.inf
    return timeline.iteration_s


class Case:
    """One random profile, cluster and shape."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.profile = random_profile(self.rng, chain=self.rng.random() < 0.5, most_layers=6)
        self.graph = LayerGraph.of(self.profile)
        memory = self.rng.choice((None, None, 300, 500, 900))
        self.cluster = resolve(random_cluster(self.rng, memory=memory), self.profile)
        self.size = self.rng.choice((1, 2))
        self.count = self.rng.randint(1, 6)
        self.data = self.rng.choice((1, 1, 2))
        self.ranks = self.rng.randint(1, min(4, len(self.graph)))
        self.recompute = self.rng.choice(((False,), (True,), (False, True)))
        self.layers = LayerFigures(self.graph, microbatch_size=self.size, tensor=1, cluster=self.cluster)

    def shape(self, *, fused: bool) -> Shape:
        return Shape(
            num_ranks=self.ranks,
            num_microbatches=self.count,
            data=self.data,
            fused=fused,
            recompute=self.recompute,
            cluster=self.cluster,
        )

    def job(self, cut: list[list[str]], ranks: list[int], recompute: list[bool]) -> Job:
        return job_for(
            self.graph,
            cut,
            ranks=ranks,
            microbatch_size=self.size,
            num_microbatches=self.count,
            cluster=self.cluster,
            data=self.data,
            recompute=recompute,
        )


def recompute_word(choices: tuple[bool, ...]) -> str:
    """What --recompute says for these choices of a stage."""
    return "auto" if len(choices) == 2 else "all" if choices[0] else "none"


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_no_order_of_a_cut_is_faster_than_its_bound(
    seed: int,
) -> None:
    """Any placement (ranks with several stages too), fused and split, recompute, links, replicas, ties, memory."""
    case = Case(seed)
    rng = case.rng
    stages = rng.randint(case.ranks, min(len(case.graph), 5))
    for cut in itertools.islice(all_cuts(case.graph, stages), 20):
        ranks = [*range(case.ranks), *(rng.randrange(case.ranks) for _ in range(stages - case.ranks))]
        rng.shuffle(ranks)
        job = case.job(cut, ranks, [rng.choice(case.recompute) for _ in cut])
        walk = Walk(job)
        fused, split = cut_bound(walk, fused=True), cut_bound(walk, fused=False)
        assert split <= fused * (1 + 1e-9) or math.isinf(split)
        for _ in range(4):
            assert fits(job, random_order(rng, job, split=True)) >= split * (1 - 1e-9)
            assert fits(job, random_order(rng, job, split=False)) >= max(fused, split) * (1 - 1e-9)


@given(seed=SEEDS, fused=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_cut_is_listed_in_order_of_a_bound_that_holds(
    seed: int,
    fused: bool,
) -> None:
    """The recursion's bound of a configuration, the bound of each cut in it, the ILP's and the cheap one."""
    case = Case(seed)
    lattice = lattice_of(case.graph)
    assert lattice is not None
    suffix = SuffixBound(Figures(case.layers, lattice), case.shape(fused=fused))
    exact: dict[tuple[tuple[tuple[str, ...], ...], tuple[bool, ...]], float] = {}
    for cut in all_cuts(case.graph, case.ranks):
        for again in itertools.product(case.recompute, repeat=case.ranks):
            job = case.job(cut, list(range(case.ranks)), list(again))
            exact[tuple(map(tuple, cut)), again] = cut_bound(Walk(job), fused=fused)
    least = min(exact.values(), default=math.inf)
    assert suffix.bound_s <= least * (1 + 1e-9)
    below = 1.5 * suffix.bound_s if math.isfinite(suffix.bound_s) else math.inf
    listed = {}
    last = 0.0
    for found in suffix.cuts(below, 10**6):
        assert found is not None
        assert last <= found.bound_s * (1 + 1e-12)
        last = found.bound_s
        steps = itertools.pairwise(found.ideals)
        names = tuple(tuple(case.graph.names[i] for i in lattice.layers(start, end)) for start, end in steps)
        listed[names, found.recompute] = found.bound_s
    for cut_and_choice, bound in exact.items():
        if bound < below:
            assert listed[cut_and_choice] <= bound * (1 + 1e-9)
    configuration = Configuration(
        pipeline=case.ranks,
        data=case.data,
        tensor=1,
        virtual=1,
        placement=Placement.LOOP,
        microbatch_size=case.size,
        num_microbatches=case.count,
    )
    totals = Totals(case.layers, case.cluster, recompute_word(case.recompute))
    assert cheap_bound(totals, configuration, fused=fused) <= least * (1 + 1e-9)


@given(seed=SEEDS, fused=st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_ilp_proves_what_the_recursion_finds(
    seed: int,
    fused: bool,
) -> None:
    """Two independent ways to one bound; windows from the recursion change nothing that lies below the known time."""
    case = Case(seed)
    lattice = lattice_of(case.graph)
    assert lattice is not None
    shape = case.shape(fused=fused)
    suffix = SuffixBound(Figures(case.layers, lattice), shape)
    solved = prove(case.layers, shape)
    jobs = [
        case.job(cut, list(range(case.ranks)), list(again))
        for cut in all_cuts(case.graph, case.ranks)
        for again in itertools.product(case.recompute, repeat=case.ranks)
    ]
    least = min((cut_bound(Walk(job), fused=fused) for job in jobs), default=math.inf)
    assert solved.bound <= least * (1 + 1e-6)
    plain = memory_limit(case.cluster) is None and not any(layer.shared for layer in case.profile.layers)
    if case.graph.is_chain and plain and case.profile.optimizer.step_s_per_trainable_byte == 0 and case.data == 1:
        assert solved.bound == pytest.approx(rows_only(suffix), rel=1e-5, abs=1e-9)
    if math.isfinite(suffix.bound_s) and suffix.bound_s > 0:
        below = 1.1 * suffix.bound_s
        windows = suffix.windows(below)
        assert windows is not None
        narrowed = prove(case.layers, shape, windows=windows, below_s=below)
        assert narrowed.bound <= least * (1 + 1e-6)
        if solved.bound < below * (1 - 1e-4):
            assert narrowed.bound >= solved.bound * (1 - 1e-5)


@given(seed=SEEDS, fused=st.booleans())
@settings(max_examples=40, deadline=None)
def test_with_several_stages_a_rank_the_ilp_bounds_every_cut(seed: int, fused: bool) -> None:
    """Loop and V: neither the ILP nor its LP is above the bound of any cut."""
    case = Case(seed)
    virtual, placement = case.rng.choice(((2, Placement.LOOP), (2, Placement.V), (3, Placement.LOOP)))
    ranks = max(1, min(case.ranks, len(case.graph) // virtual))
    if ranks * virtual > len(case.graph):
        return
    case.cluster = dataclasses.replace(case.cluster, memory_bytes=None)
    shape = dataclasses.replace(case.shape(fused=fused), num_ranks=ranks)
    homes = ranks_of(ranks, virtual, placement)
    jobs = [
        case.job(cut, list(homes), list(again))
        for cut in all_cuts(case.graph, ranks * virtual)
        for again in {(choice,) * len(homes) for choice in case.recompute}
    ]
    least = min((cut_bound(Walk(job), fused=fused) for job in jobs), default=math.inf)
    for relaxed in (False, True):
        solved = prove(case.layers, shape, virtual=virtual, placement=placement, relaxed=relaxed)
        assert solved.bound <= least * (1 + 1e-6)


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_no_order_that_fits_is_faster_than_what_totals_say(seed: int) -> None:
    """Loop and V, replicas, recompute, memory: the bounds from totals, and the linear program over stages."""
    case = Case(seed)
    rng = case.rng
    virtual, placement = rng.choice(((1, Placement.LOOP), (2, Placement.LOOP), (2, Placement.V), (3, Placement.LOOP)))
    ranks = max(1, min(case.ranks, len(case.graph) // virtual))
    if ranks * virtual > len(case.graph):
        return
    configuration = Configuration(
        pipeline=ranks,
        data=case.data,
        tensor=1,
        virtual=virtual,
        placement=placement,
        microbatch_size=case.size,
        num_microbatches=case.count,
    )
    totals = Totals(case.layers, case.cluster, recompute_word(case.recompute))
    bounds = {}
    for fused in (False, True):
        bounds[fused] = cheap_bound(totals, configuration, fused=fused)
        if totals.chain and totals.returns:
            bounds[fused] = max(bounds[fused], stages_bound(totals, configuration, fused=fused))
    homes = list(ranks_of(ranks, virtual, placement))
    for cut in itertools.islice(all_cuts(case.graph, ranks * virtual), 12):
        job = case.job(cut, homes, [rng.choice(case.recompute) for _ in cut])
        for split in (True, False):
            seconds = fits(job, random_order(rng, job, split=split))
            assert seconds >= bounds[not split] * (1 - 1e-6)


def rows_only(suffix: SuffixBound) -> float:
    """The least bound of a cut from the recursion's rank rows alone: its link rows are left out by the ILP."""
    suffix.ahead_busy_s *= 0.0
    suffix.back_busy_s *= 0.0
    suffix._tabulate(float(suffix.figures.layers.load_s.sum()))
    first = next(suffix.cuts(math.inf, 10**6))
    assert first is not None
    return first.bound_s


def test_a_cut_along_one_order_is_a_cut_of_the_graph() -> None:
    """A lattice along a single order bounds from above what the whole lattice bounds from below."""
    for seed in range(40):
        case = Case(seed)
        whole, order = lattice_of(case.graph), along(range(len(case.graph)))
        assert whole is not None
        some = SuffixBound(Figures(case.layers, order), case.shape(fused=True)).bound_s
        assert SuffixBound(Figures(case.layers, whole), case.shape(fused=True)).bound_s <= some * (1 + 1e-9)
