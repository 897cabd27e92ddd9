"""Whether a profile that is there is of the same model, machine and settings, so that nothing need be measured.

The notes of a profile's device hold a signature of the captured graph (ops, settings, shapes, dtypes, layers; no
weights' values) and of the optimizer, made at the profile's smallest micro-batch size.
"""

from __future__ import annotations

import torch

from planner.capture import Capture, ModelFile, capture
from planner.capture.signature import digest, graph_signature
from planner.errors import InputError
from planner.measure.machine import this_device
from planner.measure.settings import Asked
from planner.profile import Device, Profile
from planner.profile.tensor_sizes import left_out

GRAPH, LAYERWISE, LEFT_OUT = "graph", "measured", "left_out"
"""Keys of the notes."""
BY_LAYER = "layer by layer"


def noted_graph(captured: Capture) -> str:
    """What the notes hold of the captured model."""
    return digest([graph_signature(captured.analysis), _optimizer(captured.model_file)])[:16]


def noted_sizes(sizes: list[int]) -> str:
    """What the notes hold of the micro-batch sizes that did not fit."""
    return ",".join(map(str, sizes))


def unchanged(earlier: Profile, model_file: ModelFile, asked: Asked) -> bool:
    """Whether measuring would only find what ``earlier`` says."""
    notes = earlier.device.software
    if not _same_device(earlier.device, asked) or earlier.global_batch != model_file.global_batch:
        return False
    if bool(earlier.sequence_parallel) != asked.sequence:
        return False
    if asked.layerwise is not None and asked.layerwise != (notes.get(LAYERWISE) == BY_LAYER):
        return False
    rows = [{cost.microbatch_size for cost in layer.costs if cost.tensor == 1} for layer in earlier.layers]
    known = set.intersection(*rows) | {int(word) for word in notes.get(LEFT_OUT, "").split(",") if word.isdecimal()}
    if not known.issuperset(asked.microbatch_sizes) or GRAPH not in notes:
        return False
    split = [{cost.tensor for cost in layer.costs} for layer in earlier.layers]
    if not (set.intersection(*split) | left_out(earlier).keys()).issuperset(asked.tensor):
        return False
    smallest = min(cost.microbatch_size for cost in earlier.layers[0].costs)
    return notes[GRAPH] == noted_graph(_captured(model_file, asked, smallest))


def _captured(model_file: ModelFile, asked: Asked, size: int) -> Capture:
    settings = {"microbatch_size": size, "device": asked.device, "granularity": asked.granularity}
    try:
        return capture(model_file, **settings, weightless=True)  # type: ignore[arg-type]
    except InputError:
        if asked.estimate is not None:
            raise
        return capture(model_file, **settings)  # type: ignore[arg-type]


def _same_device(device: Device, asked: Asked) -> bool:
    if asked.estimate is not None:
        return (device.kind, device.name, device.software.get("torch")) == (
            "estimate",
            asked.estimate,
            torch.__version__,
        )
    here = this_device(asked.device, notes={})
    same_software = all(device.software.get(key) == value for key, value in here.software.items())
    return (device.kind, device.name) == (here.kind, here.name) and same_software


def _optimizer(model_file: ModelFile) -> list[str]:
    """The user's optimizer in words."""
    made = model_file.optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
    return [type(made).__qualname__, *(f"{key}={value}" for key, value in sorted(made.defaults.items()))]
