"""Unchanged scripts with checkpoints of their own, under `toolkit exec`, are killed and stopped at random steps.

Each ends bit for bit as undisturbed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.waiting import wait_for
from toolkit.files.run_files import RunState
from toolkit.run.submission.handle import Run
from toolkit.run.submission.submit import submit_command

SCRIPTS = Path(__file__).parent / "scripts"
#: The arguments of each. The folder is its own, outside of the run's.
WORDS = {
    "arguments": ["--epochs", "6", "--output-dir", "{folder}"],
    "handler": ["{folder}"],
    "numbered": ["{folder}"],
    "spawned": ["ranks=2", "folder={folder}"],
    "teacher": ["{folder}"],
}
LIMIT_S = 300.0

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]


@pytest.mark.parametrize("name", WORDS)
def test_a_script_killed_and_stopped_at_random_steps_ends_as_undisturbed(
    name: str, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    for variable in ("TOOLKIT_RUNS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, env[variable])
    monkeypatch.chdir(SCRIPTS)
    reached = tmp_path / "reached"
    plan: dict[str, dict[str, Any]] = {
        "1": {"rank": dice.randrange(2), "step": dice.randrange(1, 25)},
        # The second attempt may begin at step 24 of 36.
        "2": {"rank": dice.randrange(2), "step": dice.randrange(1, 8), "reached": str(reached)},
    }
    if name == "spawned":  # the one task is the parent of what trains
        plan = {attempt: {**strike, "rank": 0} for attempt, strike in plan.items()}

    def started(folder: Path, strikes: object) -> Run:
        folder.mkdir()
        folder.with_suffix(".json").write_text(json.dumps(strikes))
        words = [word.format(folder=folder) for word in WORDS[name]]
        command = [sys.executable, "strike.py", str(folder.with_suffix(".json")), f"{name}.py", *words]
        tasks = 1 if name == "spawned" else 2
        return submit_command(command, [f"cluster.tasks_per_node={tasks}"], executor="local")

    whole = started(tmp_path / "whole", {})
    assert whole.wait(LIMIT_S)["state"] == RunState.COMPLETED, seed
    run = started(tmp_path / "again", plan)
    wait_for(reached.exists, LIMIT_S, f"the second attempt (seed {seed})")
    run.stop()
    assert run.wait(LIMIT_S)["state"] == RunState.STOPPED, seed
    assert run.resume().wait(LIMIT_S)["state"] == RunState.COMPLETED, seed
    assert len(run.dir.attempts()) == 3
    ends = [torch.load(tmp_path / each / "end.pt") for each in ("whole", "again")]
    assert [key for key, value in ends[0].items() if not torch.equal(value, ends[1][key])] == [], seed
