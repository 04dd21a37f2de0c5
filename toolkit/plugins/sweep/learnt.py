"""Points that Optuna chooses by the results so far: `toolkit sweep CONFIG ... --optuna N`.

The sweep's files are Optuna's memory: each point and the metric of its result. A study is made of them for each call,
under the sweep's lock, and thrown away. So a submitter that is killed leaves nothing that could disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.base.errors import RequestError
from toolkit.files.run_files import RunState
from toolkit.plugins.sweep.axes import Axis, Discrete, Values, refuse_many
from toolkit.plugins.sweep.sweep_folder import SweepDir


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


def draw(
    axes: Mapping[str, Axis], count: int, seed: int, before: Sequence[Tried], *, less_is_better: bool
) -> list[Values]:
    """Return new points, until the sweep has ``count``. There are fewer where no more exist. Raises RequestError."""
    refuse_many(count, "this sample")
    for name, axis in axes.items():
        if isinstance(axis, Discrete):  # Optuna takes such values as a list
            refuse_many(len(axis), f"--optuna: {name}")
    if count < 1:
        raise RequestError(f"a sample of {count} points is empty; ask for 1 or more")
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
    if isinstance(axis, Discrete):
        return next((text for text in map(axis.at, range(len(axis))) if _means(text, value)), None)
    if not isinstance(value, (int, float)) or not axis.least <= value <= axis.most:
        return None
    return min(max(float(f"{value:.6g}"), axis.least), axis.most)


def _means(text: str, value: Any) -> bool:
    """True if a config reads ``value`` from this text."""
    if text == str(value):
        return True
    try:
        return not isinstance(value, bool) and isinstance(value, (int, float)) and float(text) == value
    except ValueError:
        return text.lower() == str(value).lower()
