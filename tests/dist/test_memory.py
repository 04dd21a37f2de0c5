"""Runs that keep their state in memory.

Killed in a step, they repeat only that step, and every bit is the same.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.dist.test_local_runs import ROOT, TOOLKIT

pytestmark = pytest.mark.dist


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config",
    [
        "digits_ddp",
        "digits_local_sgd",
        "digits_loop",
        "digits_parameter_server",
        "digits_steps",
        "digits_topk",
        "gan",
        "gpt_diloco",
        "gpt_fsdp",
        "gpt_hsdp",
        "gpt_pipeline",
        "gpt_powersgd",
        "gpt_tensor",
    ],
)
def test_a_killed_run_goes_on_from_the_step_that_it_died_in(config: str, env: dict[str, str]) -> None:
    check = ["resume-check", f"configs/{config}.yaml", "--steps", "24", "--at", "17", "--executor", "local"]
    check += ["--json", "--keep"]
    keys = ["checkpoint.memory_every_steps=1", "checkpoint.every_steps=1000"]
    done = subprocess.run([*TOOLKIT, *check, *keys], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "IDENTICAL", found
    # The blow may fall a little late, or before the state of the step before has its digest, which a thread makes.
    assert found["resumed"][0]["step"] >= 16
    logs = Path(found["runs"][1]).glob("logs/attempt-*/rank-*.log")
    assert any("resuming from memory" in log.read_text() for log in logs)
