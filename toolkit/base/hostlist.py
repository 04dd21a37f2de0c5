"""Slurm's host list notation, ``rack[1-2]node[01-03],login``, in both directions.

`expand` equals ``scontrol show hostnames`` and `compress` equals ``scontrol show hostlist``: order and duplicates are
kept and nothing is sorted, because a name's place in the list is its node number. There are two differences. This
module refuses a typing error that scontrol lets through (``n[1`` becomes the host ``n]``), and it accepts text behind
the last bracket (``n[1-2]-ib``), which scontrol does not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from toolkit.base.errors import RequestError

#: A longer list is a typing error, and expanding it would use up the login node's memory.
MAX_HOSTS = 1_000_000

_SEPARATORS = re.compile(r"[\s,]*")
_ENTRY = re.compile(r"[^\s,\[\]]*(?:\[[^\[\]]*\][^\s,\[\]]*)*")
_BRACKET = re.compile(r"\[([^\]]*)\]")
#: Python refuses to convert numbers of more than 4,300 digits.
_RANGE = re.compile(r"([0-9]{1,4000})(?:-([0-9]{1,4000}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,4000})", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,4000})(?:\(x([0-9]{1,4000})\))?")


def expand(text: str) -> list[str]:
    """Return the names in ``text`` in the order of ``scontrol show hostnames``.

    Raises `RequestError` that names text and position.
    """
    hosts: list[str] = []
    for start, entry in _entries(text):
        if "[" in entry:
            brackets = [_parse_bracket(text, start + m.start(1), m[1]) for m in _BRACKET.finditer(entry)]
            if prod(map(len, brackets)) > MAX_HOSTS:
                raise _error(text, start, f"{entry!r} stands for more than {MAX_HOSTS} hosts")
            # The last bracket runs fastest. Of those before it the first does, as in Slurm's ``_push_range_list``.
            *literals, before_last, tail = _BRACKET.split(entry)[::2]
            *outer, last = brackets
            for numbers in itertools.product(*reversed(outer)):
                parts = zip(literals, reversed(numbers), strict=True)
                head = "".join(itertools.chain.from_iterable(parts)) + before_last
                hosts += [head + number + tail for number in last]
        else:
            hosts.append(entry)
    return hosts


def compress(names: Iterable[str]) -> str:
    """Write ``names`` in the notation of ``scontrol show hostlist``; ``expand(compress(names)) == list(names)``.

    Joins only neighbors in the list: a sorted list would be shorter, and would renumber the nodes.
    """
    groups: list[_Group] = []
    for name in names:
        if not name or any(character in "[]," or character.isspace() for character in name):
            raise RequestError(f"{name!r} is not a host name: a list to compress holds one plain name per entry")
        match = _NUMBERED.fullmatch(name)
        if match is None:
            host = _NumberRange(name)
        else:
            number = int(match[2])
            host = _NumberRange(match[1], number, number, len(match[2]))
        # Names with the same prefix and a number share one pair of brackets; all others stand alone.
        if groups and host.width and groups[-1].prefix == host.prefix and groups[-1].runs[-1].width:
            groups[-1].add(host)
        else:
            groups.append(_Group(host.prefix, [host]))
    return ",".join(map(str, groups))


def expand_counts(text: str) -> list[int]:
    """Return ``2(x3),1`` as ``[2, 2, 2, 1]``: the notation of SLURM_TASKS_PER_NODE and SLURM_JOB_CPUS_PER_NODE."""
    counts: list[int] = []
    position = 0
    for item in text.split(",") if text else ():
        match = _COUNT.fullmatch(item)
        if match is None:
            raise _error(text, position, f"expected a count such as 4 or 4(x2), found {item[:80]!r}")
        repeats = int(match[2] or 1)
        # Checked before the list grows, see MAX_HOSTS.
        if len(counts) + repeats > MAX_HOSTS:
            raise _error(text, position, f"more than {MAX_HOSTS} nodes")
        counts += [int(match[1])] * repeats
        position += len(item) + 1
    return counts


def compress_counts(counts: Iterable[int]) -> str:
    """Write ``counts`` in the notation that `expand_counts` reads. Joins equal neighbors, as Slurm does."""
    runs = [(count, len(list(equals))) for count, equals in itertools.groupby(counts)]
    return ",".join(str(count) if repeats == 1 else f"{count}(x{repeats})" for count, repeats in runs)


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """Yield the entries, separated by commas or blanks, with their positions. Commas in brackets do not separate."""
    position = _skip_separators(text, 0)
    while position < len(text):
        match = _ENTRY.match(text, position)
        assert match is not None, "the pattern matches the empty string"
        end = match.end()
        # The pattern stops at a bracket only if it has no partner.
        if end < len(text) and text[end] in "[]":
            raise _error(text, end, "this bracket has no partner" if text[end] == "]" else "this bracket never closes")
        yield position, match[0]
        position = _skip_separators(text, end)


def _skip_separators(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _parse_bracket(text: str, start: int, content: str) -> list[str]:
    numbers: list[str] = []
    position = start
    for item in content.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _error(text, position, f"expected a number or a range such as 01-16, found {item[:80]!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _error(text, position, f"the range {item!r} runs backwards")
        if high - low >= MAX_HOSTS:
            raise _error(text, position, f"the range {item!r} has more than {MAX_HOSTS} hosts")
        # The width of the first number pads the whole range.
        width = len(match[1])
        numbers += [str(number).zfill(width) for number in range(low, high + 1)]
        position += len(item) + 1
    return numbers


def _error(text: str, position: int, problem: str) -> RequestError:
    shown = text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"
    return RequestError(f"host list {shown!r}, character {position + 1}: {problem}")


@dataclass
class _NumberRange:
    """Consecutive hosts ``prefix + low..high``. ``width`` 0 is a name without a number."""

    prefix: str
    low: int = 0
    high: int = 0
    width: int = 0

    def is_followed_by(self, other: _NumberRange) -> bool:
        """True if ``other`` can join without a change of padding. n9 and n10 may join, n9 and n010 may not."""
        same_padding = len(str(other.low).zfill(self.width)) == other.width
        return other.low == self.high + 1 and same_padding

    def __str__(self) -> str:
        low, high = str(self.low).zfill(self.width), str(self.high).zfill(self.width)
        return low if self.low == self.high else f"{low}-{high}"


@dataclass
class _Group:
    """Neighboring runs with one prefix, written with one pair of brackets."""

    prefix: str
    runs: list[_NumberRange]

    def add(self, host: _NumberRange) -> None:
        if self.runs[-1].is_followed_by(host):
            self.runs[-1].high = host.low
        else:
            self.runs.append(host)

    def __str__(self) -> str:
        first = self.runs[0]
        if not first.width:
            return self.prefix
        if len(self.runs) == 1 and first.low == first.high:
            return f"{self.prefix}{first}"
        return f"{self.prefix}[{','.join(map(str, self.runs))}]"
