"""What ``pipeplan profile`` says of a profile that it has made: to people, and as one document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.files import plain
from planner.profile import Profile
from planner.profile.tensor_sizes import sizes_of
from planner.report.splits import share_of
from planner.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from planner.measure import Difference, Measured


def document(
    path: Path, profile: Profile, measured: Measured | None = None, change: Difference | None = None
) -> dict[str, Any]:
    """For ``--json``; without ``measured`` the profile was there already."""
    found: dict[str, Any] = {"path": str(path), "unchanged": measured is None}
    found["accuracy"] = [plain(one) for one in profile.accuracy or ()]
    if measured is not None:
        found |= {
            "entry_s": measured.entry_s,
            "split_cost": _split_costs(profile),
            "layerwise": measured.layerwise,
            "left_out": [{"microbatch_size": one.microbatch_size, "reason": one.reason} for one in measured.left_out],
            "tensor_left_out": {str(size): why for size, why in measured.tensor_left_out.items()},
            "busy_neighbours": measured.neighbours,
            "loss": measured.loss if measured.loss is None or isfinite(measured.loss) else str(measured.loss),
            "difference": change and change._asdict(),
        }
    return found | {"profile": plain(profile)}


def report(
    out: Console,
    say: Callable[[str], None],
    measured: Measured,
    change: Difference | None,
    earlier: Profile | None,
) -> None:
    """A line on the model, a row for each micro-batch size, and remarks; ``say`` prints a sentence."""
    from rich.table import Table

    profile = measured.profile
    layers = profile.layers
    where = "ESTIMATED for" if profile.provenance == "estimated" else "on"
    say(
        f"{profile.model.name}: {len(layers)} layers, {format_bytes(_parameter_bytes(profile))} of parameters "
        f"({profile.dtype}), {where} {profile.device.name} ({format_bytes(profile.device.memory_bytes)})"
    )
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    tensor = any(cost.tensor > 1 for cost in layers[0].costs)
    for heading in (
        "micro-batch",
        *(["T"] if tensor else []),
        "F",
        "I",
        "W",
        "samples/s",
        "saved",
        "spread",
        "error",
        "largest",
    ):
        table.add_column(heading, justify="right")
    accuracy = {one.microbatch_size: one for one in profile.accuracy or ()}
    for row in range(len(layers[0].costs)):
        costs = [layer.costs[row] for layer in layers]
        size = costs[0].microbatch_size
        error = accuracy.get(size) if costs[0].tensor == 1 else None
        parts = [sum(getattr(cost, name) for cost in costs) for name in _TIMES]
        table.add_row(
            *(str(size), *([str(costs[0].tensor)] if tensor else [])),
            *map(format_seconds, parts),
            format_rate(size / sum(parts)),
            format_bytes(sum(cost.saved_bytes for cost in costs)),
            "" if costs[0].spread is None else f"{sorted(cost.spread or 0.0 for cost in costs)[len(costs) // 2]:.0%}",
            f"{error.median_error:.1%}" if error else "",
            f"{error.largest_error:+.1%}" if error else "",
        )
    out.print(table)
    if accuracy:
        say("error: of runs of layers, as foretold from the layers' figures, against timed")
    for line in _remarks(measured, change, earlier):
        say(line)


def _split_costs(profile: Profile) -> list[float]:
    """By micro-batch size: what F, I and W take over F and a whole B, minus 1, in all layers together."""
    found = []
    for rows in zip(*([cost for cost in layer.costs if cost.tensor == 1] for layer in profile.layers), strict=True):
        whole = sum(row.forward_s + row.backward_input_s + row.backward_weight_s for row in rows)
        found.append(sum(row.split_s or 0.0 for row in rows) / whole if whole else 0.0)
    return found


_TIMES = ("forward_s", "backward_input_s", "backward_weight_s")


def _parameter_bytes(profile: Profile) -> int:
    shared = {name: one.bytes for layer in profile.layers for name, one in (layer.shared or {}).items()}
    own = sum(
        layer.parameter_bytes - sum(one.bytes for one in (layer.shared or {}).values()) for layer in profile.layers
    )
    return own + sum(shared.values())


def _remarks(measured: Measured, change: Difference | None, earlier: Profile | None) -> Iterator[str]:
    profile = measured.profile
    links, optimizer = profile.links, profile.optimizer
    if links is None:
        yield "link: not measured, since there are no two devices here"
    else:
        beside = "beside compute" if links.overlap else "in place of compute"
        ends = "devices of a node" if profile.provenance == "estimated" else "processes"
        yield (
            f"link between two {ends}: {format_seconds(links.latency_s)} and "
            f"{format_bytes(links.bandwidth_bytes_per_s)}/s, {beside}"
        )
        if links.sums is not None:
            yield (
                f"sums over tensor ranks: {format_seconds(links.sums.latency_s)} a hop, "
                f"{format_bytes(links.sums.bandwidth_bytes_per_s)}/s"
            )
    yield (
        f"{optimizer.name}: {optimizer.state_bytes_per_trainable_byte:.2f} bytes of state and "
        f"{optimizer.step_s_per_trainable_byte * 1e9:.3f} ns a step for each byte of trainable parameters"
    )
    if profile.provenance == "estimated":
        yield (
            "ESTIMATED, nothing was measured: FLOPs and bytes of every kernel against the device's peaks, with the "
            "efficiency of its kind and size; a profile measured there tells more"
        )
    elif measured.layerwise:
        yield "measured layer by layer, each kind of layer once: the model as a whole was never in memory"
        if profile.accuracy is None:
            yield "no run of layers was timed to check the sum: none takes as little memory as the largest layer"
    if profile.device.kind == "cpu":
        yield (
            f"timed on one thread beside {measured.neighbours} busy neighbour{'s' * (measured.neighbours != 1)}: "
            "more processes than that slow each other further"
        )
    if measured.loss is not None and not isfinite(measured.loss):
        yield f"loss() gave {measured.loss} for the example batch: the times hold, but so the model does not train"
    if once := measured.counted_once:
        yield (
            f"{once[0]}{f' and {len(once) - 1} more' * (len(once) > 1)}: within torch.utils.checkpoint, buffers change "
            "once a micro-batch; in plain PyTorch again in the backward"
        )
    for one in measured.left_out:
        yield f"micro-batch size {one.microbatch_size} is left out: {one.reason}"
    for size in sizes_of(profile):
        if size > 1:
            yield (
                f"tensor size {size}: a rank holds {share_of(profile, size):.1%} of the parameters; "
                "pipeplan show tells what is split and what is not"
            )
    for size, why in measured.tensor_left_out.items():
        yield f"tensor size {size} is left out: {why}"
    sizes = [cost.microbatch_size for cost in profile.layers[0].costs if cost.tensor == 1]
    costs = _split_costs(profile)
    dearest = max(costs, default=0.0)
    if dearest:
        size = sizes[costs.index(dearest)]
        yield (
            f"F and a backward split into I and W take {dearest:.0%} longer here than F and B (micro-batch size "
            f"{size}): plans count it, and zero-bubble orders win where they save more than that"
        )
    off = [accuracy for accuracy in profile.accuracy or () if accuracy.median_error > 0.05]
    if off:
        worst = max(off, key=lambda accuracy: accuracy.median_error)
        entry_s = dict(zip(sizes, measured.entry_s, strict=True))[worst.microbatch_size]
        busy = "the machine was busy"
        if entry_s:
            busy = f"entering a stage takes {format_seconds(entry_s)}, which counts where layers are small; else {busy}"
        yield (
            f"layers foretell runs of layers to {worst.median_error:.1%} only (micro-batch size "
            f"{worst.microbatch_size}): {busy}"
        )
    if change is not None:
        yield (
            f"from the profile that was there: {change.median:.1%} in the median over layers, at most "
            f"{change.largest:+.1%} (layer {change.layer} at micro-batch size {change.microbatch_size})"
        )
    elif earlier is not None:
        yield "the profile that was there is of another model or machine"
