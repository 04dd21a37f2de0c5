"""show what the ranks print, the supervisor's log, or all by time

Without options it is what rank 0 prints. The supervisor's log has the starts,
failures and verdicts; it is shown where rank 0 has no log. The newest attempt
counts if no other is named.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from typing import TYPE_CHECKING

from toolkit.base import terminal
from toolkit.base.errors import RequestError
from toolkit.base.terminal import say
from toolkit.files.run_files import RunState

if TYPE_CHECKING:
    from toolkit.cli.follow import GrowingLog
    from toolkit.files.rundir import RunDir

EXAMPLES = (
    ("toolkit logs gpt --tail 50", "the last lines that rank 0 of the newest run named gpt has printed"),
    ("toolkit logs gpt --rank 3 --follow", "what rank 3 prints, until the run has ended"),
    ("toolkit logs gpt --merged --attempt 2", "all ranks and the supervisor by time, each line with its writer"),
    ("toolkit logs gpt --errors", "what the failed ranks printed, the first to fail first"),
)


#: The end of a log is looked at so often.
EVERY_S = 0.3
#: Whether the run is lost is looked up each time after so many looks without a new byte.
LOOK_EVERY = 100


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", type=int, help="default: 0")
    parser.add_argument("--supervisor", action="store_true", help="its log: starts, failures, verdicts")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    parser.add_argument("--merged", action="store_true", help="all ranks and the supervisor, by time")
    parser.add_argument("--errors", action="store_true", help="what the failed ranks printed, the first to fail first")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines")
    parser.add_argument("--follow", action="store_true", help="print what is added until the run has ended")


def run(args: Namespace) -> None:
    """Print a log to stdout. Raises RequestError that says which logs there are."""
    from toolkit.cli.follow import BAR_S, GrowingLog
    from toolkit.files import rundir

    of_all = args.merged or args.errors
    if args.supervisor and (of_all or args.rank is not None or args.attempt is not None):
        raise RequestError("logs: --supervisor is one log for all attempts, and goes only with --follow")
    if of_all and (args.rank is not None or args.follow or (args.merged and args.errors)):
        raise RequestError("logs: --merged and --errors are about all ranks, and go only with --attempt")
    if args.tail is not None and args.tail < 0:
        raise RequestError(f"logs: --tail {args.tail}: give a number of lines")
    if args.attempt is not None and args.attempt < 1:
        raise RequestError(f"logs: --attempt {args.attempt}: attempts are counted from 1")
    of = rundir.find(args.run)
    if of_all:
        from toolkit.cli import follow as merged_logs

        attempt = args.attempt or max(of.attempts_with_logs(), default=1)
        lines = (merged_logs.merged if args.merged else merged_logs.errors)(of, attempt)
        sys.stdout.writelines(lines if args.tail is None else deque(lines, maxlen=args.tail))
        return
    log = GrowingLog(of, None if args.supervisor else args.rank or 0, args.attempt)
    log.skip(args.tail)
    idle_reads, bar = 0, terminal.OneLine(BAR_S)
    while True:
        # Look for the end before the read: nothing written since is missed.
        ended = not args.follow or of.result() is not None or _is_lost(of, idle_reads)
        if not log.path.exists():
            if ended:
                log = _other_log(of, log, args)
            elif not idle_reads:
                say(f"run {of.id} is {of.status().state or RunState.QUEUED}: waiting for {log.path.name}", sys.stderr)
        at, text = log.position, log.read()
        is_idle = log.position == at and not text
        idle_reads = idle_reads + 1 if is_idle else 0
        bar.print_above(text)
        if ended and is_idle:
            bar.print_above(log.unterminated_line())
            return
        if args.follow and not text:
            bar.draw(log.drawn)
            time.sleep(EVERY_S)


def _other_log(of: RunDir, log: GrowingLog, args: Namespace) -> GrowingLog:
    """Return the supervisor's log where no rank's was asked for. Raises RequestError where there is no log."""
    from toolkit.cli.follow import GrowingLog

    if args.rank is None and args.attempt is None:
        log = GrowingLog(of, None)
        log.skip(args.tail)
    if not log.path.exists():
        there = sorted(str(p.relative_to(of.logs)) for p in of.logs.rglob("*.log"))
        raise RequestError(f"{log.path}: no such log; there are: {', '.join(there) or 'none yet'}")
    return log


def _is_lost(run: RunDir, idle_reads: int) -> bool:
    """True if no process is left that could write more. Looked up each half minute in which nothing was written."""
    from toolkit.run.submission import handle
    from toolkit.slurm import shared_queue

    if idle_reads % LOOK_EVERY != LOOK_EVERY - 1:
        return False
    try:
        return handle.attach(run).is_over(shared_queue.of_user().show_jobs)
    except RequestError:  # nothing is known of its processes
        return False
