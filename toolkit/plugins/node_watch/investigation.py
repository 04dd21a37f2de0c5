"""Finds out which rank of a run that hangs the others wait for, and what it does.

In a hang the ranks write their stacks (:mod:`toolkit.hang`), which their nodes read (:mod:`.stack_summary`). A call
that only some ranks make may have paired up with another call of the rest many calls before: its line is found by the
collectives that torch's flight recorder has written.
"""

from __future__ import annotations

import pickle
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from traceback import FrameSummary, StackSummary
from typing import Any, NamedTuple

from toolkit import hang
from toolkit.base import fsio, hostlist, logs
from toolkit.base.process_limits import limits
from toolkit.base.this_node import bare_python
from toolkit.files import records
from toolkit.files.rundir import RunDir
from toolkit.hang import STUCK_SHARE, Watchdog
from toolkit.nodes.agent.messages import ScriptRankStatus, StacksAnswered, StacksOrder, WatchRanksOrder
from toolkit.nodes.agent.reports import ProgressSummary, RankProgress
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.launcher import RunningRanks
from toolkit.plugins.node_watch import silent_scripts, stack_summary
from toolkit.plugins.node_watch.outside_stacks import Stack, main_stack, program_line
from toolkit.plugins.node_watch.stack_summary import WAITING, RankGroup, RankStack
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, StackGroup
from toolkit.run.supervise.supervisor_components import Context

log = logs.get(__name__)


