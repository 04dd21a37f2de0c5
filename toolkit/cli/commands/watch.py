"""show a live table of runs, from their files each second

The files of the runs are read each second. Slurm is asked about those that
wait, at most 120 times an hour. q or Ctrl-C ends it, and the runs continue.
Without a terminal the table is printed once for each change, until all runs
are over.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import selection

EXAMPLES = (
    ("toolkit watch", "all runs in progress, and those that ended in the last hour"),
    (
        "toolkit watch --name 'gpt*' --columns run,state,step,loss,eval/accuracy",
        "runs by name, with chosen columns",
    ),
    ("toolkit watch gpt", "one run"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="default: what is active, or has ended in the last hour")
    selection.add_arguments(parser)
    parser.add_argument("--columns", metavar="NAMES", help="separated by commas, as for status, without config keys")


def run(args: Namespace) -> None:
    from toolkit.cli import watch_view as watch

    watch.run(args)
