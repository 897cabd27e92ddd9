"""Model file -> profile: everything that planning needs to know, measured on this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from planner.allocator import keep_freed_memory
from planner.capture import Capture, CapturedEdge, ModelFile, capture
from planner.capture.batch import called
from planner.capture.model_file import lacks_memory
from planner.errors import InputError, words_of
from planner.measure.held import HeldBytes, measure_held
from planner.measure.layerwise import TooLargeError, measure_layerwise, optimizer_weights
from planner.measure.machine import free_bytes, this_device
from planner.measure.neighbours import busy_neighbours, wait_until_busy
from planner.measure.optimizer import measure_optimizer
from planner.measure.parts import Parts, collectives_of, edge_parts_of, shared_bytes_of, splits_of, tensor_size
from planner.measure.reuse import BY_LAYER, GRAPH, LAYERWISE, LEFT_OUT, noted_graph, noted_sizes
from planner.measure.room import check_saved_fits, fits_whole
from planner.measure.settings import Asked
from planner.measure.timing import Progress, Timed, time_layers
from planner.profile import (
    Accuracy,
    Cost,
    Edge,
    EdgeTensor,
    Layer,
    OptimizerCost,
    Profile,
    ProfiledLinks,
    ProfiledModel,
    SharedParameter,
    tensor_sizes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A micro-batch size that did not fit."""

    microbatch_size: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A profile, and how it came about."""

    profile: Profile
    entry_s: tuple[float, ...]
    """What entering and leaving a stage costs in F + B, at each micro-batch size."""
    left_out: tuple[LeftOut, ...]
    tensor_left_out: dict[int, str]
    """Tensor sizes at which nothing can be split, and why."""
    neighbours: int
    layerwise: bool
    """Layer by layer, without ever holding the model."""
    counted_once: list[str]
    """Modules whose buffers plain PyTorch changes again in the backward, since a checkpoint runs them again."""
    loss: float | None = None
    """Of the example batch; None where no pass went through the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What was measured, micro-batch size by micro-batch size, and at each for every tensor size."""

    captures: list[Capture]
    timed: tuple[Timed, ...]
    held: list[tuple[HeldBytes, ...]]
    left_out: list[LeftOut]
    tensor_left_out: dict[int, str]
    optimizer: OptimizerCost
    neighbours: int


def measure_profile(
    model_file: ModelFile,
    asked: Asked,
    *,
    folder: Path,
    measure_links: Callable[[str], ProfiledLinks | None],
    progress: Progress,
) -> Measured:
    """Measure a model file's model.

    ``folder``: where the profile will lie; its path to the model file is relative to that. ``measure_links`` is handed
    in, as it needs the runtime's transport.
    Raises InputError where the model cannot be captured, or fits at no micro-batch size.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    layerwise = asked.layerwise
    if layerwise is None:
        layerwise = not fits_whole(model_file, asked.device, neighbours=asked.neighbours)
    found = _layerwise(model_file, asked, progress) if layerwise else _whole(model_file, asked, progress)
    if found is None:
        layerwise, found = True, _layerwise(model_file, asked, progress)
    progress("measuring the link", 0.95)
    links = measure_links(asked.device)
    captured = found.captures[0]
    notes = {"threads": "1", GRAPH: noted_graph(captured)}
    if asked.device == "cpu":
        notes["busy_neighbours"] = str(found.neighbours)
    if layerwise:
        notes[LAYERWISE] = BY_LAYER
    if found.left_out:
        notes[LEFT_OUT] = noted_sizes([one.microbatch_size for one in found.left_out])
    if found.tensor_left_out:
        notes[tensor_sizes.LEFT_OUT] = tensor_sizes.noted(found.tensor_left_out)
    whole = [one for captured, one in zip(found.captures, found.timed, strict=True) if captured.sharding is None]
    profile = Profile(
        model=profiled_model(model_file, captured, folder),
        device=this_device(asked.device, notes=notes),
        provenance="measured",
        dtype=dtype_of(captured),
        global_batch=model_file.global_batch,
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=found.optimizer,
        links=links,
        accuracy=_accuracy(found.captures, found.timed),
        layers=profiled_layers(found.captures, found.timed, found.held),
        sequence_parallel=asked.sequence or None,
        edges=profiled_edges(found.captures),
    )
    return Measured(
        profile=profile,
        entry_s=tuple(one.entry_s for one in whole),
        left_out=tuple(found.left_out),
        tensor_left_out=found.tensor_left_out,
        neighbours=found.neighbours,
        layerwise=layerwise,
        counted_once=found.captures[0].counted_once,
        loss=whole[0].loss,
    )


