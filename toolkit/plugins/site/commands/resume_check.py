"""train twice, once with a kill in it, and compare every step"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import EXIT_DONE, EXIT_FAILED
from toolkit.cli import arguments

EXAMPLES = (
    ("toolkit resume-check configs/digits_ddp.yaml", "kill a training at a random step and compare all steps"),
    ("toolkit resume-check configs/digits_ddp.yaml --then-ranks 1", "kill it, and go on with one rank"),
    ("toolkit resume-check train.py -- --epochs 2", "of a script with toolkit.start(), with arguments of its own"),
)


def add_arguments(parser: ArgumentParser) -> None:
    arguments.add_config(parser)
    parser.add_argument("--steps", type=int, default=60, help="of each of the two runs; default 60")
    parser.add_argument("--at", type=int, metavar="STEP", help="where the blow falls; default: a random one")
    parser.add_argument("--how", default="kill", help="kill (default) or stop: a signal after which the run commits")
    parser.add_argument("--then-ranks", type=int, metavar="N", help="go on with another number of ranks")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="for the loss, with --then-ranks; default 1e-3")
    parser.add_argument("--seed", type=int, help="repeats a check; default: a random one, which is printed")
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local")
    arguments.add_json(parser)


def run(args: Namespace) -> int:
    from toolkit.base import logs
    from toolkit.cli import show
    from toolkit.plugins.site import resume_check, resume_report

    logs.setup()
    plan = resume_report.CheckPlan(args.steps, args.how, args.at, args.seed, args.then_ranks, args.tolerance)
    report = resume_check.check(args.config, args.overrides, plan, args.executor)
    print(show.as_json(resume_report.as_dict(report)) if args.json else resume_report.page(report))
    return EXIT_DONE if report.is_identical else EXIT_FAILED
