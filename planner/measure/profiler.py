"""Model file -> profile: everything that planning needs to know, measured on this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from planner.capture import Capture, CapturedEdge, CapturedLayer, ModelFile, capture
from planner.capture.layers import Granularity
from planner.errors import InputError
from planner.measure.held import HeldBytes, measure_held
from planner.measure.machine import this_device
from planner.measure.neighbours import busy_neighbours, wait_until_busy
from planner.measure.optimizer import measure_optimizer
from planner.measure.timing import Progress, Timed, time_layers
from planner.profile import (
    Cost,
    Edge,
    EdgeTensor,
    Layer,
    Profile,
    ProfiledLinks,
    ProfiledModel,
    SharedParameter,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A micro-batch size that did not fit."""

    microbatch_size: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How well layers foretell runs of layers at one micro-batch size: predicted over timed, minus 1."""

    microbatch_size: int
    median_error: float
    largest_error: float
    split_cost: float
    """What I and then W take over a whole B, minus 1."""
    entry_s: float
    """What entering and leaving a stage costs in F + B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A profile, and how it came about."""

    profile: Profile
    accuracy: tuple[Accuracy, ...]
    left_out: tuple[LeftOut, ...]
    neighbours: int


def measure_profile(
    model_file: ModelFile,
    *,
    microbatch_sizes: Sequence[int],
    device: str,
    granularity: Granularity,
    folder: Path,
    measure_links: Callable[[str], ProfiledLinks | None],
    neighbours: int,
    progress: Progress,
) -> Measured:
    """Measure a model file's model.

    ``folder``: where the profile will lie; its path to the model file is relative to that. ``neighbours``: processes
    kept busy beside (CPU). ``measure_links`` is handed in, as it needs the runtime's transport.
    Raises InputError where the model cannot be captured, or fits at no micro-batch size.
    """
    torch.set_num_threads(1)
    with busy_neighbours(model_file.path, microbatch_size=max(microbatch_sizes), count=neighbours) as started:
        captures, held, left_out = _captures(model_file, microbatch_sizes, device, granularity, progress)
        progress("waiting for the busy neighbour", 0.3)
        busy = wait_until_busy(started)
        timed = time_layers(captures, progress=lambda what, done: progress(what, 0.3 + 0.6 * done))
        progress("stepping the optimizer", 0.9)
        optimizer = measure_optimizer(model_file, captures[0].module, device=device)
    progress("measuring the link", 0.95)
    links = measure_links(device)
    notes = {"threads": "1"} | ({"busy_neighbours": str(busy)} if device == "cpu" else {})
    profile = Profile(
        model=ProfiledModel(
            name=model_file.name,
            source=os.path.relpath(model_file.path, folder.resolve()),
            fingerprint=captures[0].fingerprint,
        ),
        device=this_device(device, notes=notes),
        provenance="measured",
        dtype=_dtype(captures[0]),
        global_batch=model_file.global_batch,
        gradient_bytes_per_trainable_byte=1.0,
        optimizer=optimizer,
        links=links,
        layers=_layers(captures, timed, held),
        edges=tuple(_edge(edge) for edge in captures[0].edges),
    )
    return Measured(profile=profile, accuracy=_accuracy(captures, timed), left_out=tuple(left_out), neighbours=busy)


def _model_raised(model_file: ModelFile, error: BaseException) -> Exception:
    """A fault that only training shows, such as a tensor changed in place that its backward still needs."""
    said = str(error).strip().splitlines()
    return InputError(
        f"{model_file.path}: training one micro-batch raised {type(error).__name__}: {said[0] if said else ''}",
        hint="the model must train in plain PyTorch; --debug shows where it stopped",
    )


def _captures(
    model_file: ModelFile, sizes: Sequence[int], device: str, granularity: Granularity, progress: Progress
) -> tuple[list[Capture], list[tuple[HeldBytes, ...]], list[LeftOut]]:
    """The model captured at every size that fits, and the bytes that its layers held in a first pass."""
    captures: list[Capture] = []
    held: list[tuple[HeldBytes, ...]] = []
    left_out: list[LeftOut] = []
    for index, size in enumerate(sorted(sizes)):
        progress(f"capturing {size} samples", 0.3 * index / len(sizes))
        if left_out:
            left_out.append(LeftOut(microbatch_size=size, reason=left_out[0].reason))
            continue
        try:
            captured = capture(model_file, microbatch_size=size, device=device, granularity=granularity)
            if captures:
                captured = replace(captured, module=captures[0].module)  # one set of weights is enough
            bytes_held = measure_held(captured)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise _model_raised(model_file, error) from error
            left_out.append(LeftOut(microbatch_size=size, reason=str(error).strip().splitlines()[0]))
        else:
            captures.append(captured)
            held.append(bytes_held)
    if not captures:
        raise InputError(
            f"{model_file.path}: the model does not fit this {device} at micro-batch size {min(sizes)} "
            f"({left_out[0].reason})",
            hint="give fewer samples with --microbatch, or a smaller model",
        )
    odd = next((one for one in captures if one.fingerprint != captures[0].fingerprint), None)
    if odd is not None:
        raise InputError(
            f"{model_file.path}: the model captured at {odd.microbatch_size} samples is another than at "
            f"{captures[0].microbatch_size}",
            hint="its ops may not depend on the number of samples",
        )
    return captures, held, left_out


def _is_out_of_memory(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in words


def _dtype(captured: Capture) -> str:
    """That of most of the parameters' bytes."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in captured.module.parameters():
        counts[parameter.dtype] += parameter.nbytes
    return str(counts.most_common(1)[0][0]).removeprefix("torch.")


def _layers(
    captures: Sequence[Capture], timed: Sequence[Timed], held: Sequence[tuple[HeldBytes, ...]]
) -> tuple[Layer, ...]:
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
                    _cost(captured.layers[index], captured, one, row[index], index)
                    for captured, one, row in zip(captures, timed, held, strict=True)
                ),
                shared={
                    name: SharedParameter(bytes=parameters[name].nbytes, trainable=parameters[name].requires_grad)
                    for name in tied
                }
                or None,
            )
        )
    return tuple(made)


def _cost(layer: CapturedLayer, captured: Capture, timed: Timed, held: HeldBytes, index: int) -> Cost:
    seconds = timed.layers[index]
    return Cost(
        microbatch_size=captured.microbatch_size,
        forward_s=seconds.forward,
        backward_input_s=seconds.backward_input,
        backward_weight_s=seconds.backward_weight,
        saved_bytes=layer.saved_bytes,
        saved_for_weight_bytes=held.saved_for_weight,
        workspace_bytes=held.workspace,
        spread=seconds.spread,
    )


def _edge(edge: CapturedEdge) -> Edge:
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
            )
            for tensor in edge.tensors
        ),
    )


def _accuracy(captures: Sequence[Capture], timed: Sequence[Timed]) -> tuple[Accuracy, ...]:
    return tuple(
        Accuracy(
            microbatch_size=captured.microbatch_size,
            median_error=median(map(abs, one.errors)),
            largest_error=max(one.errors, key=abs),
            split_cost=one.split_cost,
            entry_s=one.entry_s,
        )
        for captured, one in zip(captures, timed, strict=True)
    )
