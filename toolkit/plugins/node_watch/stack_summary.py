"""``python -m toolkit.plugins.node_watch.stack_summary``: what one node's ranks wait for in a hang, by their stacks.

The agent starts this program: a file server that does not answer blocks only this process. It reads the agent's order,
a :class:`~toolkit.nodes.agent.messages.StacksOrder`, and writes groups, both as JSON. Ranks of which the same is known
form one :class:`RankGroup`, so the message to the supervisor is short also for many ranks.

``whole`` adds the stacks: only ranks with equal stacks form a group. ``outside`` first reads the stacks of scripts that
do not write them, and ends no process; ``may_end`` ends those that cannot be read otherwise. ``remove`` only removes
what the ranks have written so far.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from toolkit import hang
from toolkit.base import fsio
from toolkit.base.process_limits import limits
from toolkit.files import records
from toolkit.files.records import JsonRecord
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import StacksOrder
from toolkit.nodes.agent.reports import RankProgress
from toolkit.plugins.node_watch import outside_stacks
from toolkit.plugins.node_watch.outside_stacks import Stack, is_in_toolkit, main_stack, program_line
from toolkit.plugins.node_watch.silent_scripts import RankProcesses

#: A file that is still empty this long after the request counts as unanswered. Before that, the answer is unknown.
UNANSWERED_S = 1.0


def collect(folder: Path, rank_progress: Sequence[RankProgress]) -> dict[int, Stack | None]:
    """Return the main thread's stack of each rank whose file could be read in time, ``stacks_s``.

    None: there is no file, so the rank has not started. Empty: it does not answer. A rank that is left out is unknown:
    there was no time to read its file, or it was read so early that an answer may have come later.
    """
    by_rank: dict[int, Stack | None] = {}
    reader = threading.Thread(
        target=_read, args=[folder, rank_progress, by_rank], daemon=True
    )  # a read may hang for ever
    reader.start()
    reader.join(limits().stacks_s)
    return dict(by_rank)  # a copy: a thread that hung may continue


def _read(folder: Path, rank_progress: Sequence[RankProgress], by_rank: dict[int, Stack | None]) -> None:
    began = time.monotonic()
    deadline, sure_at = began + limits().stacks_s, began + min(UNANSWERED_S, limits().stacks_s / 2)
    left = list(rank_progress)
    while True:
        for progress in list(left):
            looked = time.monotonic()
            if looked >= deadline:
                return
            try:
                text = stack_text(hang.stack_path(folder, progress.rank))
            except OSError:
                continue
            stack = None if text is None else main_stack(text)
            # An empty file counts only for a silent rank, or when there was time enough to answer.
            if stack != [] or progress.is_silent or looked >= sure_at:
                by_rank[progress.rank] = stack
            if text is not None and text.endswith(hang.ANSWERED):
                left.remove(progress)
        # The ranks that are left do not answer anyway.
        if all(progress.is_silent for progress in left):
            return
        time.sleep(limits().look_for_stacks_every_s)


def stack_text(path: Path) -> str | None:
    """Return what is in a rank's file; None where there is none."""
    try:
        return fsio.read_text(path, errors="replace")
    except FileNotFoundError:
        return None


#: Where ranks wait for others outside of torch.distributed, by the name of the function.
WAITS = {
    "toolkit.checkpoint.exchange:_await": "waiting for the others at a checkpoint",
    "toolkit.ranks.agreement.gate:_await_decision": "waiting for the others to agree on a step",
    "toolkit.ranks.session:_agree_on_run_dir": "joining",
    "toolkit.ranks.device:agree_on_backend": "joining",
    "toolkit.ranks.collectives:sum_by_name": "in all_reduce",
    "toolkit.ranks.collectives:gather_by_name": "in all_gather",
    "toolkit.plugins.methods.parameter_server.messaging:receive": "waiting for a message",
    "toolkit.train.same_calls:_await": "waiting for the others",
}


def awaits(stack: Stack) -> str | None:
    """Return what the rank waits for with others, such as ``in all_reduce``. None: it does something itself.

    DDP's all-reduces run beneath the backward pass. Before a forward pass it exchanges buffers, and once the layout of
    its buckets.
    """
    if stack and stack[0].name == "_engine_run_backward":
        return "in all_reduce"
    if stack and stack[0].filename.endswith("/torch/nn/parallel/distributed.py"):
        return "in DistributedDataParallel"
    if stack and "/torch/distributed/" in stack[0].filename:
        # Name the public function that the rank has called, where there is one.
        names = [frame.name for frame in stack if "/torch/distributed/" in frame.filename]
        public = [name for name in names if not name.startswith("_")]
        return f"in {[*public, *names][0]}"
    for frame in stack:
        for place, what in WAITS.items():
            module, _, function = place.partition(":")
            if frame.name == function and frame.filename.endswith(f"/{module.replace('.', '/')}.py"):
                return what
    # Of torch's compiled `work.wait()` the caller is the innermost frame; Python's own waits have frames of threading.
    return "waiting for a collective" if stack and ".wait(" in (stack[0].line or "") else None