class Investigation:
    """Investigates by the stacks of the ranks."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks) -> None:
        self._context, self._attempt, self._ranks = context, attempt, ranks
        self._silence: SilentRanks | None = None
        self._has_old_stacks = False  #: the ranks have written stacks before

    # ------------------------------------------------------------------------------------ scripts that report nothing

    def is_stuck(self) -> bool:
        """True if all ranks of a script have been silent. They are watched when it has had time to report."""
        attempt, context = self._attempt, self._context
        bound_s = STUCK_SHARE * context.config.dist.timeout_s
        if self._silence is None and time.time() - attempt.started > limits().silence_measured_after_share * bound_s:
            self._silence = SilentRanks(attempt.plan.world_size, bound_s)
            words = [str(context.run.path), str(attempt.number), str(bound_s)]
            self._have_ranks_watched(bare_python("toolkit.plugins.node_watch.silent_scripts", *words))
        return self._silence is not None and self._silence.is_stuck()

    def _have_ranks_watched(self, command: Sequence[str]) -> None:
        """Have the agents watch the ranks by ``command``, or without one do so no more."""
        agents, attempt = self._context.agents, self._attempt
        assert agents is not None
        order = WatchRanksOrder(attempt.number, tuple(command))
        agents.request(dict.fromkeys(attempt.plan.hosts, order), SimpleQueue())  # there is no answer

    def take_activity(self, activity: ScriptRankStatus) -> None:
        """Take what a node tells of a rank."""
        if self._silence is not None:
            self._silence.take(activity)

    def silence_s(self) -> float:
        """Return for how long they have been silent."""
        return 0.0 if self._silence is None else self._silence.silence_s

    def close(self) -> None:
        """End the watch of a script. After a failure log the silent ranks: others may have waited for them."""
        if self._silence is None:
            return
        silent = self._silence.rank_progress()
        if silent and self._attempt.failures and self._attempt.hang is None:
            still_s = min(progress.still_s for progress in silent)
            names = ",".join(str(progress.rank) for progress in silent)
            log.warning("silent for %.0f s or longer before: rank %s", still_s, names)
        self._have_ranks_watched([])

    # ------------------------------------------------------------------------------------------------------ the stacks

    def find_cause(self, reports: Watchdog | None) -> RankFailure:
        """Find out which rank is behind. Ranks that report write their stacks on a signal."""
        attempt = self._attempt
        if reports is not None:
            ranks = self._by_host(self._unknown(None, reports.stalled_s))
            self._have_stacks_written(ranks)
        else:
            assert self._silence is not None, "it has found the hang"
            ranks = self._by_host(self._silence.rank_progress())
        groups = self._look(ranks, reports, outside=reports is None, may_end=reports is None)
        return investigate(groups, attempt.rank_hosts, self._context.run, attempt.number)

    def answer(self, request_id: str, reports: Watchdog | None) -> None:
        """Answer with what the ranks do now, in a thread: a node that hangs takes seconds."""
        attempt, run = self._attempt, self._context.run

        def answer() -> None:
            try:
                found = self.read_stacks(reports)
                groups = tuple(StackGroup(each.ranks, each.doing, each.still_s, each.stack) for each in found)
                seen = Answer(attempt=attempt.number, step=attempt.progress.step, groups=groups)
                user_requests.answer(run, request_id, seen)
            except Exception as error:  # the run continues without the stacks
                log.warning("the stacks cannot be shown: %s: %s", type(error).__name__, error)
                with suppress(OSError):  # a full disk: the command says that there was no answer
                    user_requests.answer(run, request_id, Answer(refused=f"the stacks cannot be shown: {error}"))

        threading.Thread(target=answer, daemon=True).start()

    def read_stacks(self, reports: Watchdog | None) -> list[RankGroup]:
        """Return what the ranks do now, with their stacks. It does not disturb them."""
        ranks = self._by_host(self._unknown("running" if reports is None else None, 0.0))
        if reports is not None:
            self._have_stacks_written(ranks)
        return self._look(ranks, reports, whole=True, outside=reports is None)

    def _unknown(self, phase: str | None, still_s: float) -> list[RankProgress]:
        return [RankProgress(rank, phase, None, still_s, False) for rank in range(self._attempt.plan.world_size)]

    def _have_stacks_written(self, ranks: Mapping[str, Sequence[RankProgress]]) -> None:
        """Have ranks that report write their stacks. Old ones are removed before, or they would pass for new."""
        if self._has_old_stacks and self._context.agents is not None:
            orders = _orders(self._context.run, self._attempt.number, ranks, remove=True)
            self._context.agents.ask(orders, LATE_S)
        self._has_old_stacks = True
        self._ranks.send_signal(hang.ASK)

    def _look(
        self, ranks: Mapping[str, Sequence[RankProgress]], reports: Watchdog | None, **how: bool
    ) -> list[RankGroup]:
        agents, known = self._context.agents, {} if reports is None else reports.nodes
        assert agents is not None
        return collect_stacks(agents, self._context.run, self._attempt.number, ranks, known, **how)

    def _by_host(self, rank_progress: Sequence[RankProgress]) -> dict[str, list[RankProgress]]:
        by_host: dict[str, list[RankProgress]] = {}
        for progress in rank_progress:
            if progress.rank not in self._attempt.gone:  # it cannot answer, and would be taken for stopped
                by_host.setdefault(self._attempt.host_of(progress.rank), []).append(progress)
        return by_host


class SilentRanks:
    """What the nodes report of the ranks of a script that reports nothing, see :mod:`.silent_scripts`.

    The run hangs when *all* ranks are silent: a silent one may wait for another that works. So ranks that wait in NCCL,
    which keeps a core or the GPU busy, hide a hang.
    """

    def __init__(self, ranks: int, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._waiting = set(range(ranks))  #: ranks that have not ended
        self._silent: dict[int, float] = {}  #: by rank: since when, by ``clock``
        self._confirm_s, self._clock = 2 * silent_scripts.look_every_s(bound_s), clock
        self._all_silent_since: float | None = None

    def take(self, news: ScriptRankStatus) -> None:
        """Take news of a rank, which replace what was known of it. A number that no rank has is of other output."""
        if news.rank >= self._ranks:
            return
        self._silent.pop(news.rank, None)
        self._waiting.add(news.rank)
        if news.state == silent_scripts.ENDED:
            self._waiting.discard(news.rank)
        elif news.state == silent_scripts.HIDDEN:
            log.warning("rank %d: what it does cannot be seen from its node, so a hang will not be detected", news.rank)
        elif news.state == silent_scripts.SILENT:
            self._silent[news.rank] = self._clock() - news.still_s

    def is_stuck(self) -> bool:
        """True if every living rank has been silent for the bound. Another look since must have confirmed it."""
        # One rank that works is enough: the others may wait for it.
        if not self._waiting or self._waiting - self._silent.keys():
            self._all_silent_since = None
            return False
        if self._all_silent_since is None:
            self._all_silent_since = self._clock()
        return self._clock() - self._all_silent_since > self._confirm_s

    @property
    def silence_s(self) -> float:
        """Return for how long all ranks have been silent."""
        return min(progress.still_s for progress in self.rank_progress())

    def rank_progress(self) -> list[RankProgress]:
        """Return how long each silent rank has been silent."""
        now = self._clock()
        silent = sorted(self._silent.items())
        return [RankProgress(rank, silent_scripts.SILENT, None, now - since, False) for rank, since in silent]


#: Reads and digests the stacks of a node.
COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.node_watch.stack_summary")
#: What a node may take for its digest besides the time that it gives its ranks: an interpreter starts there.
LATE_S = 5.0
#: What it may take to read the stacks of scripts from outside.
OUTSIDE_S = 20.0
#: The innermost frames that are quoted of a stack: `toolkit why` has room for those of the rank and of one worker.
FRAMES = 5


def collect_stacks(
    agents: Agents,
    run: RunDir,
    attempt: int,
    rank_progress: Mapping[str, Sequence[RankProgress]],
    known: Mapping[str, ProgressSummary],
    **how: bool,
) -> list[RankGroup]:
    """Return what the ranks do, by their stacks, which they are asked for.

    ``rank_progress`` are the ranks by host, as far as known here; the agent of a rank that reports knows better.
    ``known`` is each node's last digest. ``how`` is for the nodes, see :mod:`.stack_summary`.
    """
    wait_s = limits().stacks_s + LATE_S + (OUTSIDE_S if how.get("outside") else 0.0)
    heard = agents.ask(_orders(run, attempt, rank_progress, **how), wait_s)
    answers = {host: answer for host, answer in heard.items() if isinstance(answer, StacksAnswered)}
    # A node that has not answered is described by its last digest.
    groups: list[RankGroup] = []
    for host, ranks in rank_progress.items():
        if host in answers:
            with suppress(records.SchemaError):  # what a library has printed last
                groups += stack_summary.from_json(answers[host].groups)
                continue
        # Its ranks count as stopped if it is silent, else as unknown.
        last, is_silent, unheard = known.get(host), host in agents.silent_hosts, list[RankStack]()
        for rank in ranks:
            phase, step = (rank.phase, rank.step) if last is None else (hang.IN_STEP, last.least)
            progress = RankProgress(rank.rank, phase, step, rank.still_s, is_silent)
            unheard.append(RankStack(progress, [] if is_silent else None, is_read=is_silent))
        groups += stack_summary.group(unheard)
    return stack_summary.merge(groups)


def _orders(
    run: RunDir, attempt: int, rank_progress: Mapping[str, Sequence[RankProgress]], **how: bool
) -> dict[str, StacksOrder]:
    folder = str(run.path)
    return {host: StacksOrder(attempt, COMMAND, folder, tuple(ranks), **how) for host, ranks in rank_progress.items()}


def investigate(groups: Sequence[RankGroup], hosts: Sequence[str], run: RunDir, attempt: int) -> RankFailure:
    """Find out which rank is behind, and note it for `toolkit why`. ``hosts`` are by rank."""
    folder = run.attempt_logs(attempt)
    one_of_each = sorted(groups, key=lambda group: len(group.ranks))[-MOST:]
    recorded = {group.ranks[0]: calls_of(folder, group.ranks[0]) for group in one_of_each}
    odd, difference = first_difference(recorded, {each.ranks[0]: len(each.ranks) for each in one_of_each})
    culprits, how = blame(groups, odd)
    how += difference and f"; {difference}"
    answered = sum(len(group.ranks) for group in groups if group.has_answered)
    log.info("%d of %d ranks answered: %s", answered, len(hosts), folder / "stack-*.txt")
    if not culprits:
        log.error("the run hangs: %s", how)
        return RankFailure(None, "", how, time.time())
    first = culprits[0]
    stack = _stack_of(folder, first)
    quote, may_be_of_node = _quote(folder, first, stack), _may_be_of_node(stack)
    failure = RankFailure(first, hosts[first], how, time.time(), traceback=quote, blames_node=may_be_of_node)
    # `toolkit why` reads the failure from the rank's error file.
    with suppress(OSError):  # a full disk; the log has the same text
        fields = {"rank": first, "host": failure.host, "time": failure.time, "message": how}
        fsio.write_json(run.error_file(attempt, first), {**fields, "traceback": failure.traceback})
    log.error("the run hangs: rank %d on %s: %s", first, failure.host, how)
    return failure


def _stack_of(folder: Path, rank: int) -> Stack:
    """Return the stack of the rank's main thread; empty without an answer."""
    with suppress(OSError):
        return main_stack(stack_summary.stack_text(hang.stack_path(folder, rank)) or "")
    return []


