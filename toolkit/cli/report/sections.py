"""The sections of a report about one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from toolkit import hostlist
from toolkit.cli.report.charts import bar, chart, short
from toolkit.cli.report.curves import is_aside
from toolkit.cli.report.facts import ReportFacts
from toolkit.cli.report.html import Html, element, join, table
from toolkit.durations import in_units
from toolkit.metrics import efficiency, goodput, start_up
from toolkit.run_files import AttemptRecord

#: A longer list would not be read, and would not fit into the file.
MOST_ATTEMPTS, MOST_NODES, MOST_COLUMNS = 60, 64, 30
#: The bytes of all charts together; a page is at most 1 MB.
CHART_BYTES = 600_000


def moment(seconds: float) -> str:
    """Return a time in UTC: a report is read elsewhere than where it was written."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def number(value: Any) -> str:
    """Return a metric's value. A NaN is null in the files."""
    return "not a number" if value is None else str(value) if isinstance(value, int) else short(value)


# -------------------------------------------------------------------------------------------------------------- curves


def charts(runs: Sequence[ReportFacts]) -> Html:
    """Return a chart of each metric with all runs in it. Metrics that do not fit into the page are named."""
    # In the order of the first run's curves, then what only others have.
    tags = list(dict.fromkeys(tag for facts in runs for tag in facts.curves))
    if not tags:
        return element("p", "No metrics were logged.", class_="soft")
    last_step = max(
        (piece.last[0] for facts in runs for curve in facts.curves.values() for piece in curve.pieces.values()),
        default=1,
    )
    restarts = [attempt.step_start or 0 for attempt in runs[0].attempts[1:]] if len(runs) == 1 else []
    figures, left_bytes = dict[str, Html](), CHART_BYTES
    for tag in tags:
        curves = [(facts.title, facts.curves.get(tag)) for facts in runs]
        picture = chart(tag, curves, last_step, sorted({*restarts})[-MOST_ATTEMPTS:])
        captions = [element("b", tag)]
        for place, (_, curve) in enumerate(curves):
            if curve is not None:
                colour = f"s{place % 8}" if len(curves) > 1 else None
                captions.append(element("div", _extremes(curve.summary()), class_=colour))
        figure = element("figure", picture, element("figcaption", *captions))
        left_bytes -= len(figure.encode())
        if left_bytes < 0:
            break
        figures[tag] = figure
    # Figures of the run itself are folded: the sections below say the same in words.
    aside = [figure for tag, figure in figures.items() if is_aside(tag)]
    parts = [element("div", *(figure for tag, figure in figures.items() if not is_aside(tag)), class_="charts")]
    if restarts:
        parts.append(element("p", "A dotted upright line: an attempt began with this step.", class_="soft"))
    if aside:
        summary = element("summary", f"{len(aside)} charts about the ranks' speed and the run's time")
        parts.append(element("details", summary, element("div", *aside, class_="charts")))
    if more := tags[len(figures) :]:
        names = ", ".join(more[:40]) + (" ..." if len(more) > 40 else "")
        parts.append(element("p", f"{len(more)} more metrics are in the run's files: {names[:4000]}", class_="soft"))
    return join([legend(runs) if len(runs) > 1 else "", *parts])


def legend(runs: Sequence[ReportFacts]) -> Html:
    """Return which line is which run."""
    items = []
    for place, facts in enumerate(runs):
        line = element("path", d="M0 60H350", class_=f"line s{place % 8}")
        items.append(
            element("li", element("svg", line, class_="key", viewBox="0 0 35 11", aria_hidden="true"), facts.title)
        )
    return element("ul", *items, class_="legend")


def _extremes(summary: Mapping[str, Any]) -> str:
    words = [f"{summary['count']} points"]
    if "last" in summary:
        words.append(f"last {short(summary['last'][1])}")
        words += [
            f"{name} {short(summary[key][1])} at step {summary[key][0]}"
            for name, key in (("min", "least"), ("max", "greatest"))
        ]
    if summary["not_finite"]:
        words.append(f"{summary['not_finite']} not finite")
    return ", ".join(words)


# ------------------------------------------------------------------------------------------------------------ timeline

