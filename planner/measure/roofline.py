"""How long a kernel takes on a device that is not here: the roofline, kernel by kernel, as eager PyTorch launches them.

    seconds = launch + max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency))

(Williams, Waterman and Patterson 2009.) FLOPs are those of torch's own counter; bytes are those of the tensors that go
in and come out, each once. Peaks are the makers' dense ones for the number format; efficiencies are what good kernels
reach on large tensors, and a product whose tiles do not fill the device's units reaches less.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.errors import InputError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A device's figures.

    ``half``: FLOP/s of bfloat16 and float16; ``single``: of float32 as torch computes it unless told otherwise, without
    tf32; ``convolution``: of float32 convolutions, for which torch does take tf32. ``units``: multiprocessors, each at
    work on one tile of a product. ``link``: bytes/s one way to another device of the node. ``product``: efficiency of
    large products in training (alone cuBLAS reaches 0.8 on A100, and 0.7 on H100 by its power limit; kept up, less).
    """

    half: float
    single: float
    convolution: float
    memory: float
    units: int
    link: float
    product: float
    has_bfloat16: bool
    launch_s: float = 3e-6


def _roof(
    *teras: float, memory: float, units: int, link: float, product: float = 0.6, has_bfloat16: bool = True
) -> Roof:
    half, single, convolution = (figure * 1e12 for figure in teras)
    return Roof(
        half=half,
        single=single,
        convolution=convolution,
        memory=memory * 1e12,
        units=units,
        link=link * 1e9,
        product=product,
        has_bfloat16=has_bfloat16,
    )


ROOFS: Final = {
    "v100-16gb": _roof(125, 15.7, 15.7, memory=0.9, units=80, link=150, has_bfloat16=False),
    "v100-32gb": _roof(125, 15.7, 15.7, memory=0.9, units=80, link=150, has_bfloat16=False),
    "t4": _roof(65, 8.1, 8.1, memory=0.32, units=40, link=16, product=0.5, has_bfloat16=False),
    "a10g": _roof(70, 31.2, 35, memory=0.6, units=80, link=32),
    "l4": _roof(121, 30.3, 60, memory=0.3, units=58, link=32, product=0.5),
    "l40s": _roof(362, 91.6, 183, memory=0.864, units=142, link=32, product=0.55),
    "rtx-4090": _roof(165, 82.6, 82.6, memory=1.01, units=128, link=32, product=0.75),
    "a100-40gb": _roof(312, 19.5, 156, memory=1.555, units=108, link=300, product=0.65),
    "a100-80gb": _roof(312, 19.5, 156, memory=2.04, units=108, link=300, product=0.65),
    "h100-pcie": _roof(756, 51, 378, memory=2.0, units=114, link=64, product=0.45),
    "h100-sxm": _roof(989, 67, 494, memory=3.35, units=132, link=450, product=0.55),
    "h200": _roof(989, 67, 494, memory=4.8, units=132, link=450, product=0.55),
    "b200": _roof(2250, 75, 1125, memory=8.0, units=148, link=900, product=0.55),
    "mi250x-gcd": _roof(191.5, 47.9, 47.9, memory=1.6, units=110, link=50, product=0.5),
    "mi300x": _roof(1307, 163.4, 163.4, memory=5.3, units=304, link=64, product=0.42),
}
"""TFLOP/s (half, single, convolution), TB/s, GB/s, from the makers' data sheets; names as in cluster files."""

_SHORT: Final = {"v100": "v100-32gb", "a100": "a100-80gb", "h100": "h100-sxm", "mi250x": "mi250x-gcd"}

ATTENTION, ATTENTION_BACKWARD = 0.5, 0.4
"""Efficiency of fused attention (FlashAttention-2 on A100: 0.6 forward, 0.5 backward; on H100: 0.4 and 0.35)."""
CONVOLUTION = 0.8
"""Of the efficiency of products."""
STREAM = 0.75
"""Efficiency of the memory in kernels that only stream."""
TILE = 128
"""Rows and columns of the tiles that products are cut into."""
LINK, LINK_LATENCY_S = 0.8, 10e-6


def known_device(name: str) -> str:
    """The full name of a device. Raises InputError on one whose figures are not known."""
    word = name.strip().lower().replace(" ", "-").replace("_", "-")
    word = _SHORT.get(word, word)
    if word not in ROOFS:
        raise InputError(f"--estimate {name!r}: no known device", hint=f"one of {', '.join(sorted(ROOFS))}")
    return word


class Estimator(TorchDispatchMode):
    """Adds up the seconds that the kernels called within it take on a device; what they compute with may be fake."""

    def __init__(self, roof: Roof) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._roof = roof
        self.seconds = 0.0
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not _is_free(func):
            self._count(func, args, kwargs, made)
        return made

    def taken(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _count(self, func: OpOverload, args: Any, kwargs: Any, made: Any) -> None:
        moved = _bytes((args, kwargs)) + _bytes(made)
        flops = _flops(func, args, kwargs, made)
        self.flops += flops
        self.bytes += moved
        seconds = moved / (self._roof.memory * STREAM)
        if flops:
            seconds = max(seconds, flops / self._speed(func, args, made))
        self.seconds += seconds + self._roof.launch_s

    def _speed(self, func: OpOverload, args: Any, made: Any) -> float:
        """FLOP/s that a kernel with FLOPs reaches."""
        roof = self._roof
        dtype = next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        name = func._schema.name
        is_half = dtype is torch.float16 or (dtype is torch.bfloat16 and roof.has_bfloat16)
        if "attention" in name:
            part = ATTENTION_BACKWARD if "backward" in name else ATTENTION
            return (roof.half if is_half else roof.single) * part
        if "convolution" in name:
            return (roof.half if is_half else roof.convolution) * roof.product * CONVOLUTION
        return (roof.half if is_half else roof.single) * roof.product * _filled(made, roof.units)


def _filled(made: Any, units: int) -> float:
    """The part of the units that a product's tiles keep at work; small products are split along their sum as well."""
    shape = next((leaf.shape for leaf in tree_leaves(made) if isinstance(leaf, Tensor)), ())
    if len(shape) < 2:
        return 1.0
    tiles = int(prod(shape[:-2])) * ceil(shape[-2] / TILE) * ceil(shape[-1] / TILE)
    waves = tiles / units
    return float(max(waves / ceil(waves), 0.5))


_FREE = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
)


def _is_free(func: Any) -> bool:
    """Whether no kernel runs: views and new memory."""
    if not isinstance(func, OpOverload):
        return True
    name = func._schema.name.partition("::")[2]
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
    return name in _FREE or views or func.namespace in ("prim", "prims", "profiler")


def _bytes(value: Any) -> int:
    """Bytes of all tensors in a value; what is expanded is there once."""
    total = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            size = leaf.numel() * leaf.element_size()
            total += min(size, leaf.untyped_storage().nbytes()) if leaf.layout is torch.strided else size
    return total


def _flops(func: OpOverload, args: Any, kwargs: Any, made: Any) -> int:
    """By torch's own formulas; fused attention of the CPU counts as the GPU's, and half where it is causal."""
    packet = func._overloadpacket
    formula = flop_registry.get(_ON_A_GPU.get(packet, packet))
    if formula is None:
        return 0
    flops = int(formula(*args, **kwargs, out_val=made))
    position = _CAUSAL.get(packet)
    is_causal = position is not None and (kwargs.get("is_causal") or (len(args) > position and args[position]))
    return flops // 2 if is_causal else flops


_ON_A_GPU: Final = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_CAUSAL: Final = {  # the position of is_causal
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    aten._scaled_dot_product_flash_attention: 4,
}
