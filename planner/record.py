"""The one kind of data class that the code base uses, and the value types that files share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, dataclass_transform

from annotated_types import Ge, Le
from pydantic import ConfigDict

_T = TypeVar("_T")

# The upper ends lie beyond anything real; they keep sums and products of a file's figures finite.
_LARGEST_INTEGER = 2**63 - 1
Seconds = Annotated[float, Ge(0), Le(1e12)]
Bytes = Annotated[int, Ge(0), Le(_LARGEST_INTEGER)]
LayerBytes = Annotated[int, Ge(0), Le(2**50)]
Index = Annotated[int, Ge(0), Le(_LARGEST_INTEGER)]
Count = Annotated[int, Ge(1), Le(_LARGEST_INTEGER)]
Fraction = Annotated[float, Ge(0), Le(1e18)]
Bandwidth = Annotated[float, Ge(1e-3), Le(1e18)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[_T]) -> type[_T]:
    """A frozen, slotted, keyword-only dataclass that pydantic reads strictly: no unknown key, no NaN, no coercion."""
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    made.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return made
