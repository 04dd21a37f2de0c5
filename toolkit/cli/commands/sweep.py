"""submit runs of a config with other values, and look after them"""

from argparse import ArgumentParser, Namespace

from toolkit.base.errors import RequestError, did_you_mean
from toolkit.cli import arguments, tables

EXAMPLES = (
    ("toolkit sweep configs/digits_ddp.yaml optim.lr=1e-2,1e-1 train.seed=0..4", "ten runs, as one job array"),
    ("toolkit sweep gpt.yaml 'optim.lr=log(1e-4,1e-1)' --random 50 --dry-run", "list a sample"),
    ("toolkit sweep train.py args.lr=0.1,0.03 -- --epochs 90", "a script, with other values of its option --lr"),
    ("toolkit sweep status digits-ddp", "the state of each point, and why"),
    ("toolkit sweep retry digits-ddp", "resubmit the failed points"),
)

VERBS = ("status", "retry", "stop", "best", "export")


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "toolkit sweep CONFIG key=value,value 'key=range(64,512,64)' key=0..4 ...\n"
        "       toolkit sweep {status,retry,stop,best,export} NAME [--json]"
    )
    arguments.add_config(parser)
    parser.add_argument("--name", help="of the sweep; default: the config's. More values go to the sweep of this name")
    parser.add_argument("--random", type=int, metavar="N", help="N random points, also of log(1e-5,1e-1), linear(0,1)")
    optuna = "have N points, those that are new chosen by Optuna from the results so far; see --metric"
    parser.add_argument("--optuna", type=int, metavar="N", help=optuna)
    parser.add_argument("--seed", type=int, metavar="N", help="of --random and --optuna; default 0")
    parser.add_argument("--max-running", type=int, metavar="N", help="the most runs at a time")
    metric = "to compare runs by; a minus before it if less is better: -eval/loss"
    parser.add_argument("--metric", help=metric)
    arguments.add_after(parser)
    parser.add_argument("--executor", default="auto", help="auto (default), slurm, local")
    parser.add_argument("--dry-run", action="store_true", help="check and list the points, submit nothing")
    parser.add_argument("--all", action="store_true", help="status: all rows, however many")
    tables.add_wide(parser)
    arguments.add_json(parser)


def run(args: Namespace) -> int | None:
    from pathlib import Path

    from toolkit.plugins.sweep import verbs as sweeps

    if args.config in VERBS:
        return sweeps.look_after(args)
    close = did_you_mean(args.config, VERBS)
    if close and "." not in args.config and not Path(args.config).exists():
        raise RequestError(
            f"toolkit sweep: {args.config!r} is not a config file or a verb; {close}verbs: {', '.join(VERBS)}"
        )
    sweeps.submit(args)
    return None
