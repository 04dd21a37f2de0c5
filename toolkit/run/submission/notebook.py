"""Renders a run for a notebook: a few lines of HTML from the run's files."""

from __future__ import annotations

from html import escape

from toolkit.base.durations import as_clock
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir


def html_of(run: RunDir) -> str:
    """Return state, progress and figures of the run. Damaged files are named; Slurm is not asked."""
    damage: list[str] = []
    status, result = run.status(damage), run.result(damage)
    at = status.progress
    # The result, if there is one, overrides the last status, which may be older.
    state = (status.state or RunState.QUEUED) if result is None else result.state
    step = at.step if result is None or result.step is None else result.step
    metrics = at.metrics if result is None or not result.metrics else result.metrics
    rows = [("run", f"{run.name}/{run.id}"), ("state", str(state)), ("folder", str(run.path))]
    if step is not None:
        rows.append(("step", f"{step} of {at.total_steps or '?'}"))
    if result is None and at.eta_s is not None and state.has_ranks:
        rows.append(("time left", as_clock(at.eta_s)))
    for name, value in sorted(metrics.items()):
        rows.append((name, "not a number" if value is None else f"{value:.4g}"))
    if result is not None and result.why:
        rows.append(("why", result.why))
    rows += [("damaged", text) for text in damage]
    bar = ""
    if at.total_steps:
        bar = f'<progress max="{at.total_steps}" value="{min(step or 0, at.total_steps)}"></progress>'
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"{bar}<table>{cells}</table>"
