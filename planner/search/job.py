"""A cut of a configuration as the time model takes it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import LayerGraph, derive_stages, ties
from planner.schedules import ranks_of
from planner.search.space import Asked, Configuration
from planner.simulate import Job


def job_of_cut(
    graph: LayerGraph,
    asked: Asked,
    configuration: Configuration,
    cut: list[list[str]],
    recompute: Sequence[bool] | None = None,
) -> Job:
    """A cut of a configuration as the time model takes it."""
    profile, optimizer = graph.profile, graph.profile.optimizer
    if asked.zero1 and asked.data is not None:  # the profile's is that of a share already; baselines have other shares
        optimizer = optimizer.sharded(configuration.data / asked.data[0])
    return Job(
        stages=derive_stages(
            graph,
            cut,
            ranks=ranks_of(configuration.pipeline, configuration.virtual, configuration.placement),
            microbatch_size=configuration.microbatch_size,
            tensor=configuration.tensor,
            recompute=recompute,
            cluster=asked.cluster,
        ),
        num_ranks=configuration.pipeline,
        num_microbatches=configuration.num_microbatches,
        data=configuration.data,
        tensor=configuration.tensor,
        cluster=asked.cluster,
        gradient_bytes_per_trainable_byte=profile.gradient_bytes_per_trainable_byte,
        state_bytes_per_trainable_byte=optimizer.state_bytes_per_trainable_byte,
        step_s_per_trainable_byte=optimizer.step_s_per_trainable_byte,
        ties=ties(graph, cut, tensor=configuration.tensor),
        zero1=asked.zero1 and configuration.data > 1,
    )
