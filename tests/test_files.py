"""Strict reading and atomic writing."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.files import json_text, read_json, read_yaml, write_atomically, yaml_text

_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_plain)
@example({"\x85": "\x85", "a\x85b": ["\u2028", "\ufeff", " \x85"]})
def test_yaml_and_json_give_back_what_was_written(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "data"
    write_atomically(path, json_text(data))
    assert read_json(path) == data
    write_atomically(path, yaml_text(data))
    assert read_yaml(path) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("+7", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("1_000", "1_000"),
        ("on", "on"),
        ("no", "no"),
        ("2026-01-01", "2026-01-01"),
        ("12:30", "12:30"),
        ("null", None),
        ("~", None),
        ("True", True),
        (".inf", math.inf),
    ],
)
def test_scalars_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "x.yaml").write_text(f"key: {text}")
    assert read_yaml(tmp_path / "x.yaml") == {"key": value}


@pytest.mark.parametrize("reader", [read_json, read_yaml])
@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"\x00",
        b'{"a": 1, "a": 2}',
        b'{"a": ',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"a": 1} {"b": 2}',
        b'{"a": 1]',
    ],
)
def test_what_is_no_document_is_one_line(tmp_path: Path, reader: Any, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        reader(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_json_holds_no_number_that_is_none(tmp_path: Path, word: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(f'{{"a": {word}}}')
    with pytest.raises(InputError, match=f"holds {word}, which is no number"):
        read_json(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="is a folder"):
        read_yaml(tmp_path)


def test_writing_makes_folders_and_keeps_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a" / "b.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b.txt").stat().st_mode) == 0o640


def test_what_cannot_be_written_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(path / "below.txt", "text")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]
