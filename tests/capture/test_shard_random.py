"""Tensor parallel over random models: whatever ops lie between their linears, T ranks together are the whole model."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.capture import capture
from planner.capture.shard import shard
from planner.errors import InputError
from tests.capture.pipelines import Pipeline, differences, gpipe
from tests.capture.tensor_ranks import Step, gathered, largest_difference, trained
from tests.capture.test_random_models import model_file

MICROBATCHES = 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [296])
def test_a_random_model_split_over_ranks_is_a_whole_one(seed: int) -> None:
    """296: a weight in pieces, one read whole and one in part."""
    check(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_many_random_models_split_over_ranks_are_whole_ones(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    """In float64; what is not split is said, and cuts change no bit."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        random = Random(seed)
        granularity = random.choice(["block", "module", "op"])
        captured = capture(model_file(seed), microbatch_size=2, granularity=granularity, seed=seed % 97)
        size, sequence = random.choice([2, 2, 3, 4]), random.random() < 0.3
        try:
            own = shard(captured, tensor=size, sequence=sequence)
        except InputError:
            return
        batch = next(captured.model_file.data(MICROBATCHES * 2, seed=seed))
        everything = [[layer.name for layer in captured.layers]]
        whole = Pipeline(captured, everything).step(batch, MICROBATCHES, actions=gpipe(1, MICROBATCHES))
        stages = random.randint(2, min(4, len(captured.layers)))
        steps = [Step(), Step(stages, split=random.random() < 0.7, recompute=random.random() < 0.4)]
        runs = trained(captured, batch, MICROBATCHES, tensor=size, steps=steps, sequence=sequence)
        one, other = (gathered(captured, run) for run in runs)
    finally:
        torch.set_default_dtype(torch.float32)
    difference, name = largest_difference(whole, one)
    assert difference < 1e-9, (name, size, sequence)
    assert differences(one, other) == [], (size, sequence, stages)
    assert own.sharding is not None
    told = {module for layer in own.sharding.layers for module, _ in (*layer.split, *layer.whole)}
    read = {name for layer in captured.layers for name in layer.parameters}
    matrices = {n.rpartition(".")[0] for n, p in captured.module.named_parameters() if p.dim() > 1 and n in read}
    untold = {module for module in matrices if not any(module.startswith(one) for one in told)}
    assert not untold, untold