def _whole(model_file: ModelFile, asked: Asked, progress: Progress) -> _Figures | None:
    """All of the model at once; None where it does not fit at any micro-batch size and may be taken layer by layer."""
    sizes = asked.microbatch_sizes
    with busy_neighbours(model_file.path, microbatch_size=max(sizes), count=asked.neighbours) as started:
        parts = Parts(asked.tensor, sequence=asked.sequence)
        captures, held, left_out = _captures(model_file, asked, parts, progress)
        if not captures:
            if asked.layerwise is None:
                return None
            raise _does_not_fit(model_file, asked, left_out)
        progress("waiting for the busy neighbour", 0.3)
        busy = wait_until_busy(started)
        timed = time_layers(captures, progress=lambda what, done: progress(what, 0.3 + 0.6 * done))
        progress("stepping the optimizer", 0.9)
        optimizer = measure_optimizer(model_file, captures[0].module, device=asked.device)
    return _Figures(
        captures=captures,
        timed=timed,
        held=held,
        left_out=left_out,
        tensor_left_out=parts.left_out,
        optimizer=optimizer,
        neighbours=busy,
    )


def _layerwise(model_file: ModelFile, asked: Asked, progress: Progress) -> _Figures:
    """One layer after another."""
    parts = Parts(asked.tensor, sequence=asked.sequence)
    captures: list[Capture] = []
    timed: list[Timed] = []
    held: list[tuple[HeldBytes, ...]] = []
    left_out: list[LeftOut] = []
    sizes = sorted(asked.microbatch_sizes)
    for index, size in enumerate(sizes):
        if left_out:
            left_out.append(LeftOut(microbatch_size=size, reason=left_out[0].reason))
            continue
        progress(f"capturing {size} samples", 0.9 * index / len(sizes))
        captured = _capture(model_file, asked, size, weightless=True)
        _check_alike(model_file, [*captures, captured])
        found = parts.of(captured)
        try:
            rows = [
                measure_layerwise(
                    part,
                    free_bytes=free_bytes(asked.device),
                    progress=lambda what, done, before=index: progress(what, 0.9 * (before + done) / len(sizes)),  # type: ignore[misc]
                )
                for part in found
            ]
        except (RuntimeError, MemoryError, TooLargeError) as error:
            left_out.append(_left_out(model_file, size, error))
            continue
        captures += found
        timed += [one for one, _ in rows]
        held += [bytes_held for _, bytes_held in rows]
    if not captures:
        raise _does_not_fit(model_file, asked, left_out)
    progress("stepping the optimizer", 0.9)
    optimizer = measure_optimizer(model_file, optimizer_weights(captures[0]), device=asked.device)
    return _Figures(
        captures=captures,
        timed=tuple(timed),
        held=held,
        left_out=left_out,
        tensor_left_out=parts.left_out,
        optimizer=optimizer,
        neighbours=0,
    )


def profiled_model(model_file: ModelFile, captured: Capture, folder: Path) -> ProfiledModel:
    """The profile's word on which model it is of."""
    source = os.path.relpath(model_file.path, folder.resolve())
    return ProfiledModel(name=model_file.name, source=source, fingerprint=captured.fingerprint)


def _model_raised(model_file: ModelFile, size: int, error: BaseException) -> Exception:
    """A fault that only computing shows: dtypes that do not go together, a tensor changed that its backward needs."""
    try:
        batch = model_file.batch(size)
        model_file.loss(called(model_file.model(), batch.inputs), batch.target)
    except InputError as fault:
        return fault
    except Exception as fault:  # noqa: BLE001 - the user's code may raise anything
        return model_file.raised(fault, "model()'s forward")
    return InputError(
        f"{model_file.path}: training one micro-batch raised {words_of(error)}",
        hint="the model must train in plain PyTorch; --debug shows where it stopped",
    )


def _captures(
    model_file: ModelFile, asked: Asked, parts: Parts, progress: Progress
) -> tuple[list[Capture], list[tuple[HeldBytes, ...]], list[LeftOut]]:
    """The model captured at every size that fits, and the bytes that its layers held in a first pass."""
    captures: list[Capture] = []
    held: list[tuple[HeldBytes, ...]] = []
    left_out: list[LeftOut] = []
    sizes = sorted(asked.microbatch_sizes)
    for index, size in enumerate(sizes):
        progress(f"capturing {size} samples", 0.3 * index / len(sizes))
        if left_out:
            left_out.append(LeftOut(microbatch_size=size, reason=left_out[0].reason))
            continue
        try:
            captured = _capture(model_file, asked, size)
            if captures:
                captured = replace(captured, module=captures[0].module)  # one set of weights is enough
            check_saved_fits(captured)
            found = parts.of(captured)
            bytes_held = [measure_held(part) for part in found]
        except (RuntimeError, MemoryError) as error:
            left_out.append(_left_out(model_file, size, error))
        else:
            captures += found
            held += bytes_held
    _check_alike(model_file, captures)
    return captures, held, left_out


def _capture(model_file: ModelFile, asked: Asked, size: int, *, weightless: bool = False) -> Capture:
    return capture(
        model_file,
        microbatch_size=size,
        device=asked.device,
        granularity=asked.granularity,
        weightless=weightless,
    )


def _left_out(model_file: ModelFile, size: int, error: Exception) -> LeftOut:
    """What did not fit. Raises InputError where it is another fault than a lack of memory."""
    if not (isinstance(error, TooLargeError) or lacks_memory(error)):
        raise _model_raised(model_file, size, error) from error
    return LeftOut(microbatch_size=size, reason=str(error).strip().splitlines()[0])


