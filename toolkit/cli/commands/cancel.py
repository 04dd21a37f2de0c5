"""end a run at once

Its checkpoints stay; what was trained since the last one may be lost.
`toolkit stop` saves first. `toolkit resume` continues the run.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli.commands.stop import ask_to_end

EXAMPLES = (
    ("toolkit cancel digits-ddp", "end the newest run of this name; its checkpoints stay"),
    ("toolkit cancel 20260131-1200", "end the run whose id begins so"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument(
        "--gone",
        action="store_true",
        help="you know that the run's machine, container or cluster is gone; this ends the run from here",
    )


def run(args: Namespace) -> None:
    ask_to_end(args.run, "cancel", "cancelled", **({"is_gone": True} if args.gone else {}))
