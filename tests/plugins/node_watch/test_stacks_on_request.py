"""`toolkit stacks`: what the ranks do now, and the page about it."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from toolkit import hang
from toolkit.base import fsio
from toolkit.cli.on_demand import stacks_page
from toolkit.files.run_files import RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.hang import Watchdog
from toolkit.nodes.agent.reports import RankProgress
from toolkit.plugins.node_watch import outside_stacks, stack_summary
from toolkit.plugins.node_watch.investigation import Investigation
from toolkit.plugins.node_watch.stack_summary import RankGroup
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, RequestKind, StackGroup, UserRequest

STACK = (
    'File "/venv/lib/site-packages/torch/nn.py", line 3, in forward',
    'File "/toolkit/run/rank/main.py", line 9, in run',
)


class Asked(Investigation):
    """Investigates an attempt in its sixth step, whose two ranks do the same."""

    def __init__(self, run: RunDir) -> None:
        self.attempt = SimpleNamespace(number=1, progress=SimpleNamespace(step=5))
        super().__init__(cast(Any, SimpleNamespace(run=run)), cast(Any, self.attempt), cast(Any, None))

    def read_stacks(self, reports: Watchdog | None) -> list[RankGroup]:
        return [RankGroup((1, 6, 1, 1), "in a step", True, True, (0, 1), 2.0, STACK)]

    def answer_to(self, run: RunDir) -> Answer:
        number = user_requests.put(run, UserRequest(RequestKind.STACKS, time.time()))
        self.answer(number, None)
        return wait_for(lambda: user_requests.answer_to(run, number), 5, "an answer")


def test_ranks_with_one_stack_are_a_paragraph_of_the_page(run: RunDir) -> None:
    answer = Asked(run).answer_to(run)
    assert answer.groups == (StackGroup((0, 1), "in a step", 2.0, STACK),)
    page = stacks_page(run, answer)
    assert page.split("\n\n")[1] == "2 ranks: 0-1: in a step, for 2 s\n  torch/nn.py:3 forward"
    # Ranks that have only begun have none, which is no lack of a program.
    without = answer.replace(groups=())
    assert "needs py-spy" in stacks_page(run, without)
    run.write_status(RunStatus(RunState.STARTING))
    assert "its ranks are starting; try again" in stacks_page(run, without)


def test_stacks_that_cannot_be_read_are_an_answer_too(run: RunDir) -> None:
    asked = Asked(run)
    asked.attempt.progress = None
    assert "the stacks cannot be shown" in (asked.answer_to(run).refused or "")


def test_stacks_from_outside_end_no_process(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without py-spy there is only the kernel's view of the process."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    fsio.make_dir(run.attempt_logs(1), parents=1)
    with subprocess.Popen([os.path.realpath("/proc/self/exe"), "-c", "input()"], stdin=subprocess.PIPE) as process:
        outside_stacks.dump_stacks(run, 1, {3: [process.pid]}, may_end=False)
        assert process.poll() is None
        process.kill()
    text = hang.stack_path(run.attempt_logs(1), 3).read_text()
    assert f"# process {process.pid}: " in text
    assert text.endswith(hang.ANSWERED)


def test_removed_stacks_do_not_pass_for_new_ones(tmp_path: Path) -> None:
    path = hang.stack_path(tmp_path, 0)
    progress = RankProgress(0, "in a step", 1, 0.0, True)
    with path.open("a") as of_rank:
        of_rank.write(f'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in old\n{hang.ANSWERED}')
        of_rank.flush()
        assert stack_summary.collect(tmp_path, [progress])[0]
        stack_summary.truncate_files(tmp_path, [progress, RankProgress(1, None, None, 0.0, True)])
        assert stack_summary.collect(tmp_path, [progress]) == {0: []}
        of_rank.write(f'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in new\n{hang.ANSWERED}')
    assert path.read_text().startswith("Thread")
    (group,) = stack_summary.from_json(json.loads(stack_summary.summarize_stacks(tmp_path, [progress], whole=True)))
    assert group.stack == ('File "x.py", line 1, in new',)


def test_only_ranks_with_one_stack_form_a_group(tmp_path: Path) -> None:
    for rank, line in enumerate([1, 2, 1]):
        text = (
            f'Thread 0x1 (most recent call first):\n  File "/x/site-packages/x.py", line {line} in f\n{hang.ANSWERED}'
        )
        hang.stack_path(tmp_path, rank).write_text(text)
    rank_progress = [RankProgress(rank, "in a step", 1, 0.0, False) for rank in range(3)]
    read = stack_summary.collect(tmp_path, rank_progress)
    seen = [stack_summary.RankStack(progress, read[progress.rank]) for progress in rank_progress]
    assert [group.ranks for group in stack_summary.group(seen)] == [(0, 1, 2)]
    assert [group.ranks for group in stack_summary.group(seen, whole=True)] == [(0, 2), (1,)]
