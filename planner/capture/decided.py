"""Values of tensors that the model's own forward or its loss takes in Python: what it decides on.

``if labels.max() >= vocabulary: raise ...``, ``assert torch.isfinite(x).all()``, ``loss.sum() / mask.sum().item()``. A
graph cannot branch, so it holds what was decided when it was captured, and a check in the place of each such value: a
run stops, by name, where one is another. Captured so is only what no module kept whole can hold, and what is the same
in several batches.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from planner.errors import RunError

_library = torch.library.Library("pipeplan_decided", "DEF")
_library.define("decided(Tensor value, int number) -> Tensor")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, str reduction, "
    "bool zero_infinity) -> Tensor"
)
DECIDED = torch.ops.pipeplan_decided.decided.default
CTC_LOSS = torch.ops.pipeplan_decided.ctc_loss.default
"""What reads lengths to know how large its results are; as one op it need not be looked into."""

Place = tuple[str | None, str, int]
"""The module that runs (None: the loss), and the line: file and number."""

_TAKING = (Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item)
_HOME = tuple(str(Path(place).resolve()) for place in (torch.__path__[0], Path(__file__).parents[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A value that was taken at a place."""

    place: Place
    value: bool | int | float

    @property
    def line(self) -> str:
        """Where, for people."""
        return f"{self.place[1]}:{self.place[2]}"


class Values(TorchFunctionMode):
    """Within it every value that Python takes of a tensor is seen. ``running``: the module that runs.

    ``found``: what was taken, by place, in order. ``told``, where the model is exported: what to take instead in the
    modules ``within``; ``checks`` gets the tensors of the checks, ``decisions`` what each of them is for.
    """

    def __init__(
        self,
        running: Callable[[], str | None],
        told: dict[Place, list[Any]] | None = None,
        within: frozenset[str | None] = frozenset(),
    ) -> None:
        super().__init__()
        self._running = running
        self._told, self._within = told, within
        self._asked: Counter[Place] = Counter()
        self.found: dict[Place, list[Any]] = {}
        self.checks: list[Tensor] = []
        self.decisions: list[Decision] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._told is not None and func is nn.functional.ctc_loss:
            return _ctc_loss(*args, **kwargs)
        if func not in _TAKING:
            return func(*args, **kwargs)
        running = self._running()
        if self._told is None:
            value = func(*args, **kwargs)
            self.found.setdefault((running, *_line()), []).append(value)
            return value
        if running not in self._within:
            return func(*args, **kwargs)
        place = (running, *_line())
        number, values = self._asked[place], self._told.get(place, [])
        if number >= len(values):
            return func(*args, **kwargs)
        self._asked[place] += 1
        self.checks.append(DECIDED(args[0], len(self.decisions)))
        self.decisions.append(Decision(place=place, value=values[number]))
        return values[number]


def _line() -> tuple[str, int]:
    """The innermost line that runs and is neither torch's nor ours."""
    frame = sys._getframe()
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_HOME):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    lengths = (torch.as_tensor(given, device=log_probs.device) for given in (input_lengths, target_lengths))
    return CTC_LOSS(log_probs, targets, *lengths, blank, reduction, zero_infinity)  # type: ignore[no-any-return]


def _shape_of_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    reduction: str,
    _: Any,
) -> Tensor:
    each = log_probs.new_empty(log_probs.shape[1:2] if log_probs.dim() == 3 else ())
    return each if reduction == "none" else each.sum()


torch.library.register_fake("pipeplan_decided::decided", lambda value, number: value.new_empty(()), lib=_library)
torch.library.register_fake("pipeplan_decided::ctc_loss", _shape_of_ctc_loss, lib=_library)


def longest_ctc_loss(reduction: str, given: Sequence[Tensor], *_: Any) -> list[Tensor]:
    """Of log-probabilities, targets and lengths without values: these become as long as they can be."""
    log_probs, targets, read, spoken = given
    longest = targets.shape[-1] if targets.dim() == 2 else targets.numel() // max(spoken.numel(), 1)
    read.data.fill_(log_probs.shape[0])  # unseen by version counters: no change that the graph makes
    spoken.data.fill_(longest)
    targets = targets if targets.dim() == 2 else targets[: longest * spoken.numel()]
    return [nn.functional.ctc_loss(log_probs, targets, read, spoken, reduction=reduction)]


def check_of(decision: Decision) -> Callable[[Tensor], None]:
    """The check as a function that a graph can hold: it raises RunError where another value comes."""

    def decided(tensor: Tensor) -> None:
        if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta:
            return
        value = type(decision.value)(tensor.item())
        if value != decision.value and not (value != value and decision.value != decision.value):
            raise RunError(
                f"{decision.line}: the model takes a value of a tensor in Python, which was {decision.value} when it "
                f"was captured and is {value} now",
                hint="take what depends on it into a module of its own that the model calls, or name the module in "
                "leaves (either is then kept whole)",
            )

    decided.decision = decision  # type: ignore[attr-defined]
    return decided


def parted(found: list[dict[Place, list[Any]]]) -> tuple[dict[Place, list[Any]], dict[Place, list[Any]]]:
    """What several runs took at each place: the values that all of them did, and where they differ one of each."""
    same: dict[Place, list[Any]] = {}
    others: dict[Place, list[Any]] = {}
    for place in dict.fromkeys(place for one in found for place in one):
        first, *rest = (one.get(place, []) for one in found)
        if all(repr(first) == repr(values) for values in rest):
            same[place] = first
        else:
            columns = itertools.zip_longest(first, *rest)
            others[place] = next(
                list(dict.fromkeys(map(repr, values))) for values in columns if len(set(map(repr, values))) > 1
            )
    return same, others


def decision_of(node: fx.Node) -> Decision | None:
    """What a node checks, where it is a check."""
    target = getattr(node.target, "wrapped", node.target)
    return getattr(target, "decision", None)
