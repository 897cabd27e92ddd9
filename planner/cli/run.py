"""``pipeplan run``: train as a plan says."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from planner.cli.console import err, out, print_json, remark, say, say_if_estimated

if TYPE_CHECKING:
    from planner.runtime.result import Outcome

_LINES = 10


class Weights(StrEnum):
    """What each process makes of the model."""

    AUTO = "auto"
    WHOLE = "whole"
    OWN = "own"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)


def run(
    plan: Path = typer.Argument(help="The plan file."),
    steps: int = typer.Option(20, min=1, help="Optimizer steps in all, those before --resume counted."),
    seed: int = typer.Option(0, min=0, help="Decides weights, data and dropout."),
    verify: bool = typer.Option(False, "--verify", help="Train the first 3 steps in one process too, and compare."),
    timeout: float | None = typer.Option(
        None, min=0.1, help="Seconds without progress after which the run is stuck. Default: 60, or ten iterations."
    ),
    nnodes: int = typer.Option(1, min=1, help="Machines; give the same command on each."),
    node_rank: int = typer.Option(0, min=0, help="Which of them this is."),
    rdzv_endpoint: str | None = typer.Option(None, metavar="HOST:PORT", help="Where they meet: machine 0."),
    checkpoint: Path | None = typer.Option(
        None, metavar="DIR", help="Keep the newest 3 checkpoints there; one is made after the last step."
    ),
    checkpoint_every: int | None = typer.Option(None, min=1, metavar="N", help="Make one after every N steps too."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the newest checkpoint of --checkpoint."),
    weights: Weights = typer.Option(
        Weights.AUTO, help="Each process makes the whole model, or its own stages alone: the same weights, less memory."
    ),
    initial: Path | None = typer.Option(
        None,
        metavar="PATH",
        help="Start from the weights of a safetensors file or a folder of them, as the model names them.",
    ),
    log: Path | None = typer.Option(None, help="Write a JSON line a step: step, loss, seconds, samples per second."),
    trace: Path | None = typer.Option(
        None, help="Write when each action ran, for show --measured and ui.perfetto.dev."
    ),
    save_profile: Path | None = typer.Option(
        None, metavar="FILE", help="Write what was measured as a profile, for solve."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as one JSON document."),
) -> None:
    """Train as a plan says, one process a GPU, and set what was measured beside what was predicted.

    A checkpoint holds weights and buffers under their names in the model, the optimizer's state by parameter, and the
    step, from which seeds and the position in data() follow; settings of the optimizer, such as the learning rate, only
    where training changed them, so that they may be edited in the model file in between. The plan may be another one;
    model, seed and samples a step must be the same. Machines of one run must share the folder.

    Tensors lie in safetensors files, all else in checkpoint.json.
    """
    from planner.errors import InputError, RunError
    from planner.files import check_replaceable, check_writable, plain
    from planner.plan import read_plan
    from planner.plan.check import check_plan, profile_of
    from planner.report.trace import write_recording
    from planner.runtime.run import RunOptions, run_plan
    from planner.runtime.saved import newest, step_of

    options = RunOptions(
        steps=steps,
        seed=seed,
        verify=verify,
        timeout_s=timeout,
        nnodes=nnodes,
        node_rank=node_rank,
        endpoint=rdzv_endpoint,
        checkpoints=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        weights=weights.value,
        initial=initial,
        record=trace is not None,
        save_profile=save_profile,
    )
    said = read_plan(plan)
    with suppress(InputError):  # a run needs no profile: one that is not there tells nothing
        profile = profile_of(said, plan)
        checked = check_plan(said, profile)
        if checked.stale:
            remark(f"figures of {plan} are stale; pipeplan check {plan} --write writes them anew")
        for overflow in checked.overflows:
            err.print(f"remark: does not fit: {overflow}", markup=False, soft_wrap=True)
    if trace is not None:
        check_writable(trace)
        check_replaceable(trace, "pipeplan-trace", option="--trace")
    found = newest(checkpoint) if checkpoint and resume else None
    with _Progress(steps, said.batch.global_batch, log, start=step_of(found) if found else 0) as progress:
        try:
            outcome = run_plan(plan, options, progress)
        except KeyboardInterrupt:
            progress.interrupted(newest(checkpoint) if checkpoint else None)
            raise
    if outcome is None:
        err.print("done; node 0 tells the result")
        return
    if trace is not None and outcome.recording is not None:
        write_recording(trace, outcome.recording, said)
        err.print(f"wrote {trace}: lay it over the plan with show --measured", markup=False, soft_wrap=True)
    if save_profile is not None and outcome.measured is not None:
        err.print(f"wrote {save_profile}: solve takes it", markup=False, soft_wrap=True)
    if as_json:
        print_json({"predicted": None} | plain(outcome.result))
    else:
        _show(outcome)
    say_if_estimated(said.profile.provenance, said.profile.device, to=err if as_json else out)
    verified = outcome.result.verify
    if verified is not None and not verified.equal:
        raise RunError(
            f"the run is not equal to one process: losses differ by {verified.loss_difference:.3g}, "
            f"weights by {verified.largest_weight_difference:.3g}",
            hint="report it with the model file",
        )


class _Progress:
    """The live view on stderr: a bar in a terminal, a few lines where there is none; and the log file."""

    def __init__(self, steps: int, samples: int, log: Path | None, *, start: int) -> None:
        """``start``: the step that the run goes on from; the log's lines of steps before it stay."""
        self._steps = steps
        self._start = self._done = start
        self._samples = samples
        self._log_path = log
        self._log: TextIO | None = None
        self._bar: Any = None
        self._finite = True
        self._started = time.monotonic()

    def __enter__(self) -> _Progress:
        from planner.errors import InputError

        if self._log_path is not None:
            try:
                earlier = _lines_before(self._start, self._log_path)
                self._log = self._log_path.open("w", buffering=1)
                self._log.writelines(earlier)
            except OSError as error:
                raise InputError(f"--log {self._log_path}: {error.strerror}", hint="name a file") from None
        if err.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[loss]}"), console=err, transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._steps, loss="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._close_log()

    def step(self, step: int, loss: float, seconds: float) -> None:
        """A step has ended."""
        self._done = step + 1
        if self._bar is not None:
            self._bar.update(self._task, description="training", completed=step + 1, loss=f"loss {loss:.4f}")
        elif (step + 1) * _LINES // self._steps > step * _LINES // self._steps:
            err.print(f"step {step + 1}/{self._steps}  loss {loss:.4f}", soft_wrap=True)
        if not math.isfinite(loss) and self._finite:
            self._finite = False
            err.print(
                f"remark: the loss of step {step + 1} is {loss}, no finite number; training goes on", soft_wrap=True
            )
        if self._log is not None:
            row = {
                "step": step + 1,
                "loss": loss if math.isfinite(loss) else None,
                "seconds": seconds,
                "samples_per_s": self._samples / seconds,
            }
            try:
                self._log.write(json.dumps(row) + "\n")
            except OSError as error:
                self._close_log()
                ends = f"its lines end before step {step + 1}, training goes on"
                words = f"remark: --log {self._log_path}: {error.strerror}; {ends}"
                err.print(words, markup=False, soft_wrap=True)

    def _close_log(self) -> None:
        """Let the log go, with what it could not take."""
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):
                log.close()

    def interrupted(self, kept: Path | None) -> None:
        """Ctrl-C ended the run; ``kept``: its newest checkpoint."""
        mend = f"; --resume goes on from {kept.name}" if kept else ""
        err.print(f"interrupted after {self._done} of {self._steps} steps{mend}", markup=False, soft_wrap=True)

    def remark(self, text: str) -> None:
        """Something worth knowing before the start."""
        err.print(text, soft_wrap=True)

    def details(self, text: str) -> None:
        """The traceback of what ends the run."""
        if self._bar is not None:
            self._bar.stop()
        if text:
            err.print(text.rstrip(), markup=False, soft_wrap=True)


