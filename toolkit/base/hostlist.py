"""Slurm's host list notation, ``rack[1-2]node[01-03],login``, in both directions.

`expand` equals ``scontrol show hostnames`` and `compress` equals ``scontrol show hostlist``: order and duplicates are
kept and nothing is sorted, because a name's place in the list is its node number. There are two differences. This
module refuses a typing error that scontrol lets through (``n[1`` becomes the host ``n]``), and it accepts text behind
the last bracket (``n[1-2]-ib``), which scontrol does not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from math import prod

from toolkit.base.errors import RequestError

#: A longer list is a typing error, and expanding it would use up the login node's memory.
MAX_HOSTS = 1_000_000

#: An entry with the separators before it, commas or blanks. Those in brackets are none. Matches the empty text, too.
_ENTRY = re.compile(r"[\s,]*([^\s,\[\]]*(?:\[[^\[\]]*\][^\s,\[\]]*)*)")
_BRACKET = re.compile(r"\[([^\]]*)\]")
#: Python refuses to convert numbers of more than 4,300 digits.
_RANGE = re.compile(r"([0-9]{1,4000})(?:-([0-9]{1,4000}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,4000})", re.DOTALL)
_COUNT = re.compile(r"([0-9]{1,4000})(?:\(x([0-9]{1,4000})\))?")


def expand(text: str) -> list[str]:
    """Return the names in ``text``. Raises `RequestError` that names text and position."""
    hosts: list[str] = []
    end = 0
    while match := _ENTRY.match(text, end):
        start, entry, end = match.start(1), match[1], match.end()
        # The pattern stops at a bracket only if it has no partner.
        if end < len(text) and text[end] in "[]":
            raise _error(text, end, "unmatched bracket" if text[end] == "]" else "unclosed bracket")
        if not entry:
            break
        if "[" in entry:
            brackets = [_parse_bracket(text, start + m.start(1), m[1]) for m in _BRACKET.finditer(entry)]
            if len(hosts) + prod(map(len, brackets)) > MAX_HOSTS:
                raise _error(text, start, f"with {entry!r} there are more than {MAX_HOSTS} hosts")
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
    # By prefix, and for each run of numbers the first, the last and the width. A name without a number has no runs.
    groups: list[tuple[str, list[tuple[int, int, int]]]] = []
    for name in names:
        if not name or any(character in "[]," or character.isspace() for character in name):
            raise RequestError(f"{name!r} is not a host name: a list to compress holds one plain name per entry")
        match = _NUMBERED.fullmatch(name)
        prefix, runs = (name, []) if match is None else (match[1], [(int(match[2]), int(match[2]), len(match[2]))])
        # Names with the same prefix and a number share one pair of brackets; all others stand alone.
        if not (runs and groups and groups[-1][0] == prefix and groups[-1][1]):
            groups.append((prefix, runs))
            continue
        (number, _, digits), before = runs[0], groups[-1][1]
        low, high, width = before[-1]
        # n9 and n10 join; n9 and n010 do not, as the padding would change.
        if number == high + 1 and len(str(number).zfill(width)) == digits:
            before[-1] = low, number, width
        else:
            before += runs
    return ",".join(_bracketed(prefix, runs) for prefix, runs in groups)


def _bracketed(prefix: str, runs: list[tuple[int, int, int]]) -> str:
    ranges = []
    for low, high, width in runs:
        ranges.append(str(low).zfill(width) + (f"-{str(high).zfill(width)}" if high > low else ""))
    if len(ranges) == 1 and "-" not in ranges[0]:
        return prefix + ranges[0]
    return f"{prefix}[{','.join(ranges)}]" if ranges else prefix


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


def _parse_bracket(text: str, start: int, content: str) -> list[str]:
    numbers: list[str] = []
    for item in content.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _error(text, start, f"expected a number or a range such as 01-16, found {item[:80]!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise _error(text, start, f"the range {item!r} runs backwards")
        if len(numbers) + high - low >= MAX_HOSTS:
            raise _error(text, start, f"with the range {item!r} there are more than {MAX_HOSTS} hosts")
        # The width of the first number pads the whole range.
        width = len(match[1])
        numbers += [str(number).zfill(width) for number in range(low, high + 1)]
        start += len(item) + 1
    return numbers


def _error(text: str, position: int, problem: str) -> RequestError:
    shown = text if len(text) <= 200 else f"{text[:100]}...{text[-97:]}"
    return RequestError(f"host list {shown!r}, character {position + 1}: {problem}")