#: Waits of Python itself for a thread, a process or a time, as the program has asked for.
_OWN_WAITS = re.compile(
    r"/lib/python3[\d.]*/(?:threading|queue|subprocess|selectors|asyncio/\w+|multiprocessing/\w+|concurrent/.+)\.py$"
)
#: Parts of a program's line that wait for a device or for a disk.
_OF_DEVICE = re.compile(
    r"\.(?:item|cpu|to|tolist|numpy|synchronize|wait|backward|step)\(|\b(?:open|load\w*|read\w*|print|float|int)\("
)


def _may_be_of_node(stack: Stack) -> bool:
    """True if the node may be why a rank goes no further: it does not answer, or waits for a device or a disk."""
    if not stack:
        return True
    innermost = stack[0]
    if re.search(r"/(?:site|dist)-packages/", innermost.filename):
        return True
    return not _OWN_WAITS.search(innermost.filename) and _OF_DEVICE.search(innermost.line or "") is not None


def _quote(folder: Path, rank: int, stack: Stack) -> str:
    """Return the innermost frames of the rank's processes in Python's format; empty without an answer."""
    if not stack:
        return ""
    text = f"the stack of rank {rank}; all of them are in {folder / 'stack-*.txt'}\n{_format(stack)}"
    # The files of its other processes: stack-RANK-KIND-NUMBER.txt.
    for path in sorted(folder.glob(f"stack-{rank}-*.txt")):
        with suppress(OSError):
            kind, number = path.stem.split("-")[2:]
            of_process = main_stack(fsio.read_text(path, errors="replace"))
            text += f"the stack of its {'data worker' if kind == 'worker' else kind} {number}\n{_format(of_process)}"
    return text


