"""Investigates a hang by the ranks' stacks: which rank do the others wait for?

It also says what that rank does. It needs only what :mod:`toolkit.hang.stacks` has prepared in each rank. So it works
also on a rank that never reached the process group, and on all except those that are stopped or whose node is gone. The
stacks are read on the ranks' own nodes, see :mod:`toolkit.hang.stack_digest`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from traceback import StackSummary

from toolkit.base import fsio, hostlist, logs
from toolkit.files.rundir import RunDir
from toolkit.hang import activity, stack_digest, stacks
from toolkit.hang.stack_digest import RankGroup, RankStack
from toolkit.hang.stacks import Stack, main_stack
from toolkit.nodes.agent.link import Message
from toolkit.nodes.agent.progress import Digest, Standing
from toolkit.nodes.start.agents import Agents
from toolkit.run.attempt.facts import RankFailure

#: What a node may take for its digest beside the time that it gives its ranks: an interpreter starts there.
LATE_S = 5.0
#: The innermost frames that are quoted of a stack: `toolkit why` has room for those of the rank and of one worker.
FRAMES = 5

log = logs.get(__name__)


def debug_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make torch and NCCL write into an attempt's log folder.

    They write dumps and logs. Each rank has its own files. Variables that the user has set are left out.
    ``TORCH_NCCL_DUMP_ON_TIMEOUT`` is off by default on torch 2.11.
    """
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in environ:  # the older name of the next one
        ours["TORCH_FR_DUMP_TEMP_FILE"] = str(stacks.flight_path(folder, ""))
    if "NCCL_DEBUG" in environ:
        ours["NCCL_DEBUG_FILE"] = str(folder / "nccl-%h-%p.log")
    return {name: value for name, value in ours.items() if name not in environ}


def look(
    agents: Agents,
    run: RunDir,
    attempt: int,
    standings: Mapping[str, Sequence[Standing]],
    known: Mapping[str, Digest],
    **how: bool,
) -> list[RankGroup]:
    """Return what the ranks do, by their stacks, which they are asked for.

    ``standings`` are the ranks by host, as far as they are known here; the agent of a rank that reports knows better.
    ``known`` is each node's last digest. ``how`` is for the agents, see :mod:`toolkit.hang.stack_digest`. Takes at most
    ``ANSWER_S`` and ``LATE_S``.
    """
    answers = agents.ask(_orders(run, attempt, standings, how), stack_digest.ANSWER_S + LATE_S)
    # A node that has not answered is described by its last digest.
    groups: list[RankGroup] = []
    for host, ranks in standings.items():
        if host in answers:
            groups += stack_digest.from_json(answers[host]["groups"])
            continue
        # Its ranks count as stopped if it is silent, else as unknown.
        last, is_silent, unheard = known.get(host), host in agents.silent_hosts, list[RankStack]()
        for rank in ranks:
            phase, step = (rank.phase, rank.step) if last is None else (activity.IN_STEP, last.least)
            standing = Standing(rank.rank, phase, step, rank.still_s, is_silent)
            unheard.append(RankStack(standing, [] if is_silent else None, is_read=is_silent))
        groups += stack_digest.group(unheard)
    return stack_digest.merge(groups)


def remove_old(agents: Agents, run: RunDir, attempt: int, standings: Mapping[str, Sequence[Standing]]) -> None:
    """Have the agents remove the stacks that the ranks have written so far. Takes at most ``LATE_S``."""
    agents.ask(_orders(run, attempt, standings, {"remove": True}), LATE_S)


def _orders(
    run: RunDir, attempt: int, standings: Mapping[str, Sequence[Standing]], how: Mapping[str, bool]
) -> dict[str, Message]:
    folder = str(run.attempt_logs(attempt))
    order: Message = {"do": "stacks", "attempt": attempt, "folder": folder, **how}
    return {host: {**order, "standings": [astuple(rank) for rank in ranks]} for host, ranks in standings.items()}


