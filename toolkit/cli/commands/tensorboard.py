"""open TensorBoard on runs"""

import os
import sys
from argparse import ArgumentParser, Namespace

from toolkit.errors import RequestError

#: TensorBoard reads a thousand runs for 17 s and keeps a core busy after that; 1,600 do not fit into an argument.
MOST_RUNS = 100

EXAMPLES = (
    ("toolkit tensorboard", "the newest runs"),
    ("toolkit tensorboard gpt digits-ddp --port 6007", "two runs, at another port"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", nargs="*", metavar="RUN", help="default: all runs")
    parser.add_argument("--port", type=int, default=6006)


def run(args: Namespace) -> None:
    """Replace this process by TensorBoard, so that Ctrl-C reaches it directly."""
    from toolkit import rundir

    runs = [rundir.find(name) for name in args.run] if args.run else rundir.all_runs()
    if not runs:
        raise RequestError(f"there are no runs under {rundir.runs_root()}")
    if not args.run and len(runs) > MOST_RUNS:
        print(f"the newest {MOST_RUNS} of {len(runs)} runs; name others to see them", file=sys.stderr)
        runs = runs[-MOST_RUNS:]
    os.chdir(runs[0].path.parent.parent)  # for short, relative paths: a comma in an absolute one would end it
    folders = ",".join(f"{run.name}/{run.id}:{os.path.relpath(run.tensorboard)}" for run in runs)
    argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir_spec", folders, "--port", str(args.port)]
    os.execv(argv[0], argv)
