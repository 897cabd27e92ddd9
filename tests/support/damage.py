"""Files damaged in every way that an editor, a broken disk or another system can think of."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import strategies as st

from support.command import pipeplan, refused

_NODE: Final = (
    "node{} -- {} -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[1.0; 2.0], "
    "parameter_size=8.0\n"
)
PIPEDREAM: Final = (
    _NODE.format(0, "Input0")
    + "".join(_NODE.format(number, "A(b, c)") for number in (1, 2, 3))
    + "\tnode0 -- node1\n\tnode1 -- node2\n\tnode1 -- node3\n\tnode2 -- node3\n"
)
"""A file that PipeDream's importer takes."""

FOREIGN: Final[dict[str, Any]] = {
    "dnn-partitioning": {
        "maxSizePerFPGA": 100,
        "nodes": [
            {"id": 1, "name": "a", "fpgaLatency": 1, "cpuLatency": 1, "size": 8, "isBackwardNode": 0, "colorClass": 1},
            {"id": 2, "name": "b", "fpgaLatency": 1, "cpuLatency": 1, "size": 8, "isBackwardNode": 0, "colorClass": 2},
            {"id": 3, "name": "c", "fpgaLatency": 1, "cpuLatency": 1, "size": 8, "isBackwardNode": 1, "colorClass": 1},
        ],
        "edges": [{"sourceId": 1, "destId": 2, "cost": 1, "size": 4}],
    },
    "piper": {
        "maxMemoryPerDevice": 100,
        "bandwidth": 100,
        "mbsInBatch": 4,
        "nodes": [
            {
                "id": number,
                "name": "a",
                "TMPCs": {
                    size: [
                        {"id": name, "timePerSample": 1, "parameterSize": 8, "memoryUsageA": 4, "memoryUsageB": 20}
                        for name in ("vanilla", "activation recomp")
                    ]
                    for size in ("1", "2")
                },
            }
            for number in (1, 2)
        ],
        "edges": [{"sourceId": 1, "destId": 2, "communicationCost": 4}],
    },
}
"""Files that the other importers take, by system."""

_values = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([10**30, -(10**30), 2**50, 2**63 - 1, 2**63, 10**400, 1e18, 1e300, 1.7e308, -1.5, 1e-300, 5e-324])
    | st.sampled_from([float("nan"), float("inf"), "1", "1e309", "\x1b[31m", "\u202e", "\ud800", "x" * 3_000, "../x"])
    | st.text(max_size=3)
    | st.sampled_from([[], {}, [[]], {"": {}}, [1] * 500])
    | st.sampled_from(["synthesised", "free", "v", "1f1b", "gpipe", "zb-h2", "0F0 0B0"])
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def damaged(draw: st.DrawFn, data: Any) -> Any:
    """Nested data with one place replaced, removed, doubled, renamed or moved."""
    data = json.loads(json.dumps(data))
    *parents, last = draw(st.sampled_from(list(_places(data))))
    inside = data
    for part in parents:
        inside = inside[part]
    how = draw(st.sampled_from(["replace", "remove", "double", "nudge"]))
    if how == "remove":
        del inside[last]
    elif how == "double" and isinstance(inside, list):
        inside.insert(last, inside[last])
    elif how == "double":
        inside[f"{last}2"] = inside[last]
    elif how == "nudge" and isinstance(inside[last], int | float):
        steps = [1, -1, 0.5] if abs(inside[last]) < 2**53 else [1, -1]  # an integer may be beyond what floats hold
        inside[last] += draw(st.sampled_from(steps))
    else:
        inside[last] = copy.deepcopy(draw(_values))
    return data


@st.composite
def damaged_texts(draw: st.DrawFn, text: str) -> bytes:
    """A text with a few bytes changed, or cut short."""
    content = bytearray(text.encode())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content) - 1))
        how = draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if how == "set":
            content[at] = draw(st.integers(0, 255))
        elif how == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif how == "delete":
            del content[at : at + draw(st.integers(1, 40))]
        else:
            del content[max(1, at) :]
        if not content:
            break
    return bytes(content)


def answers_well(*words: object) -> None:
    """The command does its work, or refuses it in one line."""
    answer = pipeplan(*words)
    if answer.code:
        refused(answer, code=answer.code)
        assert answer.code in (2, 3), answer
    else:
        assert "Traceback" not in answer.err


_BOMB: Final = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n".encode()
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def spoilt(content: bytes) -> Iterator[tuple[str, bytes]]:
    """A file's text as other systems write it, broken off, run together, or as no text at all; with names for each."""
    text = content.decode()
    yield "byte order mark", b"\xef\xbb\xbf" + content
    for mark in ("\r\n", "\r", "\x85", "\u2028"):
        yield f"lines end in {mark!r}", text.replace("\n", mark).encode()
    for name in ("utf-16", "utf-16-le", "utf-32", "utf-7", "cp037"):
        yield name, text.encode(name)
    yield "latin-1", text.replace("o", "\xe9").encode("latin-1")
    yield "packed", gzip.compress(content)
    yield "NULs", bytes(100)
    yield "a NUL within", content[: len(content) // 2] + b"\0" + content[len(content) // 2 :]
    yield "half", content[: len(content) // 2]
    yield "all but the end", content[:-2]
    yield "twice", content + content
    yield "two documents", content + b"\n---\n" + content
    yield "words at its end", content + b"\nand more"
    yield "tabs", text.replace(" ", "\t").encode()
    yield "blanks first", b" " * 100_000 + content
    yield "commands to the terminal", text.replace("o", "\x1b[31m").encode()
    yield "half a letter", text.replace("o", "\\ud800").encode()
    yield "from right to left", text.replace("o", "\u202e\u2028").encode()
    yield "long names", text.replace("o", "o" * 20_000).encode()
    yield "aliases that grow", _BOMB
    yield "aliases that grow, at its end", content + b"\n" + _BOMB
    for yaml in (
        b"a: &a [*a]\n",
        b"? &a [*a]\n: 1\n",
        b"? [1, 2]\n: 1\n",
        b"? {a: 1}\n: 1\n",
        b"<<: 3\n",
        b"x: &x {a: 1}\n<<: *x\n",
        b"%YAML 9.9\n---\na: 1\n",
        b"a: 1:60:60\n",
        b"a: 0x" + b"f" * 10_000,
        b"a: " + b"9" * 10_000,
        b"a: *nobody\n",
        b"!!python/object/apply:os.system ['true']\n",
        *(b"format: !!%s x\n" % tag for tag in (b"bool", b"int", b"float", b"null", b"timestamp", b"binary", b"set")),
        *(b"format: !!%s [a: 1]\n" % tag for tag in (b"omap", b"pairs", b"map", b"str")),
    ):
        yield yaml[:40].decode(), yaml
    for deep in (900, 100_000):
        yield f"{deep} lists", b"[" * deep + b"]" * deep
        yield f"{deep} mappings", b'{"a":' * deep + b"1" + b"}" * deep
        yield f"{deep} lists in it", content.rstrip()[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}"
    yield "a block within each block", b"\n".join(b" " * depth + b"a:" for depth in range(1_500))
