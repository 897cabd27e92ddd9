"""Every cut of a short chain with its bound: against random orders, the bound of the cut alone, all cuts there are."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_profiles import random_cluster, random_profile

from planner.cluster import resolve
from planner.graph import LayerGraph
from planner.schedules import Placement
from planner.search import Asked, Configuration
from planner.search.bound import cut_bound
from planner.search.figures import LayerFigures
from planner.search.job import job_of_cut
from planner.search.listed import ChainCuts, chain_cuts
from planner.simulate import Job, Walk
from tests.search.test_bound import fits, random_order


class Case:
    """A random chain and configuration: loop and V, one rank too; replicas, links, recompute, memory."""

    def __init__(self, seed: int, *, fused: bool) -> None:
        self.rng = random.Random(seed)
        profile = random_profile(self.rng, chain=True, most_layers=7)
        self.graph = LayerGraph.of(profile)
        self.memory = self.rng.choice((None, None, 500, 900))
        self.cluster = resolve(random_cluster(self.rng, memory=self.memory), profile)
        virtual, placement = self.rng.choice(
            ((1, Placement.LOOP), (2, Placement.LOOP), (2, Placement.V), (3, Placement.LOOP))
        )
        virtual = min(virtual, len(self.graph))
        ranks = self.rng.randint(1, min(3, len(self.graph) // virtual))
        self.configuration = Configuration(
            pipeline=ranks,
            data=self.rng.choice((1, 2)),
            tensor=1,
            virtual=virtual,
            placement=placement if ranks > 1 and virtual == 2 else Placement.LOOP,
            microbatch_size=1,
            num_microbatches=self.rng.randint(1, 5),
        )
        self.recompute = self.rng.choice(((False,), (True,), (False, True)))
        layers = LayerFigures(self.graph, microbatch_size=1, tensor=1, cluster=self.cluster)
        made = chain_cuts(layers, self.configuration, self.recompute, fused=fused)
        if made is not None:
            self.cuts: ChainCuts = made
        self.is_chain = made is not None
        skips = len(profile.edges) > len(profile.layers) - 1
        returned = all(tensor.grad for edge in profile.edges for tensor in edge.tensors)
        self.is_plain = not skips and returned and not any(layer.shared for layer in profile.layers)

    def every(self) -> np.ndarray:
        """The boundaries of every cut."""
        stages, count = self.configuration.pipeline * self.configuration.virtual, len(self.graph)
        inner = itertools.combinations(range(1, count), stages - 1)
        return np.array([(0, *marks, count) for marks in inner], dtype=np.int64)

    def job(self, marks: list[int], again: list[bool]) -> Job:
        """A cut with its choice of stages that recompute."""
        cut = [list(self.graph.names[low:high]) for low, high in pairwise(marks)]
        asked = Asked(gpus=8, global_batch=8, cluster=self.cluster)
        return job_of_cut(self.graph, asked, self.configuration, cut, again)


def check_that_no_order_is_faster(seed: int) -> None:
    fused = seed % 2 == 0
    case = Case(seed, fused=fused)
    if not case.is_chain:
        return
    every = case.every()
    bounds = case.cuts.bounds_s(every)
    for place in case.rng.sample(range(len(every)), min(4, len(every))):
        again = [case.rng.choice(case.recompute) for _ in range(every.shape[1] - 1)]
        job = case.job(every[place].tolist(), again)
        for split in (False,) if fused else (False, True):
            assert fits(job, random_order(case.rng, job, split=split)) >= bounds[place] * (1 - 1e-6)
        alone = cut_bound(Walk(job), fused=fused)
        if np.isfinite(bounds[place]):  # the least over all choices of who recomputes
            assert bounds[place] <= alone * (1 + 1e-9)
        if case.memory is None and case.is_plain and True not in case.recompute:
            assert bounds[place] == pytest.approx(alone, rel=1e-9)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_no_order_that_fits_is_faster_than_the_bound_of_its_cut(seed: int) -> None:
    check_that_no_order_is_faster(seed)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_what_is_left_on_the_way_could_not_have_been_faster(seed: int) -> None:
    """Cuts below a time as they are begun and left, against the bounds of all there are."""
    case = Case(seed, fused=seed % 2 == 0)
    if not case.is_chain:
        return
    every = case.every()
    bounds = case.cuts.bounds_s(every)
    finite = np.sort(bounds[np.isfinite(bounds)])
    for least in (*finite[:: max(1, len(finite) // 3)].tolist(), 1e9):
        seconds = least * (1 + 1e-9)  # equal bounds differ by rounding: none is to lie on the line
        near = case.cuts.below(seconds)
        assert near is not None
        expected = {tuple(marks) for marks in every[bounds < seconds].tolist()}
        assert {tuple(marks) for marks in near.marks.tolist()} == expected
        assert (np.diff(near.bounds_s) >= 0).all()
        assert case.cuts.least(0.0, seconds) == pytest.approx(min([seconds, *bounds.tolist()]), rel=2e-4)
