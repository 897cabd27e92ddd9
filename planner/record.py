"""The one kind of data class that the code base uses, and the value types that files share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar, dataclass_transform

from annotated_types import Ge, Gt
from pydantic import ConfigDict

_T = TypeVar("_T")

Seconds = Annotated[float, Ge(0)]
Bytes = Annotated[int, Ge(0)]
Index = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1)]
Fraction = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[_T]) -> type[_T]:
    """A frozen, slotted, keyword-only dataclass that pydantic reads strictly: no unknown key, no NaN, no coercion."""
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    made.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[attr-defined]
    return made
