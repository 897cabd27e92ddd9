"""The colours of pictures: F, B, I and W differ in hue and in lightness, so that colour-blind readers, and prints in
grey, tell them apart; every picture says the letters too."""

from __future__ import annotations

from typing import Final

from planner.record import record
from planner.schedules import Letter


@record
class Palette:
    """One theme. ``actions``: fill and writing of each letter."""

    actions: dict[Letter, tuple[str, str]]
    ground: str
    card: str
    line: str
    text: str
    dim: str
    accent: str
    warning: str


LIGHT: Final = Palette(
    actions={
        Letter.FORWARD: ("#5aa9e6", "#06233b"),
        Letter.BACKWARD: ("#f6c445", "#3a2a00"),
        Letter.BACKWARD_INPUT: ("#e2703a", "#2b0f00"),
        Letter.BACKWARD_WEIGHT: ("#5b4a9c", "#ffffff"),
    },
    ground="#f5f6f8",
    card="#ffffff",
    line="#d9dde3",
    text="#1a2027",
    dim="#5a6572",
    accent="#0b5cad",
    warning="#b3261e",
)
DARK: Final = Palette(
    actions={
        Letter.FORWARD: ("#5aa9e6", "#06233b"),
        Letter.BACKWARD: ("#f6c445", "#3a2a00"),
        Letter.BACKWARD_INPUT: ("#e2703a", "#2b0f00"),
        Letter.BACKWARD_WEIGHT: ("#6a57b0", "#ffffff"),
    },
    ground="#0e1217",
    card="#161b22",
    line="#2c343e",
    text="#e6eaf0",
    dim="#9aa6b4",
    accent="#7cb8f2",
    warning="#ff8a80",
)


def css_variables(palette: Palette) -> str:
    """The palette as CSS custom properties: ``--F``, ``--F-text``, ``--ground`` and so on."""
    pairs = {"ground": palette.ground, "card": palette.card, "line": palette.line, "text": palette.text}
    pairs |= {"dim": palette.dim, "accent": palette.accent, "warning": palette.warning}
    for letter, (fill, writing) in palette.actions.items():
        pairs |= {letter.value: fill, f"{letter.value}-text": writing}
    return " ".join(f"--{name}: {value};" for name, value in pairs.items())
