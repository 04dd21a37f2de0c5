"""submit an ended run again, from its last checkpoint

It runs the sources that it was submitted with; with --code those that the
project has now. Changed keys hold from now on; a change with which a run cannot
continue is refused before anything is queued.
"""

import sys
from argparse import ArgumentParser, Namespace

from toolkit.base.errors import listing
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit resume gpt", "continue from the last checkpoint, as it was submitted"),
    ("toolkit resume gpt --code", "continue with the fixed code of the project"),
    ("toolkit resume gpt train.epochs=20 --follow", "with more epochs, and watch it"),
    ("toolkit resume train args.epochs=20", "with another value of the script's option --epochs"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--code", action="store_true", help="copy the project's current sources, and run those")
    arguments.add_trust(parser)
    arguments.add_wait(parser)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="such as train.epochs=90")


def run(args: Namespace) -> int:
    from toolkit.base.terminal import say
    from toolkit.cli import follow
    from toolkit.run.prepare import snapshot
    from toolkit.run.submission.resume_run import changed_rate, resume, saved_rates

    chosen = arguments.trusted_run(args)
    changed = [] if args.code else snapshot.changed_since(chosen)
    # Read before the run may save anew. The rate stays where the config does.
    step, saved = saved_rates(chosen) if args.overrides else (0, None)
    sent = resume(chosen, args.overrides, code=args.code)
    if changed:
        say(
            f"note: {listing(changed, 3)} in {snapshot.project_of(chosen.code)} differs from the run's copy, which is "
            f"used; to use the project's current code: `toolkit cancel {chosen.id}`, then "
            f"`toolkit resume {chosen.id} --code`",
            sys.stderr,
        )
    if args.overrides and (change := changed_rate(chosen, step, saved)) is not None:
        say(f"{'note' if change.is_asked else 'warning'}: {change.text}", sys.stderr)
    return follow.announce_and_wait(sent, args)
