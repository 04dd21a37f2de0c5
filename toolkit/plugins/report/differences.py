"""How runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.plugins.report.facts import ReportFacts


def differing(runs: Sequence[ReportFacts]) -> list[tuple[str, list[Any]]]:
    """Return the facts that differ between the runs, with the value of each run. A run without the fact has None.

    Values that are not shown are compared all the same.
    """
    columns = [_comparable(facts) for facts in runs]
    real = [
        {**column, **{f"config {key}": value for key, value in facts.hidden.items()}}
        for column, facts in zip(columns, runs, strict=True)
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [
        (name, [column.get(name) for column in columns])
        for name in names
        if any(column.get(name) != real[0].get(name) for column in real)
    ]


def _comparable(facts: ReportFacts) -> dict[str, Any]:
    last = facts.attempts[-1] if facts.attempts else None
    return {
        "state": str(facts.told["state"]),
        "step": facts.figures["step"],
        "attempts": len(facts.attempts),
        "ranks": last and last.world_size,
        "nodes": last and len(last.nodes),
        **{f"result {name}": value for name, value in sorted(facts.figures["metrics"].items())},
        **{f"version of {name}": version for name, version in facts.versions.items()},
        **{f"config {key}": value for key, value in facts.config.items()},
        **{f"config {row['key']} since step {row['step']}": row["value"] for row in facts.told["changes"]},
    }


def as_data(runs: Sequence[ReportFacts], compared: ReportFacts | None) -> dict[str, Any]:
    """Return what the report says for a JSON document."""
    drawn = [*runs, compared] if compared is not None else [*runs]
    different = {
        name: dict(zip([facts.title for facts in drawn], values, strict=True)) for name, values in differing(drawn)
    }
    return {"runs": [facts.to_json() for facts in runs], "differences": different}
