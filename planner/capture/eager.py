"""The user's own model in plain PyTorch, under the seeds that the stages use: how far is the captured model from it?

Random ops are met in the same order in both. A run of the captured graph notes at which of them each layer seeds its
generator; the eager model then seeds at the same ones, by a dispatch mode, without a hook in any module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.batch import Batch, leaves, microbatch
from planner.capture.capture import Capture
from planner.capture.export import called
from planner.capture.seeds import RandomKey, RandomStream, seed_layer, seed_layer_cuda


class EagerReference:
    """A fresh model() with the weights that the capture started from; ``module`` is it, to be trained by an optimizer.

    ``aligned`` turns False where the eager model drew random numbers more or less often than the captured one: losses
    then differ for that reason alone.
    """

    def __init__(self, capture: Capture) -> None:
        with RandomStream(capture.seed):
            self.module = capture.model_file.model().to(capture.device)
        self.aligned = True
        self._model_file = capture.model_file
        self._size = capture.microbatch_size
        self._device = capture.device
        self._seeds, self._draws = _seeds_of(capture)

    def step(self, batch: Batch, *, seed: int, step: int, first_microbatch: int = 0) -> list[Tensor]:
        """Losses of one step's micro-batches; their mean's gradients are in ``.grad`` of the module's parameters."""
        (samples, *_) = (leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor))
        count = samples // self._size
        self.module.zero_grad(set_to_none=True)
        losses = []
        for index in range(count):
            part = microbatch(batch, index, size=self._size)
            mode = _Ordinals(self._seeding(RandomKey(seed, step, first_microbatch + index)))
            with mode:
                loss = self._model_file.loss(called(self.module, part.inputs), part.target)
            self.aligned &= mode.count == self._draws
            loss.backward(torch.full_like(loss, 1 / count))
            losses.append(loss.detach())
        return losses

    def _seeding(self, key: RandomKey) -> Callable[[int], None]:
        seed = seed_layer_cuda if self._device.type == "cuda" else seed_layer

        def before(ordinal: int) -> None:
            if ordinal in self._seeds:
                seed(key, self._seeds[ordinal])

        return before


class _Ordinals(TorchDispatchMode):
    """Counts the ops that draw from torch's generators, and calls ``before`` with the number of each."""

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and (
            torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims")
        ):
            self._before(self.count)
            self.count += 1
        return func(*args, **(kwargs or {}))


class _Recorder(RandomKey):
    """A key that notes when it is asked."""

    __slots__ = ("_ordinals", "seeds")

    def __init__(self, ordinals: _Ordinals) -> None:
        super().__init__(0, 0, 0)
        self.seeds: dict[int, int] = {}
        self._ordinals = ordinals

    def seed_for(self, salt: int) -> int:
        """Note the layer with the number of its first draw."""
        self.seeds[self._ordinals.count] = salt
        return super().seed_for(salt)


def _seeds_of(capture: Capture) -> tuple[dict[int, int], int]:
    """For each layer that draws: the number of its first draw -> its salt; and how many draws there are."""
    (program,) = capture.stages([[layer.name for layer in capture.layers]])
    parameters, buffers = dict(capture.module.named_parameters()), dict(capture.module.named_buffers())
    flat = leaves(capture.batch)
    ordinals = _Ordinals(lambda _: None)
    recorder = _Recorder(ordinals)
    with RandomStream(0), torch.no_grad(), ordinals:
        program.run(
            *(parameters[leaf.parameter] for leaf in program.leaves),
            *(buffers[name].clone() for name in program.buffers),
            *program.constants,
            *(flat[number] for number in program.inputs),
            recorder,
        )
    return recorder.seeds, ordinals.count
