"""The page of `toolkit stacks`."""

from __future__ import annotations

import re
from itertools import takewhile

from toolkit.base import hostlist
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.run.records.user_request import Answer, StackGroup

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')


def stacks_page(run: RunDir, answer: Answer) -> str:
    """Return the groups of ranks, the largest first, each with its stack."""
    step = "" if answer.step is None else f", step {answer.step}"
    pieces = [f"{run.name}/{run.id}, attempt {answer.attempt}{step}"]
    for group in sorted(answer.groups, key=lambda group: (-len(group.ranks), group.ranks)):
        # Without the frames that start the rank: they are the same in all.
        own = takewhile(lambda line: "/toolkit/run/rank/main.py" not in line, group.stack)
        pieces.append("\n".join([_head(group), *(f"  {_short(run, line)}" for line in own)]))
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


def _head(group: StackGroup) -> str:
    count = len(group.ranks)
    ranks = hostlist.compress(map(str, group.ranks)).strip("[]")
    still = f", for {group.still_s:.0f} s" if group.still_s >= 1 else ""
    return f"{'rank' if count == 1 else f'{count} ranks:'} {ranks}: {group.doing}{still}"
