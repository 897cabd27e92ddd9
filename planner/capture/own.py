"""A part of a model's weights with the values that the whole would have, without the memory of the whole.

model() runs as ever, twice. The first time all parameters are on meta, to learn in which order modules take them and
what they are called at the end. The second time those that are wanted are real; all others lie in one stretch of
memory, each over the last, large enough for the largest. So whatever fills them draws the numbers that it would draw,
and what is made is equal, to the bit, to what model() makes of it under the same seed. What reads another parameter's
values after they were overwritten is followed: where it would reach a wanted one, the model is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import InputError

_Take = Callable[[int, nn.Parameter], nn.Parameter]

_patching = threading.Lock()
_FILLS = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "fill_", "zero_", "copy_")
_SHAPES_ALONE = ("new_", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
"""Ops that read no values of the tensors they are given."""


def own_weights(make: Callable[[], nn.Module], wanted: Collection[str]) -> nn.Module:
    """What ``make`` gives, with real parameters where their names are ``wanted`` and all others on meta.

    ``make`` seeds the generators itself, each time alike. Raises InputError where the wanted ones hang on values of the
    others.
    """
    with _taking(lambda number, parameter: _on_meta(parameter)) as taken:
        names = dict(make().named_parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(taken)}
    kept = {numbers[id(parameter)] for name, parameter in names.items() if name in wanted}
    others = [parameter.nbytes for number, parameter in enumerate(taken) if number not in kept]
    shared = _Shared(max(others, default=0))

    def take(number: int, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if number in kept else shared.place(parameter)

    with _taking(take), shared:
        module = make()
    for name, parameter in module.named_parameters():
        if name in wanted and shared.is_spoilt(parameter):
            raise InputError(
                f"model(): {name} is made from the values of other parameters, so that it cannot be made alone",
                hint="run with --weights whole, where the memory allows",
            )
    _let_go(module, shared)
    return module


@contextlib.contextmanager
def _taking(take: _Take) -> Iterator[list[nn.Parameter]]:
    """Within it modules take what ``take`` makes of a parameter and its number; gives the list of those taken."""
    register = nn.Module.register_parameter
    taken: list[nn.Parameter] = []
    seen: set[int] = set()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and id(parameter) not in seen:
            parameter = take(len(taken), parameter)
            taken.append(parameter)
            seen.add(id(parameter))
        register(module, name, parameter)

    with _patching:
        nn.Module.register_parameter = registered  # type: ignore[method-assign,assignment]
        try:
            yield taken
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return _alike(parameter, parameter.detach().to("meta"))


def _alike(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _let_go(module: nn.Module, shared: _Shared) -> None:
    """Put what lies in the shared memory on meta."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and shared.holds(parameter):
                part._parameters[name] = made.setdefault(id(parameter), _on_meta(parameter))


class _Shared(TorchDispatchMode):
    """One stretch of memory for many parameters; ``with`` it, whose values are read that are not there is followed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = bytearray(max(1, num_bytes))
        self._sizes: dict[int, int] = {}  # elements of each parameter, by its storage
        self._there: int | None = None  # the storage of the parameter whose values are in the memory
        self._spoilt: set[int] = set()  # storages made from values that were not there any more
        self._kept: list[Tensor] = []  # so that no storage's place is used again

    def place(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter in the shared memory, with its values."""
        size = parameter.numel()
        if not size:
            return _on_meta(parameter)
        flat = torch.frombuffer(self._memory, dtype=parameter.dtype, count=size)
        made = _alike(parameter, flat.as_strided(parameter.shape, torch.empty_like(parameter).stride()))
        self._sizes[_storage(made)] = size
        self._kept.append(made)
        with torch.no_grad():
            made.copy_(parameter)
        return made

    def holds(self, parameter: Tensor) -> bool:
        """Whether a parameter lies here."""
        return _storage(parameter) in self._sizes

    def is_spoilt(self, parameter: Tensor) -> bool:
        """Whether a parameter's values are not what they should be."""
        return _storage(parameter) in self._spoilt

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; follow what it reads and makes."""
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fills = name in _FILLS
        read = [] if name.startswith(_SHAPES_ALONE) else given[1:] if fills else given
        wrong = any(self._is_wrong(_storage(tensor)) for tensor in read)
        for tensor in (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            storage = _storage(tensor)
            if storage in self._sizes:
                self._written(storage, tensor, fills=fills, wrong=wrong, changed=func._schema.is_mutable)
            elif wrong:
                self._spoilt.add(storage)
                self._kept.append(tensor)
        return made

    def _is_wrong(self, storage: int) -> bool:
        return storage in self._spoilt or (storage in self._sizes and storage != self._there)

    def _written(self, storage: int, tensor: Tensor, *, fills: bool, wrong: bool, changed: bool) -> None:
        """Note what was done to a tensor in the shared memory."""
        if not changed:
            return  # a view
        whole = fills and tensor.numel() == self._sizes[storage]
        if wrong or not (whole or storage == self._there):
            self._there = None
        else:
            self._there = storage


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
