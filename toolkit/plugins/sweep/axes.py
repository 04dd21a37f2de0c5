"""The values of a sweep, ``optim.lr=1e-4,1e-3``, ``0..4``, ``log(1e-5,1e-1)``, and its points: grid, sample, Optuna's.

A value is kept as the text that a user would write after ``key=``, so the config reads and checks it as any other.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from toolkit.base.errors import RequestError
from toolkit.files.run_files import RunState
from toolkit.plugins.sweep.sweep_folder import SweepDir

#: Each point is a run folder with a dozen files, made at submission. More points are mostly a mistake.
MOST_POINTS = 2_000
#: One point: the value of each swept key, as text.
Values: TypeAlias = Mapping[str, str]

_CALL = re.compile(r"(range|log|linear)\((.*)\)")
_SPAN = re.compile(r"(-?\d+)\.\.(-?\d+)")
_OPEN, _CLOSE = "[{(", ")}]"


@dataclass(frozen=True)
class Discrete:
    """Values one by one."""

    texts: Sequence[str] | range

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, index: int) -> str:
        return str(self.texts[index])

    def at_share(self, share: float) -> str:
        """Return the value at this share of the list, of 0 to below 1."""
        return self.at(int(share * len(self)))


@dataclass(frozen=True)
class Span:
    """All numbers between two, on a linear or a logarithmic scale. Only a sample can be taken of it."""

    least: float
    most: float
    is_log: bool

    def at_share(self, share: float) -> str:
        """Return the number at this share of the span. Six digits: equal values must be equal as text."""
        if self.is_log:
            exponent = math.log(self.least) + share * math.log(self.most / self.least)
            return f"{math.exp(exponent):.6g}"
        return f"{self.least + share * (self.most - self.least):.6g}"


Axis: TypeAlias = Discrete | Span


def parse(key: str, text: str) -> Axis | None:
    """Return the axis that ``key=text`` describes; None for a single value. Raises RequestError, naming the key."""
    pieces = split(key, text)
    axes = [_piece(key, piece) for piece in pieces]
    if len(axes) == 1:
        return axes[0]
    if any(isinstance(axis, Span) for axis in axes):
        raise RequestError(f"{key}: {text}: a span without a number of values stands alone, as in log(1e-5,1e-1)")
    # Pieces of a list may be ranges: 8,16,range(32,128,32).
    counts = sum(len(axis) if isinstance(axis, Discrete) else 1 for axis in axes)
    refuse_many(counts, key)
    texts: list[str] = []
    for piece, axis in zip(pieces, axes, strict=True):
        texts += map(str, axis.texts) if isinstance(axis, Discrete) else [piece]
    return of_list(texts)


def of_list(texts: Sequence[str]) -> Discrete:
    """Return these values, each once."""
    return Discrete(list(dict.fromkeys(texts)))


def split(key: str, text: str) -> list[str]:
    """Split at the commas that are in no bracket and no quotes. Raises RequestError for an empty piece."""
    pieces, depth, quote = [""], 0, ""
    # Commas in quotes or brackets belong to a value, such as [0.9, 0.95].
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        if char == "," and depth == 0 and not quote:
            pieces.append("")
        else:
            pieces[-1] += char
    pieces = [piece.strip() for piece in pieces]
    if len(pieces) > 1 and "" in pieces:
        raise RequestError(f"{key}: {text!r} has an empty value between its commas")
    return pieces


def _piece(key: str, text: str) -> Axis | None:
    # The end of 0..4 is a value, that of range(0,4) is not.
    if match := _SPAN.fullmatch(text):
        return _not_empty(key, text, range(int(match[1]), int(match[2]) + 1))
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    name, inner = match[1], match[2]
    try:
        if name == "range":
            return _not_empty(key, text, range(*(int(part) for part in inner.split(","))))
        numbers = [float(part) for part in inner.split(",")]
        least, most, *counts = numbers
        if len(counts) > 1 or not all(map(math.isfinite, numbers)):
            raise ValueError("it takes least, most and, for a grid, how many")
    except (ValueError, TypeError) as error:
        example = {"range": "range(64,512,64): first, end (not a value), step"}.get(name, f"{name}(1e-5,1e-1,9)")
        raise RequestError(f"{key}: {text} cannot be read ({error}); write {example}") from None
    is_log = name == "log"
    if least >= most or (is_log and least <= 0):
        raise RequestError(f"{key}: {text} is empty: the first number must be less than the second, and log's above 0")
    span = Span(least, most, is_log)
    # A third number makes a grid of the span, with both ends.
    if not counts:
        return span
    count = int(counts[0])
    if count != counts[0] or count < 1:
        raise RequestError(f"{key}: {text} is empty: its third number is how many values, 1 or more")
    refuse_many(count, key)
    return of_list([span.at_share(index / max(1, count - 1)) for index in range(count)])


def _not_empty(key: str, text: str, numbers: range) -> Discrete:
    try:
        count = len(numbers)
    except OverflowError:
        raise RequestError(f"{key}: {text} has too many values") from None
    if not count:
        raise RequestError(f"{key}: {text} is empty: no number lies in it; write the first value, then the end")
    return Discrete(numbers)


def grid(axes: Mapping[str, Axis]) -> Iterator[Values]:
    """Yield every combination; the last axis changes fastest. Raises RequestError where there are too many."""
    spans = [key for key, axis in axes.items() if isinstance(axis, Span)]
    if spans:
        raise RequestError(
            f"{spans[0]}: a grid needs a number of values, such as log(1e-5,1e-1,9); or sample it with --random N"
        )
    listed = {key: axis for key, axis in axes.items() if isinstance(axis, Discrete)}
    refuse_many(math.prod(map(len, listed.values())), "this grid")
    texts = [[axis.at(index) for index in range(len(axis))] for axis in listed.values()]
    return (dict(zip(listed, values, strict=True)) for values in itertools.product(*texts))


def sample(axes: Mapping[str, Axis], count: int, seed: int) -> Iterator[Values]:
    """Yield ``count`` different points, fewer where there are no more. A larger count begins with the same ones."""
    _refuse_size(count)
    source = random.Random(seed)  # no secret
    seen = set[tuple[str, ...]]()
    # With few combinations a sample repeats some. After ten times as many draws the rest is not worth the search.
    for _ in range(10 * count):
        texts = tuple(axis.at_share(source.random()) for axis in axes.values())
        if texts in seen:
            continue
        seen.add(texts)
        yield dict(zip(axes, texts, strict=True))
        if len(seen) == count:
            return


def _refuse_size(count: int) -> None:
    refuse_many(count, "this sample")
    if count < 1:
        raise RequestError(f"a sample of {count} points is out of range; must be 1 or more")


def refuse_many(count: int, what: str) -> None:
    """Raise RequestError for more points than a sweep may have."""
    if count > MOST_POINTS:
        raise RequestError(
            f"{what}: {count:,} points are more than the {MOST_POINTS:,} that a sweep may have; take fewer values, or "
            "--random N"
        )


class Tried(NamedTuple):
    """A point that the sweep has. ``score`` is None without a result, and for a result without the metric."""

    values: Mapping[str, Any]
    is_over: bool
    score: float | None


def tried(sweep: SweepDir, metric: str) -> list[Tried]:
    """Return all points of the sweep."""
    found = []
    for point in sweep.points():
        result = sweep.run_of(point).result()
        # The last figure of a run that failed, or that a user has stopped, is not that of a whole run.
        is_tried = result is not None and result.state is RunState.COMPLETED
        score = result.metrics.get(metric.removeprefix("-")) if result is not None and is_tried else None
        found.append(Tried(point.values, result is not None, score if isinstance(score, (int, float)) else None))
    return found


def suggest_points(
    axes: Mapping[str, Axis], count: int, seed: int, before: Sequence[Tried], *, less_is_better: bool
) -> list[Values]:
    """Return new points that Optuna chooses, until the sweep has ``count``; fewer where no more exist.

    The sweep's files are Optuna's memory. A study is made of them for each call, and thrown away: a submitter that is
    killed leaves nothing that could disagree. Raises RequestError.
    """
    _refuse_size(count)
    for name, axis in axes.items():
        if isinstance(axis, Discrete):  # Optuna takes such values as a list
            refuse_many(len(axis), f"--optuna: {name}")
    try:
        import optuna
        from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
        from optuna.trial import TrialState, create_trial
    except ImportError:
        raise RequestError(
            "--optuna: the package optuna is not installed here; "
            "`pip install 'slurm-batch-toolkit[optuna]'`, or take --random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, BaseDistribution] = {
        key: CategoricalDistribution([axis.at(place) for place in range(len(axis))])
        if isinstance(axis, Discrete)
        else FloatDistribution(axis.least, axis.most, log=axis.is_log)
        for key, axis in axes.items()
    }
    # Points that wait or work count as bad ones: else many points of one call would be nearly the same.
    # Optuna's own first ten random points would be all of a small sweep, whichever way is better.
    startup = max(2, min(10, count // 3))
    sampler = optuna.samplers.TPESampler(n_startup_trials=startup, seed=seed + len(before), constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize" if less_is_better else "maximize")
    seen = set[tuple[object, ...]]()
    for each in before:
        params = {key: _as_drawn(axis, each.values.get(key)) for key, axis in axes.items()}
        if None in params.values():  # it was drawn from other values
            continue
        seen.add(tuple(params.values()))
        state = (
            TrialState.COMPLETE if each.score is not None else TrialState.FAIL if each.is_over else TrialState.RUNNING
        )
        study.add_trial(create_trial(state=state, value=each.score, params=params, distributions=space))
    new: list[Values] = []
    # With few combinations Optuna repeats some. After ten times as many draws the rest is not worth the search.
    for _ in range(10 * count):
        if len(new) + len(before) >= count:
            break
        params = {key: _as_drawn(axes[key], value) for key, value in study.ask(space).params.items()}
        if (key := tuple(params.values())) not in seen:
            seen.add(key)
            new.append({name: str(value) for name, value in params.items()})
    return new


def _as_drawn(axis: Axis, value: Any) -> str | float | None:
    """Return a value as Optuna knows it. None if the axis does not have it."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(axis, Span):
        is_within = is_number and axis.least <= value <= axis.most
        return min(max(float(f"{value:.6g}"), axis.least), axis.most) if is_within else None
    # A text of the axis from which a config would read the value: 1e-3 for 0.001, True for true.
    for text in map(axis.at, range(len(axis))):
        if text.lower() == str(value).lower():
            return text
        with suppress(ValueError):
            if is_number and float(text) == value:
                return text
    return None
