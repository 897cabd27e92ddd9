"""What the runtime of torch.distributed.pipelining lacks, for all that runs on it.

Tensors without a gradient between stages; forwards out of the micro-batches' order (it takes the losses as they come);
recompute beside a backward in two halves (the forward would run twice or more); and there, what a stage hands on may
not be read again by its own W, since I detaches it in place.
"""

from __future__ import annotations

from planner.exchange.target import Planned
from planner.schedules import Letter

_HALVES = (Letter.BACKWARD_INPUT, Letter.BACKWARD_WEIGHT)


def refuse_what_its_runtime_lacks(made: Planned) -> None:
    """Raises InputError where torch's runtime would fail on the plan, or train something else."""
    _refuse_tensors_without_gradient(made)
    _refuse_forwards_out_of_order(made)
    if any(action.letter in _HALVES for order in made.schedule for action in order):
        _refuse_outputs_that_w_needs(made)
        again = [stage.stage for stage in made.plan.stages if stage.recompute]
        if again:
            made.refuse(
                f"recompute of stage {again[0]} beside a backward in two halves (torch would run its forward twice)",
                "solve with --recompute none or --schedule 1f1b",
            )


def _refuse_tensors_without_gradient(made: Planned) -> None:
    for edge, source, target in made.crossing:
        for tensor in edge.tensors:
            if not tensor.grad:
                made.refuse(
                    f"a tensor without gradient between stages: {edge.target} of stage {target} reads {tensor.name} "
                    f"of stage {source}",
                    "train it with pipeplan run, or keep both layers in one stage",
                )


def _refuse_outputs_that_w_needs(made: Planned) -> None:
    """Its I detaches what a stage hands on in place, and a W that was to read it then fails."""
    handed = {(edge.source, tensor.name) for edge, _, _ in made.crossing for tensor in edge.tensors}
    home = {layer.name: stage for stage, layers in enumerate(made.cut) for layer in layers}
    trained = {layer.name for layer in made.profile.layers if layer.trainable_bytes}
    for edge in made.profile.edges:
        for tensor in edge.tensors:
            inside = home[edge.source] == home[edge.target] and edge.target in trained
            if inside and tensor.saved and (edge.source, tensor.name) in handed:
                made.refuse(
                    f"a backward in two halves of stage {home[edge.source]}, which hands on {tensor.name} and needs it "
                    f"for the weights of {edge.target} too",
                    "solve with --schedule 1f1b, or move the start of the next stage",
                )


def _refuse_forwards_out_of_order(made: Planned) -> None:
    for rank, order in enumerate(made.schedule):
        seen: dict[int, int] = {}
        for position, action in enumerate(order):
            if action.letter is Letter.FORWARD:
                if action.microbatch != seen.get(action.stage, 0):
                    made.refuse(
                        f"rank {rank} position {position}: {action}, a forward out of the micro-batches' order",
                        "order each stage's forwards 0, 1, 2, ...",
                    )
                seen[action.stage] = action.microbatch + 1
