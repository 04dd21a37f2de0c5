"""one page: cause, first failing rank, its traceback, what to do next"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit why gpt", "why the newest run named gpt failed, and what to do"),
    ("toolkit why gpt --json", "the same as JSON"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit import rundir
    from toolkit.cli import show, why

    facts = why.facts(rundir.find(args.run))
    print(show.as_json(why.as_data(facts)) if args.json else why.page(facts))
