"""Ways to damage a file, and values that are odd where another one is expected."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from toolkit.checkpoint import manifest as manifests

DEEP = "[" * 3000 + "]" * 3000
#: JSON texts, for a place where there was another value.
ODD_JSON = (
    *("null", "true", "0", "-1", "1.5", "1e308", "1e999", "NaN", "-Infinity", '""', '"x"', '"\\ud800"', '"\\u0000"'),
    *("[]", "{}", "[[]]", '{"a": {"b": 1}}', '[1, "x", null]', "9" * 400, "9" * 5000, "-" + "9" * 30, '"../../x"'),
    *(
        '"a b\\n%s"',
        '"' + "x" * 5000 + '"',
        '"2026-01-01"',
        '"9999-12-31T23:59:59+00:00"',
        DEEP,
        "1e15",
        "9007199254740993",
    ),
)
#: Instead of a whole file.
ODD_FILES = (
    b"",
    b"\0" * 300,
    b"\xff\xfe{\0}\0",
    b"\x80abc",
    b"null",
    b"[]",
    b'"x"',
    b"5",
    b"{",
    DEEP.encode(),
    b"\n\n\n",
)


@dataclass(frozen=True)
class Damaged:
    """A file with other bytes. If ``is_plain``, no reader can take it for what was written."""

    name: str
    how: str
    content: bytes
    is_plain: bool

    def __repr__(self) -> str:
        return f"{self.name} {self.how}: {self.content[:600]!r}"


@st.composite
def damaged(draw: st.DrawFn, files: Mapping[str, bytes]) -> Damaged:
    """Draw one of the files, damaged in one way."""
    name = draw(st.sampled_from(sorted(files)))
    raw = files[name]
    ways = ["cut", "zeroed", "flipped", "replaced", "inserted"]
    if name.endswith((".json", ".jsonl")):
        # damage that is valid JSON reaches the readers' own checks
        ways += ["retyped"] * 6 + ["without a key", "nested"]
    how = draw(st.sampled_from(ways))
    start, length = draw(st.integers(0, max(len(raw) - 1, 0))), draw(st.integers(1, 400))
    if how == "cut":
        content = raw[:start]
        # a cut at a line's end leaves whole lines, and nothing shows that more were written
        return Damaged(name, how, content, bool(content.strip()) and not raw[start:].startswith(b"\n"))
    if how == "zeroed":
        content = raw[:start] + b"\0" * len(raw[start : start + length]) + raw[start + length :]
        return Damaged(name, how, content, content != raw)
    if how == "flipped":
        bits = draw(
            st.lists(st.tuples(st.integers(0, max(len(raw) - 1, 0)), st.integers(0, 7)), min_size=1, max_size=9)
        )
        flipped = bytearray(raw)
        for index, bit in bits if raw else ():
            flipped[index] ^= 1 << bit
        return Damaged(name, how, bytes(flipped), False)
    if how == "replaced":
        return Damaged(name, how, draw(st.sampled_from(ODD_FILES)), True)
    if how == "inserted":
        return Damaged(name, how, raw[:start] + draw(st.binary(min_size=1, max_size=40)) + raw[start:], False)
    if name.endswith("manifest.json"):
        return Damaged(name, how, _reframed(draw, raw, how), how == "nested")
    return Damaged(name, how, _with_other_value(draw, name, raw, how), how == "nested")


def _with_other_value(draw: st.DrawFn, name: str, raw: bytes, how: str) -> bytes:
    """Return the JSON with one value, or key, changed. Of JSON lines it is one line."""
    lines = raw.splitlines() if name.endswith("l") else [raw]
    index = draw(st.integers(0, len(lines) - 1))
    lines[index] = _changed(draw, json.loads(lines[index]), how).encode()
    return b"\n".join(lines) + b"\n"


def _changed(draw: st.DrawFn, value: Any, how: str) -> str:
    """Return the changed JSON as text, since Python cannot hold every odd value."""
    paths = list(_paths(value))
    path = draw(st.sampled_from(paths))
    if how == "without a key":
        *above, last = path if path else ("",)
        parent = _at(value, above)
        if path and isinstance(parent, dict):
            del parent[last]
        return json.dumps(value)
    odd = DEEP if how == "nested" else draw(st.sampled_from(ODD_JSON))
    if not path:
        return odd
    _at(value, path[:-1])[path[-1]] = "@@HERE@@"
    return json.dumps(value).replace('"@@HERE@@"', odd)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _at(value: Any, path: Any) -> Any:
    for key in path:
        value = value[key]
    return value


def _reframed(draw: st.DrawFn, raw: bytes, how: str) -> bytes:
    """Return a manifest of another shape whose own digest is right."""
    head = re.match(rb'\{"format": \d+, "crc32": "[0-9a-f]{8}", "manifest":\n', raw)
    assert head
    body = _changed(draw, json.loads(raw[head.end() : -len(b"\n}\n")]), how)
    return manifests._frame(manifests.FORMAT, body.encode())
