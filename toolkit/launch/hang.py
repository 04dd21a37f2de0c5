"""What to make of a hang: ask the ranks for their stacks, name the one that the others wait for, and say what it does.

Nothing is asked of the ranks but what :mod:`toolkit.stacks` has prepared in each, so it works as well on one that never
came as far as the process group, and on all but those that are stopped or whose node is gone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import StackSummary

from toolkit import activity, fsio, logs, stacks
from toolkit.cluster import hostlist
from toolkit.launch.ending import RankFailure
from toolkit.launch.watchdog import Standing
from toolkit.rundir import RunDir
from toolkit.stacks import Stack, main_stack

#: So long the ranks have to write their stacks; those that can do it within milliseconds.
ANSWER_S = 3.0
LOOK_EVERY_S = 0.1
#: A file that is empty so long after the ranks were asked has not been answered. Before, nobody knows.
UNANSWERED_S = 1.0
#: Files are read by so many threads at once: most of the time goes into waiting for a file server.
READERS = 16
#: Of a stack this many innermost frames are quoted: `toolkit why` has room for those of the rank and of one worker.
FRAMES = 5

log = logs.get(__name__)


def debug_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which torch and NCCL leave their own dumps and logs in an attempt's log folder, by rank; none that
    the user has set. ``TORCH_NCCL_DUMP_ON_TIMEOUT`` is off by default on torch 2.11."""
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in environ:  # the next one's older name
        ours["TORCH_FR_DUMP_TEMP_FILE"] = str(stacks.flight_path(folder, ""))
    if "NCCL_DEBUG" in environ:
        ours["NCCL_DEBUG_FILE"] = str(folder / "nccl-%h-%p.log")
    return {name: value for name, value in ours.items() if name not in environ}


def investigate(
    ask: Callable[[], None], standings: Sequence[Standing], hosts: Sequence[str], run: RunDir, attempt: int
) -> RankFailure:
    """Find out which rank is behind, ``hosts`` by rank, and note it for `toolkit why`.

    ``ask`` has the ranks' stacks written. Takes ``ANSWER_S`` at most once it has returned.
    """
    folder = run.attempt_logs(attempt)
    ask()
    told = collect(folder, standings)
    seen = [Seen(s, told.get(s.rank), is_read=s.rank in told) for s in standings]
    culprits, how = blame(seen)
    log.info("%d of %d ranks answered: %s", sum(map(bool, told.values())), len(hosts), folder / "stack-*.txt")
    if not culprits:
        log.error("the run hangs: %s", how)
        return RankFailure(None, "", how, time.time())
    first = culprits[0]
    failure = RankFailure(first, hosts[first], how, time.time(), traceback=_quote(folder, first, told.get(first)))
    with contextlib.suppress(OSError):  # a full disk; the log has the same words
        said = {"rank": first, "host": failure.host, "time": failure.time, "message": how}
        fsio.write_json(run.error_file(attempt, first), {**said, "traceback": failure.traceback})
    log.error("the run hangs: rank %d on %s: %s", first, failure.host, how)
    return failure


def remove_unused(folder: Path) -> None:
    """Of an attempt that has ended: the files that wait for stacks in vain."""
    for path in folder.glob("stack-*.txt"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


# ---------------------------------------------------------------------------------------------------------- the stacks


def collect(folder: Path, standings: Sequence[Standing]) -> dict[int, Stack | None]:
    """Return the main thread's stack of each rank whose file could be read in time.

    None: there is no file, so the rank has not started. Empty: it does not answer. A rank that is left out is unknown:
    there was no time to read its file, or it was read so early that an answer may have come later.

    The ranks that are behind by their reports are read first. Takes ``ANSWER_S`` at most, or as long as it takes until
    all have answered but those that have been silent before.
    """
    reading = _Reading(folder, standings)
    threads = [threading.Thread(target=reading.work, daemon=True) for _ in range(READERS)]  # a read may hang for ever
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, reading.deadline - time.monotonic()))
    return dict(reading.found)  # a copy: a thread that hung may come back


class _Reading:
    """The files that are still to be read, and what was in the others."""

    def __init__(self, folder: Path, standings: Sequence[Standing]) -> None:
        phases = Counter(standing.phase for standing in standings)
        behind_first = sorted(standings, key=lambda s: (*Seen(s, None).reported, phases[s.phase], -s.still_s))
        self.found: dict[int, Stack | None] = {}
        self._folder = folder
        self._queue = deque((standing, 0.0) for standing in behind_first)
        self._awaited = {standing.rank for standing in standings if not standing.is_silent}
        self.deadline = time.monotonic() + ANSWER_S
        self._sure_at = time.monotonic() + min(UNANSWERED_S, ANSWER_S / 2)

    def work(self) -> None:
        """Read one file after the other until all have answered or time is up."""
        while (now := time.monotonic()) < self.deadline:
            try:
                standing, not_before = self._queue.popleft()
            except IndexError:
                return
            if not_before >= self.deadline:
                continue
            time.sleep(max(0.0, not_before - now))
            if not self._read(standing) and self._awaited:
                self._queue.append((standing, time.monotonic() + LOOK_EVERY_S))

    def _read(self, standing: Standing) -> bool:
        """Note what is in the rank's file; whether it has answered in full."""
        began = time.monotonic()
        try:
            text = stack_text(stacks.stack_path(self._folder, standing.rank))
        except OSError:
            return False
        stack = None if text is None else main_stack(text)
        if stack != [] or standing.is_silent or began >= self._sure_at:
            self.found[standing.rank] = stack
        if text is None or not text.endswith(stacks.ANSWERED):
            return False
        self._awaited.discard(standing.rank)
        return True


