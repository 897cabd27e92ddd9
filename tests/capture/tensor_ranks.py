"""T processes that train one model together, each with its part of every layer, over gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.capture import Batch, Capture
from planner.capture.shard import shard
from tests.capture.pipelines import Pipeline, Trained, even_cut, gpipe


class Gloo:
    """The ranks that share a layer."""

    def __init__(self, folder: Path, size: int, rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(minutes=5))

    def sum(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def max(self, tensor: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._group.allreduce([tensor], options).wait()

    def gather(self, tensor: Tensor, size: int) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(size)]
        self._group.allgather([found], [tensor]).wait()
        return found

    def start_scatter(self, own: Tensor, whole: Tensor) -> Any:
        return self._group._reduce_scatter_base(own, whole)

    def finish_sum(self, work: Any) -> None:
        work.wait()


@dataclass
class Step:
    """How a step is trained: stages, split backward, recompute."""

    stages: int = 1
    split: bool = False
    recompute: bool = False


def each_rank(size: int, work: Callable[[Gloo, int], Any]) -> list[Any]:
    """What ``work`` gives on every one of ``size`` processes, forked from this one."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, started = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(Path(folder), size, rank, work, there))
            process.start()
            there.close()
            pipes.append(here)
            started.append(process)
        try:
            told = [pipe.recv() for pipe in pipes]
        except EOFError:
            told = [("error", "a rank died")]
        finally:
            for process in started:
                process.join(timeout=60)
                process.kill()
    for kind, value in told:
        if kind == "error":
            raise AssertionError(value)
    return [value for _, value in told]


def _rank(folder: Path, size: int, rank: int, work: Callable[[Gloo, int], Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        told = ("value", work(Gloo(folder, size, rank), rank))
    except BaseException:  # noqa: BLE001 - told to the test
        told = ("error", traceback.format_exc())
    pipe.send(told)


def trained(
    captured: Capture, batch: Batch, count: int, *, tensor: int, steps: Sequence[Step], sequence: bool = False
) -> list[list[Trained]]:
    """For each way to train a step, what every rank is left with, its parameters' gradients in parts."""

    def work(group: Gloo, rank: int) -> list[Any]:
        own = shard(captured, tensor=tensor, rank=rank, sequence=sequence)
        assert own.sharding is not None
        own.sharding.connect(group)
        made = []
        for step in steps:
            pipeline = Pipeline(own, even_cut(own, step.stages), recompute=step.recompute)
            actions = gpipe(step.stages, count, split=step.split)
            done = pipeline.step(batch, count, actions=actions)
            made.append([_plain(done.losses), _plain(done.gradients), _plain(done.buffers)])
        return made

    told = each_rank(tensor, work)
    return [
        [Trained(*(_tensors(part) for part in told[rank][number])) for rank in range(tensor)]
        for number in range(len(steps))
    ]


def _plain(values: Any) -> Any:
    """Without tensors, which would be shared through files."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return values if values is None else (values.detach().contiguous().numpy().copy(), str(values.dtype))


def _tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _tensors(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_tensors(value) for value in values]
    return values if values is None else torch.from_numpy(values[0])


def gathered(captured: Capture, ranks: Sequence[Trained]) -> Trained:
    """Whole gradients out of all ranks' parts; what is not split must be the same everywhere."""
    sharding = shard(captured, tensor=len(ranks)).sharding
    assert sharding is not None
    gradients: dict[str, Tensor | None] = {}
    for name, first in ranks[0].gradients.items():
        parts = [rank.gradients[name] for rank in ranks]
        if first is None:
            assert parts == [None] * len(ranks), name
            gradients[name] = None
        elif name in sharding.parameters:
            gradients[name] = sharding.parameters[name].whole([part for part in parts if part is not None])
        else:
            assert all(torch.equal(first, part) for part in parts if part is not None), f"{name} differs between ranks"
            gradients[name] = first
    for rank in ranks[1:]:
        assert all(map(torch.equal, rank.losses, ranks[0].losses))
    return Trained(ranks[0].losses, gradients, ranks[0].buffers)


def largest_difference(one: Trained, other: Trained) -> tuple[float, str]:
    """Of losses and of gradients, relative to the largest entry of each tensor, with the name of the worst."""
    rows = [(_apart(a, b), f"loss {n}") for n, (a, b) in enumerate(zip(one.losses, other.losses, strict=True))]
    for name, gradient in one.gradients.items():
        twin = other.gradients[name]
        assert (gradient is None) == (twin is None), name
        if gradient is not None and twin is not None:
            assert gradient.shape == twin.shape, name
            rows.append((_apart(gradient, twin), name))
    return max(rows)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-3)) if one.numel() else 0.0
