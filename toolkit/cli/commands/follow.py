"""show a run's progress and output until it has ended

As with `submit --follow`, of a run that continues already. The exit code is the
run's. Ctrl-C leaves the run alone.
"""

from argparse import ArgumentParser, Namespace

EXAMPLES = (("toolkit follow gpt", "a bar of the newest run named gpt, and what its first rank prints"),)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")


def run(args: Namespace) -> int:
    from toolkit.cli import follow
    from toolkit.files import rundir
    from toolkit.run.submission.handle import attach

    return follow.to_the_end(attach(rundir.find(args.run)), bar=True, is_bound=False)