@dataclass(frozen=True)
class RankStack:
    """All that is known of a rank."""

    progress: RankProgress
    stack: Stack | None  #: of its main thread; empty: it does not answer; None: it has not even started
    is_read: bool = True  #: False: its stack is unknown

    @property
    def doing(self) -> str:
        """Return what the rank does and where, for a reader; equal for ranks that do the same."""
        line = program_line(self.stack or ())
        return self._activity if line is None else f"{self._activity} ({line})"

    @property
    def _activity(self) -> str:
        if self.stack and (waits := awaits(self.stack)):
            return waits
        if not self.is_read:
            return "has not reported yet" if self.progress.phase is None else f"unknown ({self.progress.phase})"
        if self.progress.phase is None:
            return "has not started" if self.stack is None else "has not joined the others"
        if self.progress.is_silent and not self.stack:
            return "does not answer (stopped, or its node is gone)"
        return self.progress.phase

    @property
    def order(self) -> Place:
        """Return a key of four numbers by which ranks that are further behind are smaller.

        In order: has not joined, has done fewer steps, is in no collective, is in one that the toolkit has not called,
        does not answer. What a rank does in a step is unknown without a stack; most likely it waits as well.
        """
        answers = bool(self.stack) or not self.progress.is_silent
        guessed = answers and not self.stack and self.progress.phase == hang.IN_STEP
        waits = int(guessed)
        if not self.is_read or awaits(self.stack or ()):
            waits = WAITING + is_in_toolkit(self.stack or ())  # all ranks make the toolkit's own calls
        steps = 0 if self.progress.step is None else 1 + self.progress.step
        return int(self.progress.phase is not None), steps, waits, int(answers)


#: Smaller is further behind, see :attr:`RankStack.order`. The third is ``WAITING`` or more for ranks in a collective.
Place: TypeAlias = tuple[int, ...]
WAITING = 2


@dataclass(frozen=True)
class RankGroup(JsonRecord):
    """Ranks of which the same is known."""

    place: Place
    doing: str
    is_read: bool  #: their files could be read
    has_answered: bool
    ranks: tuple[int, ...]
    still_s: float  #: of the first of them
    stack: tuple[str, ...] = ()  #: of the main thread, innermost frame first; empty unless it was asked for


def group(ranks: Iterable[RankStack], *, whole: bool = False) -> list[RankGroup]:
    """Return the groups of these ranks, ordered by the first rank of each. ``whole``: with their stacks."""
    return merge(
        RankGroup(
            place=seen.order,
            doing=seen.doing,
            is_read=seen.is_read,
            has_answered=bool(seen.stack),
            ranks=(seen.progress.rank,),
            still_s=seen.progress.still_s,
            stack=tuple(f'File "{f.filename}", line {f.lineno}, in {f.name}' for f in (seen.stack or ()) if whole),
        )
        for seen in ranks
    )


def merge(groups: Iterable[RankGroup]) -> list[RankGroup]:
    """Return the groups with equal ones merged, ordered by the first rank of each."""
    alike: dict[Any, list[RankGroup]] = {}
    for each in groups:
        alike.setdefault((each.place, each.doing, each.is_read, each.has_answered, each.stack), []).append(each)
    merged = []
    for members in alike.values():
        first = min(members, key=lambda member: member.ranks)
        merged.append(replace(first, ranks=tuple(sorted(rank for member in members for rank in member.ranks))))
    return sorted(merged, key=lambda member: member.ranks)


def from_json(groups: Any) -> list[RankGroup]:
    """Return the groups that :func:`summarize_stacks` has written. Raises SchemaError."""
    return records.decode(list[RankGroup], groups)


def summarize_stacks(folder: Path, rank_progress: Sequence[RankProgress], *, whole: bool = False) -> str:
    """Return the groups of these ranks as JSON, by the stacks that they write."""
    read = collect(folder, rank_progress)
    seen = [RankStack(each, read.get(each.rank), each.rank in read) for each in rank_progress]
    return json.dumps([each.to_json() for each in group(seen, whole=whole)])


def truncate_files(folder: Path, rank_progress: Sequence[RankProgress]) -> None:
    """Empty the files of these ranks. A rank keeps its file open and appends to it, so the file itself stays."""
    for progress in rank_progress:
        with contextlib.suppress(OSError):  # no file yet
            os.truncate(hang.stack_path(folder, progress.rank), 0)


def main() -> None:
    order = StacksOrder.from_json(json.load(sys.stdin))
    run = RunDir(Path(order.run))
    folder, rank_progress = run.attempt_logs(order.attempt), order.rank_progress
    if order.remove:
        truncate_files(folder, rank_progress)
        rank_progress = ()
    if order.outside:
        outside_stacks.dump_stacks(run, order.attempt, RankProcesses(run, order.attempt).pids(), may_end=order.may_end)
    print(summarize_stacks(folder, rank_progress, whole=order.whole), flush=True)
    os._exit(0)  # a thread may hang in a read


if __name__ == "__main__":
    main()
