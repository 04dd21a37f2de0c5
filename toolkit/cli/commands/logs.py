"""the log of a rank, of the supervisor, or of all by time

Without options it is the supervisor's log: starts, failures, verdicts. The
newest attempt counts if no other is named.
"""

from __future__ import annotations

import codecs
import io
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from toolkit.errors import RequestError

if TYPE_CHECKING:
    from toolkit.rundir import RunDir

EXAMPLES = (
    ("toolkit logs gpt", "the supervisor's log of the newest run named gpt"),
    ("toolkit logs gpt --rank 3 --follow", "what rank 3 prints, until the run has ended"),
    ("toolkit logs gpt --merged --attempt 2", "all ranks and the supervisor by time, each line with its writer"),
    ("toolkit logs gpt --errors", "what the failed ranks said, the first failing rank first"),
)


#: A log is read in such pieces, so that one of many GiB needs no memory, and at its end looked at so often.
READ_BYTES, EVERY_S = 1 << 20, 0.3
#: Whether the run is lost is looked up each time after so many looks without a new byte.
LOOK_EVERY = 100


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", type=int, help="default: the supervisor's log")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--merged", action="store_true", help="all ranks and the supervisor, by time")
    parser.add_argument("--errors", action="store_true", help="what the failed ranks said, the first failure first")
    parser.add_argument("--follow", action="store_true", help="print what is added until the run has ended")


def run(args: Namespace) -> None:
    """Print a log to stdout. Raises RequestError that says which logs there are."""
    from toolkit import rundir

    of_all = args.merged or args.errors
    if of_all and (args.rank is not None or args.follow or (args.merged and args.errors)):
        raise RequestError("logs: --merged and --errors are about all ranks, and go only with --attempt")
    if args.attempt is not None and args.rank is None and not of_all:
        raise RequestError(
            "logs: --attempt goes with --rank, --merged or --errors; the supervisor has one log for all attempts"
        )
    if args.attempt is not None and args.attempt < 1:
        raise RequestError(f"logs: --attempt {args.attempt}: attempts are counted from 1")
    of = rundir.find(args.run)
    attempt = args.attempt or max(of.attempts_with_logs(), default=1)
    if of_all:
        from toolkit.cli import merged_logs

        sys.stdout.writelines((merged_logs.merged if args.merged else merged_logs.errors)(of, attempt))
        return
    path = of.logs / "supervisor.log" if args.rank is None else of.rank_log(attempt, args.rank)
    if not path.exists():
        there = sorted(str(p.relative_to(of.logs)) for p in of.logs.rglob("*.log"))
        raise RequestError(f"{path}: no such log; there are: {', '.join(there) or 'none yet'}")
    # While a log grows, the last character may be half written: the decoder keeps its bytes for the next read.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    idle_reads = 0
    with path.open("rb") as file:
        while True:
            # Look for the end before the read: nothing written since is missed.
            ended = not args.follow or of.result() is not None or _is_lost(of, idle_reads)
            data = file.read(READ_BYTES)
            idle_reads = 0 if data else idle_reads + 1
            is_last = ended and not data
            sys.stdout.write(decoder.decode(data, final=is_last))
            sys.stdout.flush()
            if is_last:
                return
            if not data:
                time.sleep(EVERY_S)


def _is_lost(run: RunDir, idle_reads: int) -> bool:
    """True if no process is left that could write more. Looked up each half minute in which nothing was written."""
    from toolkit.launch.submission import handle
    from toolkit.slurm import shared_queue

    if idle_reads % LOOK_EVERY != LOOK_EVERY - 1:
        return False
    try:
        return handle.attach(run).is_over(shared_queue.of_user().show_jobs)
    except RequestError:  # nothing is known of its processes
        return False
