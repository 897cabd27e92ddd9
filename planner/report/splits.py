"""What a profile splits over tensor ranks, in words: modules by how, and what stays whole, with the reason.

Modules that differ in numbers alone are told together: ``blocks.*.mlp.0 (12)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from planner.profile import Profile
from planner.profile.tensor_sizes import left_out


def split_lines(profile: Profile) -> Iterator[str]:
    """For each tensor size what is split and how, and what is not and why."""
    splits = [one for layer in profile.layers for one in layer.splits or ()]
    for size in sorted({one.tensor for one in splits}):
        here = [one for one in splits if one.tensor == size]
        yield f"T = {size}: a rank holds {share_of(profile, size):.1%} of the parameters"
        for how in dict.fromkeys(how for one in here for how in one.split.values()):
            yield f"  by {how}: {_together(name for one in here for name, own in one.split.items() if own == how)}"
        for why in dict.fromkeys(why for one in here for why in one.whole.values()):
            yield f"  whole: {_together(name for one in here for name, own in one.whole.items() if own == why)}: {why}"
        yield from _token_lines(profile, size)
    for size, why in left_out(profile).items():
        yield f"T = {size}: {why or 'no layer can be split'}"


def _token_lines(profile: Profile, size: int) -> Iterator[str]:
    """With sequence parallel: the layers that hand on a rank's tokens, and those that cannot."""
    told = {
        layer.name: one.tokens
        for layer in profile.layers
        for one in layer.splits or ()
        if one.tensor == size and one.tokens
    }
    for how in dict.fromkeys(told.values()):
        names = _together(name for name, own in told.items() if own == how)
        yield f"  tokens in parts after {names}" if how == "split" else f"  tokens whole after {names}: {how}"


def share_of(profile: Profile, size: int) -> float:
    """Of the parameters, what one of so many tensor ranks holds."""
    rows = [(layer, next((cost for cost in layer.costs if cost.tensor == size), None)) for layer in profile.layers]
    whole = sum(layer.parameter_bytes for layer, _ in rows)
    own = sum(layer.parameter_bytes if row is None else row.parameter_bytes or 0 for layer, row in rows)
    return own / whole if whole else 1.0


def _together(names: Iterable[str]) -> str:
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    return ", ".join(f"{kind} ({len(found)})" if len(found) > 1 else found[0] for kind, found in alike.items())


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