PART_WORDS = {"training": "training", **goodput.WORDS}


def time_spent(ledger: Mapping[str, float] | None) -> Html:
    """Return where the run's time went, as a bar and a table."""
    known = {part: (ledger or {}).get(part, 0.0) for part in goodput.PARTS}
    wall_s = sum(known.values())
    if not wall_s:
        return element("p", "Where the time went was not measured.", class_="soft")
    rows = [(PART_WORDS[part], in_units(spent), f"{spent / wall_s:.1%}") for part, spent in known.items() if spent]
    words = goodput.sentence(ledger) or f"{in_units(wall_s)} in all"
    parts = []
    for part in goodput.PARTS:
        square = element("rect", width="100%", height="100%", class_=part)
        parts.append(element("li", element("svg", square, class_="key", aria_hidden="true"), PART_WORDS[part]))
    return join(
        [
            element("p", words),
            bar(_stacked(known, 0.0, wall_s), words),
            element("ul", *parts, class_="legend"),
            table("Where the time went", ("part", "time", "share"), rows),
        ]
    )


def time_to_start(by_attempt: Mapping[int, Mapping[str, float]]) -> Html:
    """Return where the starts of the attempts went, a column for each."""
    rows: list[tuple[str, ...]] = []
    for part in start_up.PARTS:
        seconds = [parts.get(part, 0.0) for parts in by_attempt.values()]
        if any(seconds):
            rows.append((start_up.WORDS[part], *(f"{each:.2f} s" for each in seconds)))
    if not rows:
        return join([])
    wholes = [sum(parts.get(part, 0.0) for part in start_up.PARTS) for parts in by_attempt.values()]
    rows.append(("to the end of the first step", *(f"{each:.2f} s" for each in wholes)))
    head = ("part", *(f"attempt {number}" for number in by_attempt))
    return table("Where the start went", head, rows)


def _stacked(ledger: Mapping[str, float], start: float, span: float) -> list[tuple[str, float, float]]:
    """Return the parts of a bar, one after another from ``start`` on. All values are divided by ``span``."""
    parts = []
    for part in goodput.PARTS:
        end = start + ledger.get(part, 0.0)
        parts.append((part, start / span, end / span))
        start = end
    return parts


def timeline(facts: ReportFacts) -> Html:
    """Return the attempts as bars on one axis of time, and as a table. The table has their causes."""
    attempts = facts.attempts[-MOST_ATTEMPTS:]
    if not attempts:
        return element("p", "No attempt has begun.", class_="soft")
    # The measured parts fill the time up to the end of the attempt, its time in the queue included.
    begins = [attempt.ended - sum(attempt.goodput.get(part, 0.0) for part in goodput.PARTS) for attempt in attempts]
    begins = [min(begin, attempt.started) for begin, attempt in zip(begins, attempts, strict=True)]
    first, last = min(begins), max(attempt.ended for attempt in attempts)
    span = max(last - first, 1e-3)
    rows: list[Html] = []
    for attempt, begin in zip(attempts, begins, strict=True):
        # An attempt without measured parts is drawn as idle.
        ledger = attempt.goodput or {"idle": attempt.ended - attempt.started}
        words = f"{attempt.attempt}: {attempt.cause}" + f", {attempt.decision}" * bool(attempt.decision)
        label = f"attempt {words}, {in_units(attempt.ended - attempt.started)} from {moment(attempt.started)} UTC on"
        rows += [element("div", words), bar(_stacked(ledger, begin - first, span), label)]
    ends = element("div", element("span", moment(first)), element("span", f"{moment(last)} UTC"), class_="ends soft")
    hidden = len(facts.attempts) - len(attempts)
    note = f"The last {MOST_ATTEMPTS} of {len(facts.attempts)} attempts. " if hidden else ""
    note += "A bar begins with the queue or the end of the attempt before it; its other parts are sums, not in order."
    chart_of_all = element("div", *rows, element("div"), ends, class_="attempts")
    head = ("attempt", "job", "nodes", "ranks", "steps", "lasted", "cause", "then", "what happened")
    cells: list[list[object]] = []
    for attempt in attempts:
        steps = "" if attempt.step_end is None else f"{attempt.step_start or 0} to {attempt.step_end}"
        hosts = hostlist.compress(attempt.nodes)
        nodes = hosts if len(hosts) < 24 else element("td", hosts[:2000], class_="long")
        where = (attempt.attempt, attempt.job_id or "local", nodes, attempt.world_size or "")
        what = element("td", (attempt.line or "")[:500], class_="long")
        lasted = in_units(attempt.ended - attempt.started)
        cells.append([*where, steps, lasted, attempt.cause, attempt.decision, what])
    lines = table("Attempts", head, cells)
    return join([chart_of_all, element("p", note, class_="soft"), lines])