def _lines_before(step: int, log: Path) -> list[str]:
    """The lines of a log, whole ones, of the first ``step`` steps, which count from 1 as on the terminal."""
    lines = []
    if step and log.exists():
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    lines.append(line)
    return lines


def _show(outcome: Outcome) -> None:
    """Predicted beside measured, and what to do about it."""
    from rich.table import Table

    from planner.report.summary import percent
    from planner.units import format_bytes, format_seconds

    result, predicted = outcome.result, outcome.result.predicted
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "predicted", "measured", "off"):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, foretold: float | None, measured: float, show: Any) -> None:
        off = percent(measured / foretold - 1, signed=True) if foretold else ""
        table.add_row(name, "" if foretold is None else show(foretold), show(measured), off)

    if outcome.measured is None:
        out.print(f"{outcome.advice}; weights {result.weights_sha256[:12]}", soft_wrap=True)
        return
    row("iteration", predicted.iteration_s if predicted else None, outcome.measured.iteration_s, format_seconds)
    idle = outcome.measured.bubble_fraction
    foretold_idle = "" if predicted is None else percent(predicted.bubble_fraction)
    table.add_row("idle", foretold_idle, percent(idle), "")
    for rank in result.ranks:
        foretold = predicted.ranks[rank.rank] if predicted else None
        row(f"rank {rank.rank} busy", foretold.busy_s if foretold else None, rank.busy_s, format_seconds)
    for rank in result.ranks:
        foretold = predicted.ranks[rank.rank] if predicted else None
        peak = rank.peak_memory_bytes
        row(f"rank {rank.rank} peak memory", foretold.peak_memory_bytes if foretold else None, peak, format_bytes)
    out.print(table)
    if result.losses:
        first, last = (
            "not finite" if loss is None else f"{loss:.4f}" for loss in (result.losses[0], result.losses[-1])
        )
        out.print(f"loss {first} at first, {last} at last; weights {result.weights_sha256[:12]}", soft_wrap=True)
    if result.verify is not None:
        verified = result.verify
        same = verified.loss_difference == verified.largest_weight_difference == 0
        equal = "equal to one process" if same else "equal to one process to rounding"
        word = equal if verified.equal else "NOT equal to one process"
        out.print(
            f"{word}: losses differ by {verified.loss_difference:.3g}, weights by "
            f"{verified.largest_weight_difference:.3g}",
            soft_wrap=True,
        )
        if verified.eager_difference is not None:
            off = f"losses differ by {verified.eager_difference:.3g}"
        else:
            off = "cannot be compared, as they draw random numbers in another order"
        out.print(f"the captured model and the model as written: {off}", soft_wrap=True)
    for line in (*outcome.differences, outcome.advice):
        say(line, indent=2)