def investigate(groups: Sequence[RankGroup], hosts: Sequence[str], run: RunDir, attempt: int) -> RankFailure:
    """Find out which rank is behind, and note it for `toolkit why`. ``hosts`` are by rank."""
    folder = run.attempt_logs(attempt)
    culprits, how = blame(groups)
    answered = _count(group for group in groups if group.has_answered)
    log.info("%d of %d ranks answered: %s", answered, len(hosts), folder / "stack-*.txt")
    # The culprit is unknown: the failure names no rank.
    if not culprits:
        log.error("the run hangs: %s", how)
        return RankFailure(None, "", how, time.time())
    first = culprits[0]
    failure = RankFailure(first, hosts[first], how, time.time(), traceback=_quote(folder, first))
    # `toolkit why` reads the failure from the rank's error file.
    with contextlib.suppress(OSError):  # a full disk; the log has the same text
        fields = {"rank": first, "host": failure.host, "time": failure.time, "message": how}
        fsio.write_json(run.error_file(attempt, first), {**fields, "traceback": failure.traceback})
    log.error("the run hangs: rank %d on %s: %s", first, failure.host, how)
    return failure


def remove_unused(folder: Path) -> None:
    """Remove the stack files of an ended attempt that were never written to."""
    for path in folder.glob("stack-*.txt"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def _quote(folder: Path, rank: int) -> str:
    """Return the innermost frames of the rank's processes in Python's format; empty without an answer."""
    stack: Stack = []
    with contextlib.suppress(OSError):
        stack = main_stack(stack_digest.stack_text(stacks.stack_path(folder, rank)) or "")
    if not stack:
        return ""
    text = f"the stack of rank {rank}; all of them are in {folder / 'stack-*.txt'}\n{_format(stack)}"
    # The files of its other processes: stack-RANK-KIND-NUMBER.txt.
    for path in sorted(folder.glob(f"stack-{rank}-*.txt")):
        with contextlib.suppress(OSError):
            kind, number = path.stem.split("-")[2:]
            of_process = main_stack(path.read_text(errors="replace"))
            text += f"the stack of its {'data worker' if kind == 'worker' else kind} {number}\n{_format(of_process)}"
    return text


def _format(stack: Stack) -> str:
    return "".join(StackSummary.from_list(list(reversed(stack[:FRAMES]))).format())


# ------------------------------------------------------------------------------------------------------- who is behind


def blame(groups: Sequence[RankGroup]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and one line about all ranks.

    The line says what they and the others do. ``RankGroup.place`` tells which ranks are behind. Where all wait in
    collectives, those in another one than most are named. No rank is named where the one that is waited for may be
    among those whose stacks could not be read. ``groups`` are merged, see :mod:`stack_digest`.
    """
    if not groups:
        return [], "every rank has ended, but not what started them"
    furthest = min(group.place for group in groups)
    behind = [group for group in groups if group.place[:2] == furthest[:2]]
    # All wait, as far as is known, and some stacks are unread: the culprit may be one of those.
    if _count(behind) > 1 and furthest[2] > 0 and not all(group.is_read for group in behind):
        read = [group for group in groups if group.is_read]
        total = _count(groups)
        unread = total - _count(read)
        line = f"nobody knows who is behind: there was no time to read the stacks of {unread} of {total} ranks"
        if read:
            line += f"; {_counts(read, 'rank')}"
        return [], line
    last = [group for group in groups if group.place == furthest]
    # Of those furthest behind the rarest activity is blamed.
    does = _by_activity(last)
    doing = min(does, key=does.__getitem__)
    blamed = [group for group in last if group.doing == doing]
    culprits = sorted(rank for group in blamed for rank in group.ranks)
    line = f"{doing}, {blamed[0].still_s:.0f} s"
    if len(culprits) > 1:
        line += f" ({_names(culprits[1:])} as well)"
    others = [group for group in groups if group not in blamed]
    if others:
        line += f"; {_counts(others)}"
    return culprits, line


def _count(groups: Iterable[RankGroup]) -> int:
    return sum(len(group.ranks) for group in groups)


def _by_activity(groups: Iterable[RankGroup]) -> Counter[str]:
    """Return the number of ranks by what they do."""
    does: Counter[str] = Counter()
    for group in groups:
        does[group.doing] += len(group.ranks)
    return does


def _names(ranks: Sequence[int]) -> str:
    numbers = hostlist.compress(map(str, ranks)).strip("[]")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _counts(groups: Iterable[RankGroup], noun: str = "other") -> str:
    """Return text such as ``30 others in all_reduce, 1 in a step``."""
    (doing, count), *rest = _by_activity(groups).most_common()
    first = f"{count} {noun}{'s' if count > 1 else ''} {doing}"
    return ", ".join([first, *(f"{count} {doing}" for doing, count in rest)])
