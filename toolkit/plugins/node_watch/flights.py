"""The collectives that ranks have called, as torch's flight recorder has written them, and the first that differs.

The stacks of a hang show where the ranks wait in the end. A call that only some ranks make may have paired up with
another call of the rest many calls before, so its line is found only by what was recorded.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple

from toolkit.base import reading
from toolkit.hang import stacks
from toolkit.plugins.node_watch.faulthandler_text import program_line

#: The recordings of so many ranks are read, each of another group: all ranks of a group wait at the same place.
MOST = 8


class Call(NamedTuple):
    """A collective as a rank has called it."""

    name: str
    sizes: str
    line: str | None  #: None: called by a thread of torch's, such as that of a backward pass on a GPU

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name} ({self.line})"


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts alone: whoever may write into the run's folder could have others run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a recording")


def calls_of(folder: Path, rank: int) -> dict[str, dict[int, Call]]:
    """Return the collectives of a rank by process group and number. Empty without a recording that can be read."""
    groups: dict[str, dict[int, Call]] = {}
    with suppress(OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError):
        with reading.open_file(stacks.flight_path(folder, rank)) as file:
            entries = _PlainUnpickler(file).load()["entries"]
        for entry in entries:
            if not entry["is_p2p"]:
                frames = [FrameSummary(each["filename"], each["line"], each["name"]) for each in entry["frames"]]
                call = Call(entry["profiling_name"].partition(":")[2], str(entry["input_sizes"]), program_line(frames))
                groups.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = call
    return groups


def first_difference(
    recorded: Mapping[int, Mapping[str, Mapping[int, Call]]], weights: Mapping[int, int]
) -> tuple[int | None, str]:
    """Return the rank whose call is the odd one, None if any may be, and a line about the calls.

    ``recorded`` is what :func:`calls_of` returns, by rank; a rank stands for as many as its weight. The line is empty
    where all have made the same calls, as far as each has come.
    """
    for group in dict.fromkeys(name for groups in recorded.values() for name in groups):
        sides = {rank: groups[group] for rank, groups in recorded.items() if group in groups}
        numbers = sorted(set.intersection(*(set(calls) for calls in sides.values())))
        for at, number in enumerate(numbers):
            counts = Counter[Call]()
            for rank, calls in sides.items():
                counts[calls[number]] += weights[rank]
            if len(counts) == 1:
                continue
            # Of two calls that are as frequent either may be the odd one.
            usual, odd = counts.most_common()[0][0], counts.most_common()[-1][0]
            first, second = (
                next(rank for rank, calls in sides.items() if calls[number] == call) for call in (odd, usual)
            )
            theirs, others = ([sides[rank][each] for each in numbers[at:]] for rank in (first, second))
            extra, missed = _agree(theirs[1:], others), _agree(theirs, others[1:])
            # A branch for some ranks may make the same call at another line: then what follows agrees as it is.
            is_last = len(theirs) == 1
            if odd[:2] == usual[:2] and (is_last or _agree(theirs[1:], others[1:]) >= max(extra, missed)):
                continue
            line = f"collective {number} was {odd} on rank {first}, and {usual} on rank {second}"
            if counts[usual] > counts[odd]:
                return first, line
            return (first if extra > missed else second if missed > extra else None), line
    return None, ""


def _agree(some: Sequence[Call], others: Sequence[Call]) -> int:
    return sum(call == other for call, other in zip(some, others, strict=False))
