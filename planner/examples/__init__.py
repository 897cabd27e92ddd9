"""Model files that ship with pipeplan: names and first lines, found without importing any of them.

``alice.txt`` holds the first four chapters of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in
the public domain.
"""

from __future__ import annotations

import ast
from importlib.resources import files


def example_names() -> tuple[str, ...]:
    """The names of the examples, sorted."""
    found = (entry.name for entry in files("planner.examples").iterdir())
    return tuple(sorted(name.removesuffix(".py") for name in found if name.endswith(".py") and name[0] != "_"))


def example_text(name: str) -> str:
    """The model file of one example, as text."""
    return (files("planner.examples") / f"{name}.py").read_text(encoding="utf-8")


def example_summary(name: str) -> str:
    """The first line of an example's docstring."""
    return (ast.get_docstring(ast.parse(example_text(name))) or "").partition("\n")[0]
