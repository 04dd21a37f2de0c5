"""`toolkit sync --follow` beside a run on this machine whose ranks are killed five times."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from tests.dist.test_local_runs import END_S, ranks, reached, start, the_run
from tests.plugins.trackers.contract import FakeTracker, same
from tests.waiting import PATIENCE, wait_for
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.trackers import sending as sync

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

KILLS = 5
OVERRIDES = ["train.epochs=120", "train.log_every=5", "checkpoint.every_steps=40", "retry.max_failures=10"]


def test_after_five_kills_the_copy_equals_the_file_point_by_point(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake tracker refuses a step that is not new, as wandb does. It fails in the middle of some batches."""
    server: dict[str, dict[tuple[int, str], float]] = {}
    trackers: list[FakeTracker] = []
    outcome: list[Any] = []

    def build(name: str, _: Any) -> FakeTracker:
        tracker = FakeTracker(server, only_appends=True)
        # It does not fail once the run is over: that send is the last.
        tracker.ends_after = 150 if len(trackers) % 4 == 1 and run.result([]) is None else math.inf
        trackers.append(tracker)
        return tracker

    monkeypatch.setattr(sync, "build_tracker", build)
    monkeypatch.setattr(sync, "EVERY_S", 0.05)
    with start(env, *OVERRIDES) as process:
        run = the_run(env)
        follower = threading.Thread(
            target=lambda: outcome.append(sync.send([run], "mlflow", None, follow=True, everything=False)), daemon=True
        )
        follower.start()
        for kill in range(1, KILLS + 1):
            # Past the checkpoint: these steps are made again.
            at = reached(run, 140 * kill)
            os.kill(ranks(env)[kill % 2], signal.SIGKILL)
            wait_for(partial(_is_after, run, at.attempt or 0), END_S, "the next attempt")
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    follower.join(PATIENCE * END_S)
    assert outcome == [True]
    attempts = run.attempts()
    assert len(attempts) == KILLS + 1
    assert any(first.step_end > second.step_start for first, second in itertools.pairwise(attempts))
    [copy] = server.values()
    points: dict[tuple[int, str], float] = {}
    for text in lines.path_of(run).read_text().splitlines():
        line = json.loads(text)
        values = {tag: value for tag, value in line.items() if tag not in ("step", "wall_time")}
        points |= {(line["step"], tag): math.nan if value is None else float(value) for tag, value in values.items()}
    assert same(copy, points)
    assert len(trackers) > KILLS, "it was sent while the run went on"


def _is_after(run: RunDir, attempt: int) -> bool:
    return (run.status().attempt or 0) > attempt
