"""write an HTML file about runs: curves, attempts, times, changes"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import DamagedFileError, RequestError
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit report gpt", "a file report-RUN.html about the newest run named gpt"),
    ("toolkit report gpt --compare 20260131-1200 --to gpt.html", "with the differences to another run"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", metavar="RUN")
    parser.add_argument("--to", metavar="FILE", help="default: report-RUN.html or -SWEEP.html in the current folder")
    parser.add_argument("--compare", metavar="RUN", help="show how the runs differ from this one")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a file")


def run(args: Namespace) -> None:
    import time

    from toolkit.base import fsio, terminal
    from toolkit.cli import selection
    from toolkit.files import rundir
    from toolkit.plugins.report import compare, facts, page

    runs, sweeps = selection.named(list(dict.fromkeys(args.run)))
    other = rundir.find(args.compare) if args.compare else None
    if args.json and args.to:
        raise RequestError("toolkit report: --json prints the facts and writes no file: leave out --to")
    # Refuse a bad target first: reading the runs may take long.
    target = None
    if not args.json:
        name = sweeps[0].name if sweeps else runs[0].id
        target = arguments.replaceable_path("--to", args.to or f"report-{name}.html", page.BEGIN)
    found, unreadable = [], []
    for each in runs:
        try:
            found.append(facts.facts_of(each))
        except DamagedFileError as error:
            unreadable.append(f"{each.name}/{each.id}: {error}")
    if unreadable and not found:
        raise RequestError("; ".join(unreadable))
    compared = facts.facts_of(other) if other else None
    if target is None:
        print(arguments.as_json(compare.as_data(found, compared, unreadable)))
        return
    fsio.write_atomic(target, page.saved_page(found, compared, unreadable, time.time()))
    print(terminal.user_path(target))
