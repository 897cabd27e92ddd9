"""A plan's stages in the words that other systems cut models by: items of repeated containers, and top-level modules.

layer blocks.3.attention ─▶ item blocks.3 of container blocks ─▶ Megatron-LM's t
layer head                ─▶ module head, after the last item   ─▶ Megatron-LM's L
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from planner.profile import Layer


class Item(NamedTuple):
    """An entry of a repeated container, ``blocks.3``; ``container`` is its name."""

    container: str
    number: int

    def __str__(self) -> str:
        return f"{self.container}.{self.number}"


def item_of(layer: Layer) -> Item | None:
    """The outermost numbered module that a layer's first module lies in; None: there is none."""
    words = layer.modules[0].split(".") if layer.modules else []
    for position, word in enumerate(words):
        if word.isdecimal() and position:
            return Item(".".join(words[:position]), int(word))
    return None


def containers(layers: tuple[Layer, ...]) -> list[str]:
    """The containers with several entries among the layers, in the order in which they come."""
    items = {item: None for layer in layers if (item := item_of(layer))}
    counts = Counter(item.container for item in items)
    return [container for container, count in counts.items() if count > 1]


def parts_of(layer: Layer) -> list[str]:
    """The top-level modules, or entries of top-level containers, that a layer calls: ``norm``, ``layers.3``."""
    parts = []
    for name in layer.modules:
        words = name.split(".")
        parts.append(".".join(words[:2]) if len(words) > 1 and words[1].isdecimal() else words[0])
    return list(dict.fromkeys(part for part in parts if part))
