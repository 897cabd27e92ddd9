"""Whether a model fits while it is measured whole, told before anything is allocated."""

from __future__ import annotations

from planner.capture import Capture, ModelFile
from planner.capture.weightless import parameters_on_meta
from planner.errors import InputError
from planner.measure.machine import free_bytes
from planner.units import format_bytes

OPTIMIZER_COPIES = 4
"""Trainable bytes that stepping the optimizer holds beside the weights: gradients, two of state (AdamW's), a copy."""
MOST_UNDER_WAY = 8
"""Micro-batches that a stage holds while it is timed."""


def fits_whole(model_file: ModelFile, device: str, *, neighbours: int) -> bool:
    """Whether the weights fit, with all that is held beside them; each busy neighbour has weights and gradients too."""
    try:
        with parameters_on_meta():
            module = model_file.model()
    except InputError:
        return True  # it needs the weights' values: there is no other way
    parameters = list(module.parameters())
    weights = sum(parameter.nbytes for parameter in parameters)
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    needed = weights + OPTIMIZER_COPIES * trained + neighbours * (weights + trained)
    return needed <= free_bytes(device)


def micro_batches_under_way(captured: Capture, first: int, last: int) -> int:
    """How many micro-batches layers ``first`` to ``last`` - 1 hold, as a stage, while they are timed.

    As many as together hold what the whole model saves for one: about what the ranks of a pipeline hold, as 1F1B has P
    micro-batches of a P-th of the model on its first. On a CPU that takes time: what F saved has left the caches when
    its backward comes. One on a GPU, whose caches hold little of a micro-batch.
    """
    if captured.device.type != "cpu":
        return 1
    saved = [layer.saved_bytes for layer in captured.layers]
    own = sum(saved[first:last])
    return max(1, min(MOST_UNDER_WAY, sum(saved) // own if own else MOST_UNDER_WAY))


def check_saved_fits(captured: Capture) -> None:
    """Raises MemoryError where what the forward saves, beside the gradients, is more than there is."""
    saved = sum(layer.saved_bytes for layer in captured.layers)
    trained = sum(layer.trainable_bytes for layer in captured.layers)
    free = free_bytes(captured.device.type)
    if saved + trained > free:
        raise MemoryError(
            f"what is held for the backward takes {format_bytes(saved)} and gradients {format_bytes(trained)}, where "
            f"{format_bytes(free)} are free"
        )
