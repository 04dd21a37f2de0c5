"""train twice, once with kills in it, and compare every step

The second run is killed up to three times, each time soon after a checkpoint,
and continues by itself: within the first epoch, within a later one, and at an
epoch's end. The exit code is 0 if all is identical, 1 if not, and 3 if the
check proves nothing.
"""

import signal
from argparse import ArgumentParser, Namespace

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit resume-check configs/digits_ddp.yaml", "kill a training at random steps and compare all steps"),
    ("toolkit resume-check configs/digits_ddp.yaml --then-ranks 1", "kill it, and continue with one rank"),
    ("toolkit resume-check train.py -- --epochs 2", "of a script with toolkit.start(), with arguments of its own"),
)

#: No difference was found, and none could have been.
EXIT_PROVES_NOTHING = 3


def add_arguments(parser: ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--steps", type=int, default=60, help="of each of the two runs; default 60")
    parser.add_argument("--at", type=int, metavar="STEP", help="kill once, in this step; default: some random ones")
    parser.add_argument(
        "--how", default="kill", help="kill (default), stop (a signal after which it commits), preempt (by Slurm)"
    )
    parser.add_argument("--then-ranks", type=int, metavar="N", help="continue with another number of ranks")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="for the loss, with --then-ranks; default 1e-3")
    parser.add_argument("--seed", type=int, help="repeats a check; default: a random one, which is printed")
    parser.add_argument("--keep", action="store_true", help="keep the two runs; default: only if they differ")
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local")
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit.base import logs
    from toolkit.plugins.site import resume_check, resume_compare

    logs.setup()
    for number in (signal.SIGTERM, signal.SIGHUP):  # of `timeout`, a closed terminal: as Ctrl-C, leave no run behind
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    plan = resume_compare.InterruptionPlan(args.steps, args.how, args.at, args.seed, args.then_ranks, args.tolerance)
    report = resume_check.check(args.config, args.overrides, plan, args.executor)
    kept = report.runs if args.keep or report.verdict == resume_compare.DIFFERENT else ()
    for path in report.runs if not kept else ():
        resume_check.remove(path)
    print(arguments.as_json(resume_compare.as_dict(report)) if args.json else resume_compare.format_text(report, kept))
    codes = {resume_compare.IDENTICAL: EXIT_DONE, resume_compare.DIFFERENT: EXIT_FAILED}
    return codes.get(report.verdict, EXIT_PROVES_NOTHING)
