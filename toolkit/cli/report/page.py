"""The page: one HTML file that loads nothing and runs no script.

It can be read without colours or a mouse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from toolkit import __version__
from toolkit.cli.report import sections
from toolkit.cli.report.facts import ReportFacts
from toolkit.cli.report.html import Html, element, join, table, text
from toolkit.durations import in_units
from toolkit.metrics import goodput

#: The first bytes of a report: a file that begins otherwise is not replaced by one.
BEGIN = '<!doctype html><html lang="en"><!-- a report of slurm-batch-toolkit -->'
#: Nothing is loaded and nothing is run, even if a text were not escaped.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
#: Of a config that is longer, as one with thousands of parameters, the rest is left out.
MOST_KEYS = 600


def page(runs: Sequence[ReportFacts], compared: ReportFacts | None, written: float) -> str:
    """Return the report about ``runs``. ``compared`` is a further run in the curves and the differences alone."""
    drawn = [*runs, compared] if compared is not None else [*runs]
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    parts = [("curves", "Curves", sections.charts(drawn))]
    if len(drawn) > 1:
        parts.append(("differences", "Differences", differences(drawn)))
    # `compared` gets no sections of its own.
    for place, facts in enumerate(runs):
        parts += _about(facts, "" if len(runs) == 1 else str(place + 1))
    links = element("nav", *(element("a", name, href=f"#{anchor}") for anchor, name, _ in parts), aria_label="Sections")
    blocks = [element("section", element("h2", name, id=anchor), block) for anchor, name, block in parts]
    foot = f"Written {sections.moment(written)} UTC by slurm-batch-toolkit {__version__}."
    head = [_head(facts) for facts in runs]
    body = element("main", *head, links, *blocks, element("p", foot, class_="soft"))
    style = resources.files("toolkit.cli.report").joinpath("page.css").read_text()
    return (
        f'{BEGIN}<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{text(_POLICY)}">'
        f"<title>{text(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def _head(facts: ReportFacts) -> Html:
    state = str(facts.told["state"])
    line = [element("span", state, class_=f"state {state.split()[0].rstrip('?')}")]
    if facts.told["why"] and facts.told["why"] != state:
        line.append(text(f": {str(facts.told['why'])[:1000]}"))
    words = [element("p", *line)]
    if found := facts.told["diagnosis"]:
        words += [element("p", f"Cause: {found['cause']}"), element("p", f"Next: {found['next']}")]
    figures = [element("li", element("b", value), name) for name, value in _key_figures(facts)]
    damage = [element("p", f"damaged: {what}", class_="bad") for what in facts.damage[:20]]
    return join([element("h1", facts.title), *words, element("ul", *figures, class_="figures"), *damage])


def _key_figures(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    figures = facts.figures
    if figures["step"] is not None:
        step, total = figures["step"], figures["total_steps"]
        yield "step", f"{step:,} of {total:,}" if total and total != step else f"{step:,}"
    if figures.get("epoch") is not None:
        yield "epoch", str(figures["epoch"])
    if (wall_s := sum((facts.told["goodput"] or {}).get(part, 0.0) for part in goodput.PARTS)) > 0:
        yield "since the submission", in_units(wall_s)
        yield "of it training", f"{goodput.ratio(facts.told['goodput']):.1%}"
    yield "attempts", str(len(facts.attempts))
    yield from ((name, sections.number(value)) for name, value in sorted(figures["metrics"].items())[:12])


def _about(facts: ReportFacts, number: str) -> Iterator[tuple[str, str, Html]]:
    """Yield the sections about one run: anchor, heading, content. With several runs they are numbered."""
    blocks: Mapping[str, Callable[[ReportFacts], Html]] = {
        "Time": lambda facts: join(
            [sections.time_spent(facts.told["goodput"]), sections.time_to_start(facts.told["start_up"])]
        ),
        "Attempts": sections.timeline,
        "Nodes": sections.node_map,
        "Efficiency": sections.usage,
        "Config": _config,
        "Environment": _environment,
    }
    for name, build in blocks.items():
        heading = f"{name} of {facts.title}" if number else name
        yield f"{name.lower()}{number}", heading, build(facts)


def _config(facts: ReportFacts) -> Html:
    if not facts.config:
        return element("p", "The config cannot be read.", class_="soft")
    shown = list(facts.config.items())[:MOST_KEYS]
    rows = [(key, element("td", value[:500], class_="long")) for key, value in shown]
    hidden = len(facts.config) - len(rows)
    more = element("p", f"{hidden} more keys are in {facts.run.config}", class_="soft") if hidden else ""
    return join(
        [
            element(
                "details", element("summary", f"{len(facts.config)} keys"), table("Config", ("key", "value"), rows)
            ),
            more,
        ]
    )


def _environment(facts: ReportFacts) -> Html:
    if not facts.versions:
        return element("p", "No versions are known: there is no checkpoint, and no copy of the sources.", class_="soft")
    return table("Versions", ("of", "version"), facts.versions.items())


# --------------------------------------------------------------------------------------------------------- differences


def differences(runs: Sequence[ReportFacts]) -> Html:
    """Return a table of what is not the same in all runs."""
    rows = [
        (name, *(sections.number(value) if isinstance(value, (int, float)) else value or "" for value in values))
        for name, values in differing(runs)
    ]
    if not rows:
        return element("p", "Results, config and versions are the same.", class_="soft")
    return table("What differs", ("", *(facts.title for facts in runs)), rows[:MOST_KEYS])


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


# ---------------------------------------------------------------------------------------------------------------- file


def as_data(runs: Sequence[ReportFacts], compared: ReportFacts | None) -> dict[str, Any]:
    """Return what the report says for a JSON document."""
    drawn = [*runs, compared] if compared is not None else [*runs]
    different = {
        name: dict(zip([facts.title for facts in drawn], values, strict=True)) for name, values in differing(drawn)
    }
    return {"runs": [facts.to_json() for facts in runs], "differences": different}
