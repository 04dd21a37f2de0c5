"""The pages: the table of runs, and runs with their curves, live or saved as one file. See templates/."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from toolkit import __version__
from toolkit.base import hostlist
from toolkit.base.durations import in_units
from toolkit.base.fsio import size_text
from toolkit.base.terminal import visible
from toolkit.cli import columns
from toolkit.cli.run_rows import RunRow
from toolkit.files.run_files import RunState
from toolkit.plugins.node_watch import efficiency
from toolkit.plugins.report import sections
from toolkit.plugins.report.compare import differing
from toolkit.plugins.report.curves import Curve, is_system_metric
from toolkit.plugins.report.facts import ReportFacts
from toolkit.plugins.sweep.rows import shown

if TYPE_CHECKING:  # a report needs no live runs
    from toolkit.plugins.report.live import TablePage

#: The first bytes of a report: a file that begins otherwise is not replaced by one.
BEGIN = '<!doctype html><html lang="en"><!-- a report of slurm-batch-toolkit -->'
#: The bytes of all charts together; a report is at most 1 MB.
CHART_BYTES = 600_000
#: A browser gets slow with more of them; which ones a live page draws can be chosen.
MOST_CHARTS = 150
#: Characters that HTML does not allow, and that a terminal does.
_UNFIT = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")
#: A line end next to a tag and the indent after it are for readers of a template. In the page they would be spaces.
_LINE_END = re.compile(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])")
_FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class TableRequest:
    """What of the table is asked for: the names are those in the address."""

    name: str = ""
    unfinished: bool = False
    page: int = 1
    sort: str = ""
    sweep: str = ""

    def link(self, **changed: Any) -> str:
        """Return the address of the table with something changed."""
        asked = asdict(replace(self, **changed))
        return "./?" + urlencode({name: value for name, value in asked.items() if value}, errors="replace")

    def other_way(self, column: str) -> str:
        return f"-{column}" if self.sort == column else column

    def mark(self, column: str) -> str:
        return {column: " ↑", f"-{column}": " ↓"}.get(self.sort, "")


def saved_page(
    runs: Sequence[ReportFacts], compared: ReportFacts | None, unreadable: Sequence[str], written: float
) -> str:
    """Return the report about ``runs``. ``compared`` is a further run in the curves and the differences alone.

    ``unreadable`` are the runs that are left out, and why.
    """
    return _runs_page([*runs], compared, unreadable, written=written, **_in_one_file(asset("page.js")))


def evidence_page(facts: Mapping[str, Any], rows: Sequence[Sequence[object]]) -> str:
    """Return what `toolkit doctor --prove --gpus` has found as a page. Each row is a name and four cells."""
    return _render("evidence.html", facts=[*facts.items()], rows=rows, **_in_one_file(""))


def _in_one_file(script: str) -> dict[str, Any]:
    """Return what a page needs that loads nothing, and runs this script alone."""
    style = asset("page.css")
    policy = (
        f"default-src 'none'; style-src '{_hash_of(style)}'; script-src '{_hash_of(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return {"is_live": False, "style": Markup(style), "script": Markup(script), "policy": policy}


def live_page(runs: Sequence[ReportFacts], unreadable: Sequence[str], metric: str = "") -> str:
    """Return the same page as it is now, with what must not leave the run folder: logs, and lines of them.

    ``metric`` is a part of the names of those to draw, or a pattern.
    """
    return _runs_page([*runs], None, unreadable, metric, is_live=True)


def matches(name: str, pattern: str) -> bool:
    """True if ``pattern`` is a part of a name, or a pattern that fits it."""
    return pattern in name or fnmatchcase(name, pattern)


def table_page(table: TablePage, asked: TableRequest, folder: str, most_runs: int) -> str:
    """Return a page of the table of runs."""
    return _render("table.html", is_live=True, table=table, asked=asked, folder=folder, most_runs=most_runs)


def asset(name: str) -> str:
    """Return a file of the pages that is no template."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _runs_page(
    runs: list[ReportFacts], compared: ReportFacts | None, unreadable: Sequence[str], metric: str = "", **more: Any
) -> str:
    drawn = [*runs, compared] if compared is not None else runs
    # A chart of each metric with all runs in it: in the order of the first run's curves, then what only others have.
    tags = list(dict.fromkeys(tag for facts in drawn for tag in facts.curves))
    charts, left_bytes = dict[str, str](), CHART_BYTES
    for tag in [tag for tag in tags if matches(tag, metric)][:MOST_CHARTS]:
        charts[tag] = _in_script([_points(facts.curves.get(tag)) for facts in drawn])
        left_bytes -= len(charts[tag]) + 4 * len(escape(_readable(tag)).encode()) + 400 * len(drawn)  # with its caption
        if left_bytes < 0:
            del charts[tag]
            break
    of_runs = [
        {
            "title": _readable(facts.title),
            "restarts": [attempt.step_start or 0 for attempt in facts.attempts[1:]][-sections.MOST_ATTEMPTS :],
        }
        for facts in drawn
    ]
    of_tags = ",".join(f"{_in_script(_readable(tag))}:{found}" for tag, found in charts.items())  # as a figure has it
    return _render(
        "page.html",
        runs=runs,
        drawn=drawn,
        unreadable=unreadable,
        points=Markup(f'{{"runs":{_in_script(of_runs)},"tags":{{{of_tags}}}}}'),
        tags=list(charts),
        curves_of=lambda tag: [facts.curves.get(tag) for facts in drawn],
        left_out=[tag for tag in tags if tag not in charts],
        metric=metric,
        differing=differing(drawn),
        **more,
    )


def _points(curve: Curve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    # What is smoothed is the means: of the four points of each piece half are extremes.
    means = curve.numbers(of_means=True) if curve.width > 1 else None
    return {"strokes": curve.numbers(), "means": means, "bad": curve.first_bad}


def _in_script(value: Any) -> str:
    """Return JSON that ends no script element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _hash_of(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _render(name: str, **values: Any) -> str:
    return _templates().get_template(name).render(begin=Markup(BEGIN), version=__version__, **values) + "\n"


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FunctionLoader(lambda name: _LINE_END.sub("", (_FOLDER / name).read_text(encoding="utf-8"))),
        autoescape=True,
        finalize=_readable,
        undefined=StrictUndefined,
    )
    made.tests["aside"] = is_system_metric
    made.globals |= {"sections": sections, "efficiency_of": efficiency, "is_aside": is_system_metric}
    made.globals |= {"hostlist": hostlist, "in_units": in_units, "size_text": size_text}
    made.globals |= {"cell": columns.cell, "notes": columns.notes_of, "is_working": _is_working, "value_text": shown}
    made.globals["run_link"] = lambda title: "runs?" + urlencode({"run": title}, errors="replace")
    return made


def _is_working(row: RunRow) -> bool:
    return isinstance(row.state, RunState) and row.state.has_ranks


def _readable(value: object) -> object:
    """Return ``value`` as a text without hidden characters, which is then escaped. Markup is left as it is."""
    if hasattr(value, "__html__"):
        return value
    return _UNFIT.sub("\ufffd", visible(str(value))).encode(errors="replace").decode()