def _does_not_fit(model_file: ModelFile, asked: Asked, left_out: Sequence[LeftOut]) -> InputError:
    return InputError(
        f"{model_file.path}: the model does not fit this {asked.device} at micro-batch size "
        f"{min(asked.microbatch_sizes)} ({left_out[0].reason})",
        hint="give fewer samples with --microbatch, or a smaller model",
    )


def _check_alike(model_file: ModelFile, captures: Sequence[Capture]) -> None:
    odd = next((one for one in captures if one.fingerprint != captures[0].fingerprint), None)
    if odd is not None:
        raise InputError(
            f"{model_file.path}: the model captured at {odd.microbatch_size} samples is another than at "
            f"{captures[0].microbatch_size}",
            hint="its ops may not depend on the number of samples",
        )


def dtype_of(captured: Capture) -> str:
    """That of most of the parameters' bytes."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in captured.module.parameters():
        counts[parameter.dtype] += parameter.nbytes
    return str(counts.most_common(1)[0][0]).removeprefix("torch.")


def profiled_layers(
    captures: Sequence[Capture],
    timed: Sequence[Timed],
    held: Sequence[tuple[HeldBytes, ...]],
    *,
    with_spread: bool = True,
) -> tuple[Layer, ...]:
    """The profile's layers, with a row of costs for each capture."""
    users = Counter(name for layer in captures[0].layers for name in layer.parameters)
    parameters = dict(captures[0].module.named_parameters())
    made = []
    for index, layer in enumerate(captures[0].layers):
        tied = [name for name in layer.parameters if users[name] > 1]
        made.append(
            Layer(
                name=layer.name,
                kind=layer.kind,
                modules=layer.modules,
                parameter_bytes=layer.parameter_bytes,
                trainable_bytes=layer.trainable_bytes,
                buffer_bytes=layer.buffer_bytes,
                costs=tuple(
                    _cost(captured, one, row[index], index, with_spread=with_spread)
                    for captured, one, row in zip(captures, timed, held, strict=True)
                ),
                shared={
                    name: SharedParameter(bytes=parameters[name].nbytes, trainable=parameters[name].requires_grad)
                    for name in tied
                }
                or None,
                splits=splits_of(captures, index),
            )
        )
    return tuple(made)


def _cost(captured: Capture, timed: Timed, held: HeldBytes, index: int, *, with_spread: bool) -> Cost:
    seconds, layer = timed.layers[index], captured.layers[index]
    is_part = captured.sharding is not None
    by_input, by_weight, split = seconds.backward_input, seconds.backward_weight, seconds.split
    if not layer.trainable_bytes:  # frozen: what was timed as W is the cost of asking
        by_input, by_weight = by_input + by_weight, 0.0
    if not has_backward(captured, index):
        by_input = split = 0.0
    return Cost(
        microbatch_size=captured.microbatch_size,
        tensor=tensor_size(captured),
        forward_s=seconds.forward,
        backward_input_s=by_input,
        backward_weight_s=by_weight,
        split_s=split or None,
        saved_bytes=layer.saved_bytes,
        saved_for_weight_bytes=held.saved_for_weight,
        workspace_bytes=held.workspace,
        spread=seconds.spread if with_spread else None,
        parameter_bytes=layer.parameter_bytes if is_part else None,
        trainable_bytes=layer.trainable_bytes if is_part else None,
        buffer_bytes=layer.buffer_bytes if is_part else None,
        shared_bytes=shared_bytes_of(captured, index),
        collectives=collectives_of(captured, index),
    )


def has_backward(captured: Capture, index: int) -> bool:
    """Whether a gradient comes back through a layer: not where it, and all before it, are frozen."""
    analysis = captured.analysis
    return any(node in analysis.flow.flows for node in analysis.segments[index].nodes)


def profiled_edges(captures: Sequence[Capture]) -> tuple[Edge, ...]:
    """The profile's edges, with what tensor ranks have of their tensors."""
    return tuple(_profiled_edge(captures, number, edge) for number, edge in enumerate(captures[0].edges))


def _profiled_edge(captures: Sequence[Capture], number: int, edge: CapturedEdge) -> Edge:
    return Edge(
        source=edge.source,
        target=edge.target,
        tensors=tuple(
            EdgeTensor(
                name=tensor.name,
                bytes_per_sample=tensor.bytes_per_sample,
                fixed_bytes=tensor.fixed_bytes,
                grad=tensor.grad,
                saved=tensor.saved,
                parts=edge_parts_of(captures, number, place),
            )
            for place, tensor in enumerate(edge.tensors)
        ),
    )


def _accuracy(captures: Sequence[Capture], timed: Sequence[Timed]) -> tuple[Accuracy, ...] | None:
    """None where no run of layers was timed."""
    found = tuple(
        Accuracy(
            microbatch_size=captured.microbatch_size,
            median_error=median(map(abs, one.errors)),
            largest_error=max(one.errors, key=abs),
        )
        for captured, one in zip(captures, timed, strict=True)
        if one.errors and captured.sharding is None
    )
    return found or None
