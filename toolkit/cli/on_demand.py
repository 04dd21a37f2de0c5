"""Sends a request, `toolkit stacks` or `profile`, to a run's ranks and shows the answer."""

from __future__ import annotations

import re
import sys
import time
from itertools import takewhile

from toolkit.base import hostlist
from toolkit.base.errors import RequestError
from toolkit.base.terminal import say
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, UserRequest

#: After this time without an answer a line says how the run stands.
PATIENCE_S = 10.0


def carry_out(run: RunDir, request: UserRequest, wait_s: float, rank: int | None = None) -> Answer:
    """Leave a request, about ``rank`` or all, for the run's supervisor and return its answer.

    Raises RequestError for a run without ranks or this rank, for a request that is refused, and where there was no
    answer. The request is then withdrawn: it is not carried out later.
    """
    from toolkit.run.submission.handle import attach  # commands that only print their help do without

    if not 0 < wait_s <= user_requests.LONGEST_WAIT_S:
        raise RequestError(
            f"--wait: {wait_s:g} is out of range; must be between 0 and {user_requests.LONGEST_WAIT_S:.0f} seconds"
        )
    _refuse_unless_running(run)
    world_size = run.status().world_size
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise RequestError(f"run {run.id} has no rank {rank}: its ranks are 0 to {world_size - 1}")
    handle = attach(run)
    request_id = user_requests.put(run, request)
    try:
        handle.wake_supervisor()
        began, has_said = time.monotonic(), False
        for status in handle.statuses():
            answer, waited_s = user_requests.answer_to(run, request_id), time.monotonic() - began
            if answer is not None or waited_s > wait_s:
                break
            if waited_s > PATIENCE_S and not has_said:
                has_said = True
                where = f"{status.state}, step {status.progress.step or 0}, {status.progress.phase or 'no step yet'}"
                say(f"waiting for run {run.id}: {where} (Ctrl-C withdraws the request)", sys.stderr)
        # The loop also ends with the run, perhaps after a last answer.
        answer = user_requests.answer_to(run, request_id)
    finally:
        user_requests.remove(run, request_id)
    if answer is None:
        # If the run has ended meanwhile, say so: no wait would have helped.
        _refuse_unless_running(run)
        raise RequestError(
            f"run {run.id}: no answer within {wait_s:.0f} s, the request is withdrawn; "
            f"`toolkit status {run.id}` shows its state, "
            f"`toolkit logs {run.id} --supervisor` what its supervisor does"
        )
    if answer.refused is not None:
        raise RequestError(answer.refused)
    return answer


def _refuse_unless_running(run: RunDir) -> None:
    """Raise RequestError for a run that has ended, or whose ranks do not run yet."""
    result, state = run.result(), run.status().state
    if result is not None:
        raise RequestError(f"run {run.id} has ended ({result.state}): it has no ranks that could answer")
    if state is None or state.is_waiting:
        raise RequestError(f"run {run.id} is {state or 'not started'}: it has no ranks yet; try again when it runs")


_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')


def stacks_page(run: RunDir, answer: Answer) -> str:
    """Return the groups of ranks, the largest first, each with its stack."""
    step = "" if answer.step is None else f", step {answer.step}"
    pieces = [f"{run.name}/{run.id}, attempt {answer.attempt}{step}"]
    for group in sorted(answer.groups, key=lambda group: (-len(group.ranks), group.ranks)):
        count = len(group.ranks)
        ranks = hostlist.compress(map(str, group.ranks)).strip("[]")
        still = f", for {group.still_s:.0f} s" if group.still_s >= 1 else ""
        head = f"{'rank' if count == 1 else f'{count} ranks:'} {ranks}: {group.doing}{still}"
        # Without the frames that start the rank: they are the same in all.
        frames = takewhile(lambda line: "/toolkit/run/rank/main.py" not in line, group.stack)
        pieces.append("\n".join([head, *(f"  {_short(run, line)}" for line in frames)]))
    if not any(group.stack for group in answer.groups):
        is_early = run.status().state is RunState.STARTING
        why = "its ranks are starting; try again" if is_early else "a script without toolkit.start() needs py-spy there"
        pieces.append(f"no Python stack could be read on the nodes: {why}")
    return "\n\n".join(pieces)


def _short(run: RunDir, line: str) -> str:
    """Return a frame as ``jobs/train.py:12 loss``: a line of a terminal has 80 columns."""
    match = _FRAME.fullmatch(line)
    if match is None:
        return line
    file = match["file"].rpartition("/site-packages/")[2]
    for code in (run.code, run.code.resolve()):
        file = file.removeprefix(f"{code}/")
    return f"{file}:{match['line']} {match['name']}"
