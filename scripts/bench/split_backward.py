"""I and W over a whole B, ours beside torch's, on a stage of transformer blocks of width 512."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from planner.allocator import keep_freed_memory
from planner.capture import RandomKey, Stage, capture, load_model_file
from planner.runtime.memory import LivePeak

MODEL = """
import torch
from torch import nn

WIDTH, LENGTH = 512, 128

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 8, WIDTH // 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

def model():
    return nn.Sequential(*(Block() for _ in range(6)))
def batch(size):
    return torch.randn(size, LENGTH, WIDTH), torch.randn(size, LENGTH, WIDTH)
def loss(output, target):
    return (output - target).square().mean()
"""
BLOCKS = 4


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    made = action()
    return time.thread_time() - start, made


class _Ours:
    """A stage of our own."""

    def __init__(self, path: Path) -> None:
        captured = capture(load_model_file(path), microbatch_size=2)
        middle = [layer.name for layer in captured.layers if 1 <= int(layer.name.split(".")[0]) <= BLOCKS]
        program = captured.program(middle)
        self._stage = Stage(program, captured.module)
        torch.manual_seed(0)
        self._received = {made.name: torch.randn(made.shape) for made in program.receives}
        self._gradients = {made.name: torch.randn(made.shape) for made in program.sends}

    def forward(self, *, split: bool) -> None:
        self._stage.forward(0, None, None, self._received, RandomKey(0, 0, 0), split=split)

    def whole(self) -> None:
        self._stage.backward(0, self._gradients, 1.0)

    def by_input(self) -> None:
        self._stage.backward_input(0, self._gradients, 1.0)

    def by_weight(self) -> None:
        self._stage.backward_weight(0)

    def clear(self) -> None:
        self._stage.finish_gradients()


class _Torchs:
    """The same blocks under torch's split."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        self._part = nn.Sequential(*list(load_model_file(path).model())[1 : 1 + BLOCKS])
        self._x = torch.randn(2, 128, 512)
        self._gradient = torch.randn(2, 128, 512)

    def forward(self, *, split: bool) -> None:
        self._input = self._x.detach().requires_grad_()
        self._output: Tensor = self._part(self._input)

    def whole(self) -> None:
        self._output.backward(self._gradient)

    def by_input(self) -> None:
        _, self._groups = stage_backward_input([self._output], [self._gradient], [self._input], self._part.parameters())

    def by_weight(self) -> None:
        stage_backward_weight(self._part.parameters(), self._groups)
        del self._groups

    def clear(self) -> None:
        self._part.zero_grad(set_to_none=True)


def compare_splits(rounds: int) -> Table:
    """Medians of CPU seconds over rounds in which both take turns; the peak is of all tensors that F and I made."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run's processes
    table = Table(title=f"{BLOCKS} blocks of width 512", title_justify="left")
    for column in ("", "F", "B", "I", "W", "(I + W) / B", "peak in F, I"):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.py"
        path.write_text(MODEL)
        sides = {"ours": _Ours(path), "torch's": _Torchs(path)}
        rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in sides}
        for number in range(4 * rounds + 2):
            for name, side in sides.items():
                gc.collect()
                forward, _ = _timed(lambda side=side: side.forward(split=False))  # type: ignore[misc]
                whole, _ = _timed(side.whole)
                side.clear()  # the first gradients are taken as they are, later ones are added: both start from nothing
                side.forward(split=True)
                by_input, _ = _timed(side.by_input)
                by_weight, _ = _timed(side.by_weight)
                side.clear()
                if number >= 2:
                    rows[name].append((forward, whole, by_input, by_weight, (by_input + by_weight) / whole))
        for name, side in sides.items():
            with LivePeak() as live:
                side.forward(split=True)
                side.by_input()
            side.by_weight()
            side.clear()
            columns = [median(column) for column in zip(*rows[name], strict=True)]
            seconds = [f"{value * 1e3:.2f} ms" for value in columns[:4]]
            table.add_row(name, *seconds, f"{columns[4]:.3f}", f"{live.peak_bytes / 1e6:.1f} MB")
    return table