def stack_text(path: Path) -> str | None:
    """What is in a rank's file; None where there is none."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


def _quote(folder: Path, rank: int, stack: Stack | None) -> str:
    """The innermost frames of the rank, and of its other processes, in Python's own format; empty without an answer."""
    if not stack:
        return ""
    text = f"the stack of rank {rank}; all of them are in {folder / 'stack-*.txt'}\n{_format(stack)}"
    for path in sorted(folder.glob(f"stack-{rank}-*.txt")):
        with contextlib.suppress(OSError):
            kind, number = path.stem.split("-")[2:]
            of_process = main_stack(path.read_text(errors="replace"))
            text += f"the stack of its {'data worker' if kind == 'worker' else kind} {number}\n{_format(of_process)}"
    return text


def _format(stack: Stack) -> str:
    return "".join(StackSummary.from_list(list(reversed(stack[:FRAMES]))).format())


# ------------------------------------------------------------------------------------------------------- who is behind

#: Where ranks of ours wait for others outside of torch.distributed: the end of the file's name, and the function.
_WAITS = {
    ("checkpoint/exchange.py", "_await"): "waiting for the others at a checkpoint",
    ("dist/stop.py", "_slow"): "waiting for the others to agree on a step",
    ("dist/session.py", "_agree_on_run_dir"): "joining",
    ("dist/collectives.py", "sum_by_name"): "in all_reduce",
    ("strategies/parameter_server/mail.py", "receive"): "waiting for a message",
    ("strategies/spmd.py", "wait"): "in all_reduce",
}


def awaits(stack: Stack) -> str | None:
    """For what in common with other ranks this one waits, such as ``in all_reduce``; None if it does something itself.

    DDP's all-reduces run beneath the backward pass, so a rank inside torch's autograd engine counts as being in one.
    """
    if stack and stack[0].name == "_engine_run_backward":
        return "in all_reduce"
    if stack and "/torch/distributed/" in stack[0].filename:
        names = [frame.name for frame in stack if "/torch/distributed/" in frame.filename]
        return f"in {next((name for name in names if not name.startswith('_')), names[0])}"
    for frame in stack:
        for (file, name), what in _WAITS.items():
            if frame.name == name and frame.filename.endswith(file):
                return what
    return None


@dataclass(frozen=True)
class Seen:
    """All that is known of a rank."""

    standing: Standing
    stack: Stack | None  #: of its main thread; empty: it does not answer; None: it has not even started
    is_read: bool = True  #: False: nobody knows what its stack is

    @property
    def doing(self) -> str:
        """What it does, for a reader; equal for ranks that do the same."""
        if self.stack and (waits := awaits(self.stack)):
            return waits
        if not self.is_read:
            return "has not reported yet" if self.standing.phase is None else f"unknown ({self.standing.phase})"
        if self.standing.phase is None:
            return "has not started" if self.stack is None else "has not joined the others"
        if self.standing.is_silent and not self.stack:
            return "does not answer (stopped, or its node is gone)"
        return self.standing.phase

    @property
    def order(self) -> tuple[bool, int, int, bool]:
        """Smaller is further behind: who has not joined, who has done the fewest steps, who is in no collective, who
        does not answer. Without a stack nobody knows what a rank does in a step; most likely it waits as well."""
        answers = bool(self.stack) or not self.standing.is_silent
        guessed = answers and not self.stack and self.standing.phase == activity.IN_STEP
        waits = 2 if not self.is_read or awaits(self.stack or ()) else int(guessed)
        return *self.reported, waits, answers

    @property
    def reported(self) -> tuple[bool, int]:
        """The part of :attr:`order` that follows from reports, so that a rank need not answer for it."""
        return self.standing.phase is not None, -1 if self.standing.step is None else self.standing.step


def blame(ranks: Sequence[Seen]) -> tuple[list[int], str]:
    """The ranks that the others wait for, and one line on what they and the others do: :attr:`Seen.order` tells who.

    Where all wait in collectives those are named who are in another one than most. No rank is named where the one that
    is waited for may be among those whose stacks nobody has read.
    """
    known = [(seen.order, seen.doing, seen) for seen in ranks]
    furthest = min(order for order, _, _ in known)
    behind = [seen for seen in ranks if seen.reported == furthest[:2]]
    if len(behind) > 1 and furthest[2] > 0 and not all(seen.is_read for seen in behind):
        unread = sum(not seen.is_read for seen in ranks)
        read = Counter(seen.doing for seen in ranks if seen.is_read)
        line = f"nobody knows who is behind: there was no time to read the stacks of {unread} of {len(ranks)} ranks"
        return [], f"{line}; {_counts(read, 'rank')}" if read else line
    does = Counter(doing for order, doing, _ in known if order == furthest)
    doing = min(does, key=does.__getitem__)
    culprits = [seen for *place, seen in known if place == [furthest, doing]]
    others = Counter(at for order, at, _ in known if (order, at) != (furthest, doing))
    line = f"{doing}, {culprits[0].standing.still_s:.0f} s"
    if len(culprits) > 1:
        line += f" ({_names(culprits[1:])} as well)"
    if others:
        line += f"; {_counts(others)}"
    return [seen.standing.rank for seen in culprits], line


def _names(ranks: Sequence[Seen]) -> str:
    numbers = hostlist.compress(str(seen.standing.rank) for seen in ranks).strip("[]")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def _counts(others: Counter[str], noun: str = "other") -> str:
    """``30 others in all_reduce, 1 in a step``."""
    (doing, count), *rest = others.most_common()
    first = f"{count} {noun}{'s' if count > 1 else ''} {doing}"
    return ", ".join([first, *(f"{count} {doing}" for doing, count in rest)])
