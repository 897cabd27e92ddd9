"""Random numbers keyed to (seed, step, global micro-batch, layer), so that no cut, rank or order can change them."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

_MASK = 0xFFFFFFFFFFFFFFFF


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def folded(*parts: int) -> int:
    """A seed of 32 bits out of several numbers (the CPU generator reads no more than 32)."""
    state = 0
    for part in parts:
        state = _mixed(state ^ (part & _MASK))
    return (state ^ (state >> 32)) & 0xFFFFFFFF


def salt_of(name: str) -> int:
    """A layer's number in the hash: out of its name, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


class RandomKey:
    """What the random numbers of one micro-batch hang on; ``microbatch`` counts over all replicas (d * M + m)."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        self._state = _mixed(_mixed(_mixed(seed & _MASK) ^ step) ^ microbatch)

    def seed_for(self, salt: int) -> int:
        """The 32-bit seed of one layer."""
        value = _mixed(self._state ^ salt)
        return (value ^ (value >> 32)) & 0xFFFFFFFF


def seed_layer(key: RandomKey, salt: int) -> None:
    """Seed the CPU's generator for a layer: the node before the first random op of each random layer.

    The generator's own manual_seed costs 1 µs, torch.manual_seed about a hundred.
    """
    torch.default_generator.manual_seed(key.seed_for(salt))


def seed_layer_cuda(key: RandomKey, salt: int) -> None:
    """The same for a layer on a CUDA device; ops on the CPU within it stay seeded too."""
    seed = key.seed_for(salt)
    torch.default_generator.manual_seed(seed)
    torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def seed_opaque(key: RandomKey, salt: int) -> None:
    """Seed every generator before a module that is kept whole: torch's, Python's, NumPy's."""
    seed_layer(key, salt)
    _seed_python(key.seed_for(salt))


def seed_opaque_cuda(key: RandomKey, salt: int) -> None:
    """The same for a module on a CUDA device."""
    seed_layer_cuda(key, salt)
    _seed_python(key.seed_for(salt))


class RandomStream:
    """Generator states of its own (torch on the CPU, Python, NumPy where it is loaded), in force within ``with``.

    The states outside are as before afterwards; a second ``with`` goes on where the first one ended.
    """

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._inside: tuple[Any, ...] = ()
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = _states()
        if self._seed is not None:
            _seed_all(self._seed)
            self._seed = None
        else:
            _set_states(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _states()
        _set_states(self._outside)


def _seed_all(seed: int) -> None:
    """Every generator; without a GPU torch's own way there (a hundred times as long) would come to the same."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None, cuda


def _set_states(states: tuple[Any, ...]) -> None:
    in_torch, in_python, in_numpy, in_cuda = states
    torch.set_rng_state(in_torch)
    random.setstate(in_python)
    if in_numpy is not None:
        sys.modules["numpy"].random.set_state(in_numpy)
    if in_cuda is not None:
        torch.cuda.set_rng_state_all(in_cuda)
