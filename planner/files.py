"""Files as people hand them in, and as we write them: read strictly, written whole or not at all.

A reader turns JSON or YAML into plain data and a record (planner.record) out of it; whatever is wrong becomes one
InputError that names the file, the place in it and the mend. A writer replaces a file in one step.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.constructor import ConstructorError

from planner.errors import InputError

_T = TypeVar("_T")
_MOST_UNPACKED: Final = 2 << 30


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file, unpacked where it is a .gz, less a byte order mark.

    Raises InputError where there is none, or it is no UTF-8.
    """
    try:
        if path.suffix == ".gz":
            held = _unpacked(path, _MOST_UNPACKED + 1)
            if len(held) > _MOST_UNPACKED:
                raise InputError(f"{path}: unpacks to over {_MOST_UNPACKED >> 30} GiB", hint="check the path")
            return held.decode("utf-8-sig")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file", hint="check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder", hint="name a file in it") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is no text (byte {error.start} is not UTF-8)", hint="check the path") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="check the path and its rights") from None


def _unpacked(path: Path, most: int) -> bytes:
    """The first bytes of a packed file. Raises InputError where it is none."""
    try:
        with gzip.open(path) as file:
            return file.read(most)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: is no gzip file, or is cut short", hint="check the path") from None


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hex. Raises InputError where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})", hint="check the path and its rights") from None


def read_json(path: Path) -> object:
    """The plain data of a JSON file. Raises InputError on bad syntax, a duplicate key, NaN or an infinity."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(f"{path}: key {twice!r} stands twice in one mapping", hint="remove one of them")
        return made

    def constant(word: str) -> float:
        raise InputError(f"{path}: holds {word}, which is no number", hint="every figure must be finite")

    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: line {error.lineno} column {error.colno}: {error.msg}", hint="it must be one JSON document"
        ) from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{path}: {_first_clause(error)}", hint="it must be one JSON document") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deep", hint="it must be one flat JSON document") from None


def _first_clause(error: Exception) -> str:
    return str(error).partition(": ")[0].partition(";")[0]


_YAML_12 = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


_MOST_ENTRIES: Final = 10_000_000
_MOST_DIGITS: Final = 400
"""Of a whole number: no figure is longer, and Python neither reads nor spells out thousands of digits."""


def _entries(data: object, known: dict[int, int]) -> int:
    """How many entries nested data has with its aliases spelled out, which a few lines of them can make endless."""
    if not isinstance(data, dict | list):
        return 1
    if id(data) not in known:
        known[id(data)] = _MOST_ENTRIES + 1  # what it is while it is counted: an alias of itself has no end
        items = data.values() if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_entries(item, known) for item in items)
    return known[id(data)]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-3 is a number, `on` a word, a date a word); duplicate keys refused."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as PyYAML types it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise ConstructorError(
                        None, None, f"key {key_node.value!r} stands twice in one mapping", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _yaml_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    word = str(loader.construct_scalar(node))
    if len(word) > _MOST_DIGITS:
        raise ConstructorError(None, None, f"a whole number of {len(word)} characters", node.start_mark)
    return int(word, 0) if word[:2] in ("0o", "0x") else int(word)


def _yaml_bool(loader: _Loader, node: yaml.ScalarNode) -> bool:
    word = str(loader.construct_scalar(node)).lower()
    if word not in ("true", "false"):  # as one can tag it
        raise ConstructorError(None, None, f"{word!r} is neither true nor false", node.start_mark)
    return word == "true"


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would take for something else than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _YAML_12.items():
    for _kind in (_Loader, _Dumper):
        _starts = [*_first, ""] if _tag.endswith("null") else list(_first)
        _kind.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _starts)
_Loader.yaml_constructors = {  # and no other tags: sets, times and the like are in no file of ours
    tag: yaml.SafeLoader.yaml_constructors[tag]
    for tag in (*(f"tag:yaml.org,2002:{name}" for name in ("null", "float", "str", "seq", "map")), None)
}
_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:bool", _yaml_bool)


def read_yaml(path: Path) -> object:
    """The plain data of a YAML file, read safely. Raises InputError on bad syntax or a duplicate key."""
    text = read_text(path)
    try:
        data = yaml.load(text, Loader=_Loader)
        if _entries(data, {}) > _MOST_ENTRIES:
            raise InputError(f"{path}: its aliases spell out too many entries", hint="it must be plain nested data")
        return data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        fault = error.problem or error.context
        raise InputError(f"{path}: {where}{fault}", hint="it must be one YAML document") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: {error}", hint="it must be one YAML document") from None
    except ValueError as error:
        raise InputError(f"{path}: {_first_clause(error)}", hint="it must be one YAML document") from None
    except RecursionError:
        raise InputError(f"{path}: is nested too deep", hint="it must be one flat YAML document") from None


def as_record(kind: type[_T], data: object, *, path: Path | str) -> _T:
    """The record that plain data spells out, checked strictly.

    Raises InputError with the first fault: ``file: place: what is wrong; mend``.
    """
    wanted = getattr(kind, "__dataclass_fields__", {}).get("format")
    if wanted is not None and isinstance(data, dict):
        _check_format(str(wanted.default), data.get("format"), path)
    try:
        made: _T = _adapter(kind).validate_json(json.dumps(data))
    except ValidationError as error:
        place, fault, hint = _describe(error.errors(include_url=False)[0], data)
        raise InputError(f"{path}: {place}{fault}", hint=hint) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: {error}", hint="it must be plain nested data") from None
    return made


def _check_format(wanted: str, found: object, path: Path | str) -> None:
    if found == wanted:
        return
    name, _, version = wanted.partition("/")
    if isinstance(found, str) and found.startswith(f"{name}/") and found[len(name) + 1 :].isdigit():
        newer = int(found[len(name) + 1 :]) > int(version)
        mend = "upgrade pipeplan" if newer else "make the file again"
        raise InputError(f"{path}: format: {found} is not the version read here, {wanted}", hint=mend)
    said = "is missing" if found is None else f"is {found!r}"
    raise InputError(f"{path}: format: {said}", hint=f"this file must begin with format: {wanted}")


def _describe(fault: Any, data: object) -> tuple[str, str, str]:
    """Place (with its colon), fault and mend of one pydantic error in plain data."""
    parts = _place(fault["loc"], data)
    place = ""
    for part in parts:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    place = f"{place}: " if place else ""
    name = str(parts[-1]) if parts else "the file"
    kind = fault["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return place, "is no key of this format", "remove it or correct its spelling"
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return place, "is missing", f"add {name}"
    if kind == "value_error":
        return place, str(fault["ctx"]["error"]), ""
    shown = json.dumps(fault.get("input"), default=str)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    message = fault["msg"]
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return place, f"{message}, not {shown}", f"correct {name}"


_WORDS = {
    "Input should be": "must be",
    "Input must": "must",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "an object": "a mapping of keys to values",
    "a valid dictionary": "a mapping of keys to values",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "less than": "under",
    "greater than": "over",
}


def _place(location: tuple[str | int, ...], data: object) -> list[str | int]:
    """The part of a pydantic location that lies in the data: it ends with the names of a union's members, say."""
    parts: list[str | int] = []
    for part in location:
        if isinstance(data, dict) and not isinstance(part, int):
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            break
        parts.append(part)
    return parts


