"""submit an ended run again, from its last checkpoint

It runs the sources that it was submitted with. Changed keys hold from now on; a
change with which a run cannot go on is refused before anything is queued.
"""

from argparse import ArgumentParser, Namespace

from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit resume gpt", "go on from the last checkpoint, as it was submitted"),
    ("toolkit resume gpt train.epochs=20 --follow", "with more epochs, and watch it"),
    ("toolkit resume train args.epochs=20", "with another value of the script's option --epochs"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    arguments.add_trust(parser)
    arguments.add_wait(parser)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as train.epochs=90")


def run(args: Namespace) -> int:
    from toolkit.cli import follow
    from toolkit.launch.submission.resume import resume

    return follow.see_through(resume(arguments.trusted_run(args), args.overrides), args)
