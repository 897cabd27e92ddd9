"""Model file -> profile of a device that is not here: the stages that would run there, their kernels counted.

Nothing is computed and nothing takes memory: every distinct layer runs its F, B, I and W on fake tensors, while each
kernel that it would launch is given its seconds (roofline.py). A layer whose work hangs on values (a module kept whole,
sizes that are another at every batch) really runs once, on made-up values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.capture import Batch, Capture, ModelFile, RandomKey, Stage, StageProgram, capture
from planner.capture.batch import leaves, rebuilt
from planner.capture.lifted import opaque_call
from planner.capture.made_up import made_up
from planner.capture.signature import signature
from planner.cluster import device_memory
from planner.measure.held import HeldBytes, fill_gradients, held_by, saved_inputs
from planner.measure.layerwise import Weights, made_up_gradients
from planner.measure.parts import Parts
from planner.measure.profiler import Measured, dtype_of, profiled_edges, profiled_layers, profiled_model
from planner.measure.reuse import GRAPH, noted_graph
from planner.measure.roofline import LINK, LINK_LATENCY_S, ROOFS, Estimator, Roof
from planner.measure.settings import Asked
from planner.measure.timing import LayerSeconds, Progress, Timed
from planner.profile import Device, OptimizerCost, Profile, ProfiledLinks, tensor_sizes

SAMPLE = 1024
"""Rows and columns of the parameter that the optimizer's kernels are counted on."""


def estimate_profile(model_file: ModelFile, asked: Asked, *, folder: Path, progress: Progress) -> Measured:
    """Estimate a model file's model on the device asked for, one of ROOFS."""
    assert asked.estimate is not None
    torch.set_num_threads(1)
    roof = ROOFS[asked.estimate]
    parts = Parts(asked.tensor, sequence=asked.sequence)
    captures: list[Capture] = []
    timed: list[Timed] = []
    held: list[tuple[HeldBytes, ...]] = []
    for index, size in enumerate(sorted(asked.microbatch_sizes)):
        progress(f"estimating {size} samples", index / len(asked.microbatch_sizes))
        captured = capture(model_file, microbatch_size=size, granularity=asked.granularity, weightless=True)
        for part in parts.of(captured):
            one, bytes_held = estimate_layers(part, roof)
            captures.append(part)
            timed.append(one)
            held.append(bytes_held)
    dtype = dtype_of(captures[0])
    profile = Profile(
        model=profiled_model(model_file, captures[0], folder),
        device=Device(
            kind="estimate",
            name=asked.estimate,
            memory_bytes=device_memory(asked.estimate),
            software={"torch": torch.__version__, GRAPH: noted_graph(captures[0])}
            | ({tensor_sizes.LEFT_OUT: tensor_sizes.noted(parts.left_out)} if parts.left_out else {}),
        ),
        provenance="estimated",
        dtype=dtype,
        global_batch=model_file.global_batch,
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=_optimizer(model_file, getattr(torch, dtype), roof),
        links=ProfiledLinks(latency_s=LINK_LATENCY_S, bandwidth_bytes_per_s=roof.link * LINK),
        layers=profiled_layers(captures, timed, held, with_spread=False),
        sequence_parallel=asked.sequence or None,
        edges=profiled_edges(captures),
    )
    nothing = (0.0,) * len(asked.microbatch_sizes)
    return Measured(
        profile=profile,
        entry_s=nothing,
        left_out=(),
        tensor_left_out=parts.left_out,
        neighbours=0,
        layerwise=True,
        counted_once=captures[0].counted_once,
    )


def estimate_layers(captured: Capture, roof: Roof) -> tuple[Timed, tuple[HeldBytes, ...]]:
    """Seconds and bytes of all layers of a model captured without its weights."""
    known: dict[str, tuple[LayerSeconds, HeldBytes]] = {}
    inputs_saved = saved_inputs(captured)
    found = []
    for layer, saved in zip(captured.layers, inputs_saved, strict=True):
        program = captured.program([layer.name])
        key = signature(program)
        if key not in known:
            known[key] = _estimated(captured, program, roof, layer.saved_bytes + saved)
        found.append(known[key])
    timed = Timed(layers=tuple(one for one, _ in found), entry_s=0.0, errors=())
    return timed, tuple(held for _, held in found)


def _estimated(
    captured: Capture, program: StageProgram, roof: Roof, saved_bytes: int
) -> tuple[LayerSeconds, HeldBytes]:
    """One layer's seconds and bytes."""
    fakes = None if _hangs_on_values(program) else captured.fakes
    weights = Weights(captured, program.parameters, program.buffers, fakes)
    with contextlib.nullcontext() if fakes is None else fakes.mode:
        stage = Stage(program, weights, defer=False)
        received = {boundary.name: made_up(boundary.example(), captured.device) for boundary in program.receives}
        gradients = made_up_gradients(program, captured.device)
        batch = captured.batch if fakes is None else rebuilt(captured.batch, map(fakes.of_leaf, leaves(captured.batch)))
        fill_gradients(stage, batch, received, gradients)
        held = held_by(captured, stage, batch, received, gradients, saved_bytes)
        seconds = _seconds(stage, batch, received, gradients, roof)
    return seconds, held


def _hangs_on_values(program: StageProgram) -> bool:
    sized = program.source.analysis.lifted.sized_by_values
    return any(opaque_call(node) is not None or node in sized for node in program.nodes)


def _seconds(
    stage: Stage, batch: Batch, received: dict[str, Tensor], gradients: dict[str, Tensor], roof: Roof
) -> LayerSeconds:
    """B is that of the unsplit pass, told apart into I and W as the split one is."""
    inputs, target = batch

    def forward(*, split: bool) -> Callable[[], Any]:
        return lambda: stage.forward(0, inputs, target, received, RandomKey(0, 0, 0), split=split)

    with Estimator(roof) as estimator:

        def taken(action: Callable[[], Any]) -> float:
            action()
            seconds: float = estimator.taken()
            return seconds

        taken(forward(split=True))
        by_input = taken(lambda: stage.backward_input(0, dict(gradients), 1.0))
        by_weight = taken(lambda: stage.backward_weight(0))
        forward_s = taken(forward(split=False))
        backward_s = taken(lambda: stage.backward(0, dict(gradients), 1.0))
    whole = by_input + by_weight or 1
    return LayerSeconds(
        forward=forward_s,
        backward_input=backward_s * by_input / whole,
        backward_weight=backward_s * by_weight / whole,
        split=0.0,
        spread=0.0,
    )


def _optimizer(model_file: ModelFile, dtype: torch.dtype, roof: Roof) -> OptimizerCost:
    """Steps of the user's optimizer over one parameter, its kernels counted; large ones take the memory's time."""
    parameter = torch.nn.Parameter(torch.ones(SAMPLE, SAMPLE, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 1e-6)
    optimizer = model_file.optimizer([parameter])
    optimizer.step()
    with Estimator(roof) as estimator:
        optimizer.step()
    tensors = [leaf for state in optimizer.state.values() for leaf in _tensors(state)]
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_trainable_byte=sum(tensor.nbytes for tensor in tensors) / parameter.nbytes,
        step_s_per_trainable_byte=estimator.bytes / parameter.nbytes / roof.memory,
    )


def _tensors(state: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
