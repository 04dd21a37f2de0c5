"""show why a run ended, and what to do, in about ten lines

From the run's own files: the first rank that failed, the line of your code,
the cause, the last checkpoint, and what to do next.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit why gpt", "why the newest run named gpt failed, and what to do"),
    ("toolkit why gpt --json", "the same as JSON"),
)


def add_arguments(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("run", metavar="RUN", nargs="?")
    what.add_argument("--log", metavar="FILE", help="instead of a run: the log of any job, or - for the standard input")
    parser.add_argument(
        "--all", action="store_true", help="also the traceback, all attempts, the times, and what the jobs used"
    )
    arguments.add_json(parser)


def run(args: Namespace) -> None:
    from toolkit.base import terminal
    from toolkit.cli import run_facts
    from toolkit.files import rundir
    from toolkit.plugins.report.why import page

    if args.log is not None:
        told = page.of_log(args.log)
        print(arguments.as_json(told)) if args.json else terminal.say(page.log_page(told))
        return
    facts = run_facts.facts(rundir.find(args.run))
    if args.json:
        print(arguments.as_json(run_facts.as_data(facts)))
    else:
        terminal.say(page.format_text(facts, whole=args.all))
