"""Killed workers on this machine, of a parameter server and of a data loader: the run starts again."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.dist.test_local_runs import END_S, ROOT, TOOLKIT, ranks, reached, the_run
from tests.waiting import PATIENCE

pytestmark = pytest.mark.dist

OVERRIDES = ["train.epochs=60", "train.eval_every=500", "checkpoint.every_steps=50"]


def test_a_killed_worker_is_named_and_the_run_goes_on_from_its_checkpoint(env: dict[str, str]) -> None:
    argv = [*TOOLKIT, "submit", "configs/digits_parameter_server.yaml", "--executor", "local", "--wait", *OVERRIDES]
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        run = the_run(env)
        reached(run, 60)
        os.kill(ranks(env)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, second = run.attempts()
    assert (first.cause, first.decision, first.first_failure.rank) == ("crashed", "restart", 1)
    assert first.first_failure.how == "killed by SIGKILL"
    assert (second.cause, second.step_start >= 50) == ("completed", True)


#: The data worker of rank 1 dies in the first attempt, as one that runs out of memory does.
LOOP = """
import os, signal, torch, toolkit
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 0 and os.environ["RANK"] == "1" and os.environ["TOOLKIT_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)

run = toolkit.start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
run.resumable(model=model)
for epoch in run.epochs(1):
    for x in run.steps(DataLoader(Data(), batch_size=4, num_workers=1)):
        model(x).sum().backward()
"""


def test_a_data_worker_that_dies_is_named_with_its_rank(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    argv = [*TOOLKIT, "submit", "train.py", "--executor", "local", "--wait", "cluster.tasks_per_node=2"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S)
    assert done.returncode == 0, done.stderr
    run = the_run(env)
    first, second = run.attempts()
    assert (first.cause, first.first_failure.rank, second.cause) == ("crashed", 1, "completed")
    assert re.search(
        r"RuntimeError: DataLoader worker \(pid.* (?:killed by signal|exited unexpectedly)", first.first_failure.how
    ), first.first_failure
    assert first.first_failure.where == "train.py:18 in <module>"
