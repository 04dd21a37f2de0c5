"""The page: one HTML file that loads nothing and runs no script. Its markup is in templates/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from toolkit import __version__
from toolkit.base import hostlist
from toolkit.base.durations import in_units
from toolkit.base.terminal import visible
from toolkit.plugins.node_watch import efficiency
from toolkit.plugins.report import curves, sections
from toolkit.plugins.report.compare import differing
from toolkit.plugins.report.curves import is_aside
from toolkit.plugins.report.facts import ReportFacts

#: The first bytes of a report: a file that begins otherwise is not replaced by one.
BEGIN = '<!doctype html><html lang="en"><!-- a report of slurm-batch-toolkit -->'
#: The bytes of all charts together; a page is at most 1 MB.
CHART_BYTES = 600_000
#: Characters that HTML does not allow, and that a terminal does.
_UNFIT = re.compile("[\ufdd0-\ufdef\ufffe\uffff]")
#: A line end next to a tag and the indent after it are for readers of a template. In the page they would be spaces.
_LINE_END = re.compile(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])")


def page(runs: Sequence[ReportFacts], compared: ReportFacts | None, unreadable: Sequence[str], written: float) -> str:
    """Return the report about ``runs``. ``compared`` is a further run in the curves and the differences alone.

    ``unreadable`` are the runs that are left out, and why.
    """
    drawn = [*runs, compared] if compared is not None else [*runs]
    # A chart of each metric with all runs in it: in the order of the first run's curves, then what only others have.
    tags = list(dict.fromkeys(tag for facts in drawn for tag in facts.curves))
    last_step = max(
        (piece.last[0] for facts in drawn for curve in facts.curves.values() for piece in curve.pieces.values()),
        default=1,
    )
    begun = {(attempt.step_start or 0, number) for number, run in enumerate(drawn) for attempt in run.attempts[1:]}
    restarts = sorted(begun)[-sections.MOST_ATTEMPTS :]
    figures, left_bytes = dict[str, str](), CHART_BYTES
    for tag in tags:
        figure = macro("figure", tag, [(facts.title, facts.curves.get(tag)) for facts in drawn], last_step, restarts)
        left_bytes -= len(figure.encode())
        if left_bytes < 0:
            break
        figures[tag] = figure
    text = (
        _templates()
        .get_template("page.html")
        .render(
            begin=Markup(BEGIN),
            runs=runs,
            drawn=drawn,
            unreadable=unreadable,
            figures=[figure for tag, figure in figures.items() if not is_aside(tag)],
            aside=[figure for tag, figure in figures.items() if is_aside(tag)],
            left_out=tags[len(figures) :],
            differing=differing(drawn),
            written=written,
            version=__version__,
        )
    )
    return f"{text}\n"


def macro(name: str, *values: Any) -> str:
    """Return the markup that a macro of macros.html makes of ``values``."""
    markup: str = getattr(_templates().get_template("macros.html").module, name)(*values)
    return markup


@cache
def _templates() -> Environment:
    folder = Path(__file__).parent / "templates"
    made = Environment(
        loader=FunctionLoader(lambda name: _LINE_END.sub("", (folder / name).read_text())),
        autoescape=True,
        finalize=_readable,
        undefined=StrictUndefined,
    )
    made.globals |= {"charts": curves, "sections": sections, "efficiency_of": efficiency}
    made.globals |= {"hostlist": hostlist, "in_units": in_units}
    return made


def _readable(value: object) -> object:
    """Return ``value`` as a text without hidden characters, which is then escaped. Markup is left as it is."""
    if hasattr(value, "__html__"):
        return value
    return _UNFIT.sub("\ufffd", visible(str(value))).encode(errors="replace").decode()