# --- writing ----------------------------------------------------------------------------------------------------------


def plain(value: object) -> Any:
    """A record as plain data: dicts, lists, numbers, text; keys without a value left out."""
    return _adapter(type(value)).dump_python(value, mode="json", exclude_none=True, by_alias=True)


def json_text(data: object) -> str:
    """Plain data as JSON text. Raises ValueError on NaN, which no file of ours may hold."""
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def yaml_text(data: object) -> str:
    """Plain data as YAML that a person can read and edit: small leaves on one line."""
    _Dumper.add_representer(dict, _represent_mapping)
    _Dumper.add_representer(list, _represent_list)
    _Dumper.add_representer(str, _represent_text)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def _leaves_only(items: Any, room: int) -> bool:
    return all(isinstance(item, str | int | float | bool | None) for item in items) and len(str(items)) <= room


def _represent_mapping(dumper: _Dumper, data: dict[str, Any]) -> yaml.Node:
    node = dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=False)
    node.flow_style = _leaves_only(data.values(), 90 if len(data) <= 5 else 104) and 0 < len(data) <= 7
    return node


def _represent_list(dumper: _Dumper, data: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=_leaves_only(data, 100_000))


def _represent_text(dumper: _Dumper, data: str) -> yaml.Node:
    # PyYAML takes NEL for the end of a line, which comes back as a space: only double quotes escape it
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\x85" in data else None)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file whole or not at all: temporary file beside it, fsync, rename. A name in .gz packs it.

    Raises InputError where the folder cannot be written; an old file then stays as it was.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            written = text.encode("utf-8")
            file.write(gzip.compress(written, mtime=0) if path.suffix == ".gz" else written)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror
        raise InputError(f"{path}: cannot be written ({reason})", hint="check the path and its rights") from None
    except BaseException:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Raises InputError where a file surely cannot be written: to be known before long work, not after."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir():
        raise InputError(f"{path}: is a folder", hint="name a file in it")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fault = "is not writable" if folder.is_dir() else "is no folder"
        raise InputError(f"{path}: cannot be written ({folder} {fault})", hint="check the path and its rights")


def check_replaceable(path: Path, format_name: str, *, option: str = "-o") -> None:
    """Raises InputError where a file that is not of this format (e.g. ``pipeplan-plan``) would be overwritten."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
        if start and path.suffix == ".gz":
            with suppress(InputError):
                start = _unpacked(path, 4096)
    except OSError:
        return  # there is none, or writing says what is wrong
    if start and f"{format_name}/".encode() not in start:
        raise InputError(f"{path}: is there and is no {format_name} file", hint=f"name another file with {option}")


def schema_of(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a file format."""
    return _adapter(kind).json_schema()
