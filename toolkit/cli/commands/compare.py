"""show how two runs differ: config, versions, code, curves

Shown are keys of the config, versions, results and sources that are not the
same, and of each curve both values at the last step that both runs have.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit compare gpt-small gpt-large", "the newest runs of two configs"),
    ("toolkit compare 20260131-1200 20260131-1800 --json", "two runs by the beginnings of their ids, as JSON"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("other", metavar="RUN")
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit.files import rundir
    from toolkit.plugins.report import compare

    found = compare.facts(rundir.find(args.run), rundir.find(args.other))
    print(arguments.as_json(found) if args.json else compare.format_text(found, tables.width(args)))