# ---------------------------------------------------------------------------------------------------------- efficiency


def usage(facts: ReportFacts) -> Html:
    """Return what was asked, used and held idle, and what it cost. Advice for the next request follows."""
    found = facts.told["efficiency"]
    if found is None:
        return element("p", "What the run used was not measured.", class_="soft")
    rows = efficiency.rows(found.usage)
    more = efficiency.lines(found)[1 + len(rows) :]
    return join(
        [table("Asked and used", ("", "asked", "used", "held idle"), rows), *(element("p", line) for line in more)]
    )


# ------------------------------------------------------------------------------------------------------------ node map

_MARKS = {"L": "lost", "F": "first to fail", "S": "slow", "G": "given up for a spare"}


def node_map(facts: ReportFacts) -> Html:
    """Return which nodes each attempt had and what went wrong there. Nodes with a remark come first."""
    attempts = facts.attempts[-MOST_COLUMNS:]
    marks = [_marks(attempt) for attempt in attempts]
    remarks: dict[str, list[str]] = {}
    for words, nodes in (("not used any more", facts.told["bad_nodes"]), ("", facts.told["ailing_nodes"])):
        for host, why in nodes.items():
            remarks.setdefault(host, []).append(f"{words}: {why}".removeprefix(": "))
    nodes = dict.fromkeys(host for attempt in attempts for host in attempt.nodes)
    # Nodes with trouble come first, because a long list is shown in part.
    first = dict.fromkeys([*remarks, *(host for of_attempt in marks for host in of_attempt)])
    shown = list(dict.fromkeys([*first, *nodes]))[:MOST_NODES]
    if not shown:
        return element("p", "No nodes are known.", class_="soft")

    # By their numbers: node9 comes before node10.
    def place(host: str) -> tuple[bool, str, int]:
        head = host.rstrip("0123456789")
        return host not in first, head, int(host[len(head) :] or 0)

    shown.sort(key=place)
    used = [{*attempt.nodes} for attempt in attempts]
    rows = []
    for host in shown:
        cells: list[object] = [host]
        for hosts, found in zip(used, marks, strict=True):
            if host in found:
                title = ", ".join(_MARKS[mark] for mark in found[host])
                cells.append(element("td", found[host], class_="hurt", title=title))
            else:
                cells.append(element("td", "●" if host in hosts else "", class_="used"))
        rows.append([*cells, element("td", "; ".join(remarks.get(host, [])), class_="long")])
    if len(nodes) > len(shown):
        rest = {*nodes} - {*shown}
        counts = [element("td", len(hosts & rest), class_="used") for hosts in used]
        rows.append([f"{len(rest)} more nodes", *counts, "nothing wrong with them"])
    caption = f"Nodes by attempt. ● used, {', '.join(f'{mark} {words}' for mark, words in _MARKS.items())}"
    return table(caption, ["node", *(attempt.attempt for attempt in attempts), "remark"], rows)


def _marks(attempt: AttemptRecord) -> dict[str, str]:
    """Return the letters of the nodes with which something was wrong."""
    found: dict[str, str] = {}
    failed = [attempt.first_failure.host] if attempt.first_failure is not None and attempt.first_failure.host else []
    slow = [straggler.host for straggler in attempt.slow_nodes]
    for mark, hosts in (("L", attempt.lost_nodes), ("F", failed), ("S", slow), ("G", attempt.vacated_nodes)):
        for host in hosts:
            found[host] = found.get(host, "") + mark
    return found