def _format(stack: Stack) -> str:
    return "".join(StackSummary.from_list(list(reversed(stack[:FRAMES]))).format())


# ------------------------------------------------------------------------------------------------------- who is behind


def blame(groups: Sequence[RankGroup], odd: int | None = None) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and one line about all ranks.

    Where all wait in collectives, those in another one than most are named, or at another line, or else the group with
    the ``odd`` call. No rank is named where the one that is waited for may be among those whose stacks could not be
    read. ``groups`` are merged, see :mod:`.stack_summary`.
    """
    if not groups:
        return [], "every rank has ended, but not what started them"
    furthest = min(group.place for group in groups)
    behind = [group for group in groups if group.place[:2] == furthest[:2]]
    # All wait, as far as is known, and some stacks are unread: the culprit may be one of those.
    if sum(len(group.ranks) for group in behind) > 1 and furthest[2] > 0 and not all(group.is_read for group in behind):
        read = [group for group in groups if group.is_read]
        total = sum(len(group.ranks) for group in groups)
        unread = sum(len(group.ranks) for group in groups if not group.is_read)
        line = f"the slowest rank is unknown: there was no time to read the stacks of {unread} of {total} ranks"
        return [], f"{line}; {_counts(read, 'rank')}" if read else line
    last = [group for group in groups if group.place == furthest]
    # All wait for each other: a call that only some ranks make puts these behind, and one that they leave out ahead.
    if all(group.is_read and group.place[0] and group.place[2] >= WAITING for group in groups):
        last = list(groups)
    does = _by_activity(last)
    # The rarest activity is blamed, and of those that are as rare the one furthest behind.
    blamed = next((group for group in groups if odd in group.ranks), None) or min(
        last, key=lambda group: (does[group.doing], group.place)
    )
    alike = [group for group in groups if (group.doing, group.place) == (blamed.doing, blamed.place)]
    culprits = sorted(rank for group in alike for rank in group.ranks)
    line = f"{blamed.doing}, {blamed.still_s:.0f} s"
    if len(culprits) > 1:
        line += f" ({_names(culprits[1:])} as well)"
    others = [group for group in groups if group not in alike]
    if others:
        line += f"; {_counts(others)}"
    return culprits, line


def _by_activity(groups: Iterable[RankGroup]) -> Counter[str]:
    """Return the number of ranks by what they do."""
    return Counter(group.doing for group in groups for _ in group.ranks)


def _names(ranks: Sequence[int]) -> str:
    numbers = hostlist.compress(map(str, ranks)).strip("[]")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _counts(groups: Iterable[RankGroup], noun: str = "other") -> str:
    """Return text such as ``30 others in all_reduce, 1 in a step``."""
    (doing, count), *rest = _by_activity(groups).most_common()
    first = f"{count} {noun}{'s' if count > 1 else ''} {doing}"
    return ", ".join([first, *(f"{count} {doing}" for doing, count in rest)])


#: The recordings of so many ranks are read, each of another group: all ranks of a group wait at the same place.
MOST = 8


class Call(NamedTuple):
    """A collective as a rank has called it."""

    name: str
    sizes: str
    line: str | None  #: None: called by a thread of torch's, such as that of a backward pass on a GPU

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name} ({self.line})"


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts alone: others would let who writes into the run's folder run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a recording")


def calls_of(folder: Path, rank: int) -> dict[str, dict[int, Call]]:
    """Return the collectives of a rank by process group and number. Empty without a recording that can be read."""
    groups: dict[str, dict[int, Call]] = {}
    with suppress(OSError, pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError):
        with fsio.open_file(hang.flight_path(folder, rank)) as file:
            entries = _PlainUnpickler(file).load()["entries"]
        for entry in entries:
            if not entry["is_p2p"]:
                frames = [FrameSummary(each["filename"], each["line"], each["name"]) for each in entry["frames"]]
                call = Call(entry["profiling_name"].partition(":")[2], str(entry["input_sizes"]), program_line(frames))
                groups.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = call
    return groups


def first_difference(
    recorded: Mapping[int, Mapping[str, Mapping[int, Call]]], weights: Mapping[int, int]
) -> tuple[int | None, str]:
    """Return the rank whose call is the odd one, None if any may be, and a line about the calls, or an empty one.

    ``recorded`` is what :func:`calls_of` returns, by rank; a rank stands for as many as its weight.
    """
    for group in dict.fromkeys(name for groups in recorded.values() for name in groups):
        sides = {rank: groups[group] for rank, groups in recorded.items() if group in groups}
        numbers = sorted(set.intersection(*(set(calls) for calls in sides.values())))
        for at, number in enumerate(numbers):
            counts = Counter[Call]()
            for rank, calls in sides.items():
                counts[calls[number]] += weights[rank]
            if len(counts) == 1:
                continue
            # Of two calls that are as frequent either may be the odd one.
            usual, odd = counts.most_common()[0][0], counts.most_common()[-1][0]
            first, second = (
                next(rank for rank, calls in sides.items() if calls[number] == call) for call in (odd, usual)
            )
            theirs, others = ([sides[rank][each] for each in numbers[at:]] for rank in (first, second))
            extra, missed = _agree(theirs[1:], others), _agree(theirs, others[1:])
            # A branch for some ranks may make the same call at another line: then what follows agrees as it is.
            is_last = len(theirs) == 1
            if odd[:2] == usual[:2] and (is_last or _agree(theirs[1:], others[1:]) >= max(extra, missed)):
                continue
            line = f"collective {number} was {odd} on rank {first}, and {usual} on rank {second}"
            if counts[usual] > counts[odd]:
                return first, line
            return (first if extra > missed else second if missed > extra else None), line
    return None, ""


def _agree(some: Sequence[Call], others: Sequence[Call]) -> int:
    return sum(call == other for call, other in zip(some, others, strict=False))
