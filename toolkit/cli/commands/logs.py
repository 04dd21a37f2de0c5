"""the log of a rank, or of the supervisor"""

import sys
import time
from argparse import ArgumentParser, Namespace

from toolkit.errors import RequestError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", type=int, help="default: the supervisor's log")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--follow", action="store_true", help="print what is added until the run has ended")


def run(args: Namespace) -> None:
    """Print a log to stdout. Raises RequestError that says which logs there are."""
    from toolkit import rundir

    if args.attempt is not None and args.rank is None:
        raise RequestError("logs: --attempt goes with --rank; the supervisor has one log for all attempts")
    if args.attempt is not None and args.attempt < 1:
        raise RequestError(f"logs: --attempt {args.attempt}: attempts are counted from 1")
    of = rundir.find(args.run)
    path = of.logs / "supervisor.log"
    if args.rank is not None:
        path = of.rank_log(args.attempt or max(of.attempts_with_logs(), default=1), args.rank)
    if not path.exists():
        there = sorted(str(p.relative_to(of.logs)) for p in of.logs.rglob("*.log"))
        raise RequestError(f"{path}: no such log; there are: {', '.join(there) or 'none yet'}")
    with path.open(errors="replace") as file:
        while True:
            # Look for the end before the read: nothing written since is missed.
            ended = not args.follow or of.result() is not None
            text = file.read()
            sys.stdout.write(text)
            sys.stdout.flush()
            if not text and ended:
                return
            if not text:
                time.sleep(0.3)
