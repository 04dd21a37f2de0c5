"""run any torchrun-style script as the ranks: exec ... -- CMD ..."""

import os
import shlex
from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError
from toolkit.cli import arguments

EXAMPLES = (
    (
        "toolkit exec cluster.nodes=2 --follow -- python train.py --epochs 3",
        "submit a torchrun-style script and watch it",
    ),
    (
        "toolkit exec --restart-args '--resume {newest:ckpt/*.pt}' -- python train.py",
        "a script that must be told where to continue",
    ),
    ("toolkit exec --name try --executor local -- python train.py", "on this machine, with a name"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "toolkit exec [--name NAME] [--executor E] [--restart-args WORDS]\n"
        "                    [--after RUN] [--dry-run] [--wait] [--follow] [--json]\n"
        "                    [key=value ...] -- CMD"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as cluster.nodes=2")
    parser.add_argument("--name", help="of the run; default: the script's")
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local; inside a job: right here")
    again = "words for the restarted script, such as '--resume {newest:ckpt/*.pt}': none until a file matches"
    parser.add_argument("--restart-args", metavar="WORDS", help=again)
    arguments.add_after(parser)
    arguments.add_dry_run(parser)
    arguments.add_wait(parser)


def run(args: Namespace) -> int | None:
    from toolkit.cli import follow
    from toolkit.run.submission import inside_allocation, submit

    if not args.words:
        raise RequestError(
            "toolkit exec: the command is missing; give it after `--`: toolkit exec cluster.nodes=2 -- python train.py"
        )
    if args.restart_args:
        from toolkit import config as configs

        try:
            words = shlex.split(args.restart_args)
        except ValueError as error:  # an open quote
            raise RequestError(f"--restart-args: {args.restart_args}: {error}") from None
        args.overrides += [configs.argv_override(words, "restart_args")]
    if args.dry_run:
        chosen = {"name": args.name, "executor": args.executor, "after": args.after}
        print(submit.dry_run_command(args.words, args.overrides, **chosen))
        return None
    if args.executor != "slurm":
        inside_allocation.refuse_one_of_many_tasks()
    # Inside a job the script runs right here, in the job's allocation.
    if args.executor == "auto" and "SLURM_JOB_ID" in os.environ:
        if args.after:
            raise RequestError("--after: inside a job the script starts right here; submit it with --executor slurm")
        submit.supervise_command(args.words, args.overrides, name=args.name)
        return None
    sent = submit.submit_command(args.words, args.overrides, name=args.name, executor=args.executor, after=args.after)
    return follow.announce_and_wait(sent, args)
