"""The user's own model in plain PyTorch, under the seeds that the stages use: how far is the captured model from it?

Random ops are met in the same order in both. A run of the captured graph notes at which of them each layer seeds its
generator; the eager model then seeds at the same ones, by a dispatch mode, without a hook in any module.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.batch import Batch, called, leaves, microbatch
from planner.capture.capture import Capture
from planner.capture.lifted import autocast_of, op_of, opaque_call
from planner.capture.opaque import drop
from planner.capture.seeds import (
    RandomKey,
    RandomStream,
    salt_of,
    seed_layer,
    seed_layer_cuda,
    seed_opaque,
    seed_opaque_cuda,
)


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
        self._autocast = partial(autocast_of, capture.analysis.lifted)
        self._whole: dict[str, list[str]] = {}
        for node in _opaque_nodes(capture):
            call = opaque_call(node)
            assert call is not None
            self._whole.setdefault(call.name, []).append(call.label)
        self._seeds, self._draws = _seeds_of(capture)

    def step(
        self, batch: Batch, *, seed: int, step: int, first_microbatch: int = 0, scale: float = 1.0
    ) -> list[Tensor]:
        """Losses of one step's micro-batches; their mean's gradients, times ``scale``, are in its ``.grad``."""
        (samples, *_) = (leaf.shape[0] for leaf in leaves(batch) if isinstance(leaf, Tensor))
        count = samples // self._size
        self.module.zero_grad(set_to_none=True)
        losses = []
        for index in range(count):
            part = microbatch(batch, index, size=self._size)
            key = RandomKey(seed, step, first_microbatch + index)
            mode = _Ordinals(self._seeding(key))
            whole = [(self.module.get_submodule(name), labels) for name, labels in self._whole.items()]
            with mode, mode.apart(whole, self._seeding_whole(key)), self._autocast():
                loss = self._model_file.loss(called(self.module, part.inputs), part.target)
            self.aligned &= mode.count == self._draws
            again = _Again(mode.seeded)
            with again, again.apart(whole):
                loss.backward(torch.full_like(loss, 1 / count * scale))
            losses.append(loss.detach())
        return losses

    def _seeding(self, key: RandomKey) -> Callable[[int], None]:
        seed = seed_layer_cuda if self._device.type == "cuda" else seed_layer

        def before(ordinal: int) -> None:
            if ordinal in self._seeds:
                seed(key, self._seeds[ordinal])

        return before

    def _seeding_whole(self, key: RandomKey) -> Callable[[str], None]:
        seed = seed_opaque_cuda if self._device.type == "cuda" else seed_opaque
        return lambda label: seed(key, salt_of(label))


class _Ordinals(TorchDispatchMode):
    """Counts the ops that draw from torch's generators; ``before`` gets the number of the next one that may.

    Whether one did is seen by the generators' states: models may take other ops in a capture than in eager PyTorch.

    Modules that are kept whole are apart: they are seeded as they are entered, and may draw as often as they like.
    """

    def __init__(self, before: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self._within = 0
        self.count = 0
        self.seeded: _Seeded = {}

    @contextlib.contextmanager
    def apart(self, whole: Iterable[tuple[nn.Module, Sequence[str]]], enter: Callable[[str], None]) -> Iterator[None]:
        """Within it no op is counted in these modules; ``enter`` gets the label of each of their calls."""
        handles = []
        for module, labels in whole:
            coming = itertools.cycle(labels)

            def entering(module: nn.Module, given: Any, coming: Iterator[str] = coming) -> None:
                self._within += 1
                if self._within == 1:  # what is called within another is part of that one's call
                    self._noted(enter, next(coming))

            handles.append(module.register_forward_pre_hook(entering, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, module: nn.Module, given: Any, output: Any) -> None:
        self._within -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _may_draw(func) or self._within:
            return func(*args, **(kwargs or {}))
        self._noted(self._before, self.count)
        before = _generator_states()
        output = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, _generator_states())):
            self.count += 1
        return output

    def _noted(self, seed: Callable[[Any], None], what: int | str) -> None:
        """Seed, and note what the generators were before and are after, where that changed them."""
        before = _generator_states()
        seed(what)
        after = _generator_states()
        if not all(map(torch.equal, before, after)):
            self.seeded[_bytes_of(before)] = (after, random.getstate())


class _Again(TorchDispatchMode):
    """For the backward, in which checkpoints run parts of the forward again: the seeds that these had the first time.

    A checkpoint puts torch's generators back to where its part began; from there on they come by the same states, so
    that each tells what it was seeded with.
    """

    def __init__(self, seeded: _Seeded) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seeded = seeded

    @contextlib.contextmanager
    def apart(self, whole: Iterable[tuple[nn.Module, Sequence[str]]]) -> Iterator[None]:
        """Within it these modules are seeded as they are entered."""
        handles = [module.register_forward_pre_hook(self._enter, prepend=True) for module, _ in whole]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, given: Any) -> None:
        self._seed()

    def _seed(self) -> None:
        found = self._seeded.get(_bytes_of(_generator_states()))
        if found is not None:
            for generator, state in zip(_generators(), found[0], strict=True):
                generator.set_state(state)
            random.setstate(found[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _may_draw(func):
            self._seed()
        return func(*args, **(kwargs or {}))


_Seeded = dict[bytes, tuple[list[Tensor], Any]]
"""States of torch's generators -> what they, and Python's, were then put to."""


def _may_draw(func: Any) -> bool:
    return isinstance(func, OpOverload) and (
        torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims")
    )


def _generators() -> tuple[torch.Generator, ...]:
    return (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()))


def _generator_states() -> list[Tensor]:
    return [generator.get_state() for generator in _generators()]


def _bytes_of(states: list[Tensor]) -> bytes:
    return b"".join(state.numpy().tobytes() for state in states)


class _Recorder(RandomKey):
    """A key that notes when it is asked."""

    __slots__ = ("_apart", "_ordinals", "seeds")

    def __init__(self, ordinals: _Ordinals, apart: frozenset[int]) -> None:
        super().__init__(0, 0, 0)
        self._apart = apart
        self.seeds: dict[int, int] = {}
        self._ordinals = ordinals

    def seed_for(self, salt: int) -> int:
        """Note the layer with the number of its first draw."""
        if salt not in self._apart:
            self.seeds[self._ordinals.count] = salt
        return super().seed_for(salt)


def _opaque_nodes(capture: Capture) -> list[fx.Node]:
    return [node for node in capture.analysis.lifted.graph.nodes if opaque_call(node) is not None]


def _seeds_of(capture: Capture) -> tuple[dict[int, int], int]:
    """For each layer that draws: the number of its first draw -> its salt; and how many draws there are."""
    (program,) = capture.stages([[layer.name for layer in capture.layers]])
    parameters, buffers = dict(capture.module.named_parameters()), dict(capture.module.named_buffers())
    flat = leaves(capture.batch)
    ordinals = _Ordinals(lambda _: None)
    calls = {op_of(node).module: opaque_call(node) for node in _opaque_nodes(capture)}
    whole = [(module, [call.label]) for module, call in calls.items() if call is not None]
    recorder = _Recorder(ordinals, frozenset(salt_of(label) for _, labels in whole for label in labels))
    unsaved = torch.autograd.graph.saved_tensors_hooks(drop, drop)
    with RandomStream(0), unsaved, program.autocast(), ordinals, ordinals.apart(whole, lambda _: None):
        program.run(
            *(parameters[leaf.parameter] for leaf in program.leaves),
            *(buffers[name].clone() for name in program.buffers),
            *program.constants,
            *(flat[number] for number in program.inputs),
            recorder,
        )
    return recorder.seeds, ordinals.count
