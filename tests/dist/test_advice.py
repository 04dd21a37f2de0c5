"""Each piece of advice is typed as it stands, in the situation that it is given for. The run is better off then."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE, processes_with, wait_for
from toolkit.base.errors import EXIT_FAILED, JobFailedError
from toolkit.checkpoint.folder import newest_step
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.run.submission.handle import attach

pytestmark = pytest.mark.dist

TOOLKIT = [sys.executable, "-m", "toolkit"]
LOCAL = ["--executor", "local", "--wait"]
END_S = 120

#: It fails without a file ``data`` and at step BAD, and is slow while there is a file ``wait``.
LOOP = """
import pathlib, time
import torch
import toolkit
from toolkit.base.errors import DataMissingError

HERE = pathlib.Path("PROJECT")
with toolkit.start() as run:
    model = torch.nn.Linear(1, 1)
    run.resumable(model=model)
    if not (HERE / "data").exists():
        raise DataMissingError("there is no data")
    for step in run.steps(range(4000), total=TOTAL):
        if run.step == BAD:
            raise ValueError("a bad row")
        if (HERE / "wait").exists():
            time.sleep(0.1)
"""


DOUBLING = """
import torch
import toolkit

class Doubling(toolkit.Job):
    def train_set(self):
        return [(torch.tensor([x / 10]), torch.tensor([x / 5])) for x in range(100)]

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        return toolkit.Loss.mean((model(batch.inputs) - batch.targets).square().mean())
"""
#: The rate falls to nearly 0 in six steps.
FALLING = """
job: doubling.py
data: {global_batch_size: 10}
optim: {lr: 0.001, schedule: cosine}
train: {max_steps: 6, log_every: 1}
checkpoint: {every_steps: 3}
"""


class Site:
    """A project with a job, and what is typed there."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TOOLKIT, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE * END_S
        )

    @property
    def run(self) -> RunDir:
        (only,) = rundir.all_runs(Path(self.env["TOOLKIT_RUNS"]))
        return only

    def follow_advice(self, pattern: str, *words: str) -> str:
        """Type the command that the advice names, and return what the advice is. It fits ``pattern``."""
        run = self.run
        told = self.type("why", run.id).stdout.splitlines()[-1].removeprefix("next: ")
        assert re.fullmatch(pattern, told), told
        # Every place says the same.
        assert told in self.type("status", run.id).stdout
        if run.result() is not None:
            with pytest.raises(JobFailedError) as failed:
                attach(run).result()
            assert str(failed.value).endswith(f"; next: {told}")
        (command,) = re.findall(r"`toolkit ([^`]*)`", told)
        done = self.type(*shlex.split(command), *words)
        assert "error" not in done.stderr, done.stderr
        return told

    def state(self) -> str:
        result = self.run.result()
        return "none" if result is None else str(result.state)


@pytest.fixture
def site(tmp_path: Path, env: dict[str, str]) -> Iterator[Site]:
    folder = tmp_path / "project"
    folder.mkdir()
    yield Site(folder, env)
    # A loop that a failed test has left waiting ends.
    (folder / "wait").unlink(missing_ok=True)


def loop(site: Site, bad: int, total: int = 12) -> None:
    text = LOOP.replace("PROJECT", str(site.folder)).replace("BAD", str(bad)).replace("TOTAL", str(total))
    (site.folder / "train.py").write_text(text)


def test_a_run_that_failed_goes_on_by_what_its_advice_says(site: Site) -> None:
    loop(site, bad=0)
    done = site.type("submit", "train.py", "checkpoint.every_steps=4", *LOCAL)
    assert "there is no data" in done.stdout
    assert "would fail again unchanged" in done.stdout
    # The surroundings are wrong: the same code continues once they are fixed.
    (site.folder / "data").touch()
    anew = "`toolkit resume [^`]*` starts over, as there is no checkpoint"
    site.follow_advice(rf"fix what the error names .*, then {anew}", "--wait")
    assert len(site.run.attempts()) == 3, "one more start, and the same error once again"
    # The code is wrong, before and after the first checkpoint.
    loop(site, bad=9)
    site.follow_advice(
        r"fix train.py:\d+ in <module>, then `toolkit resume \S+ --code` starts over, as there is no checkpoint, .*",
        "--wait",
    )
    assert site.run.attempts()[-1].step_end == 9
    loop(site, bad=99)
    continuation = (
        "`toolkit resume [^`]* --code` continues from the last checkpoint, with the code that the project has then"
    )
    site.follow_advice(rf"fix train.py:\d+ in <module>, then {continuation}", "--wait")
    assert site.state() == "completed"
    assert site.run.attempts()[-1].step_start == 8


def test_a_run_that_was_ended_comes_back_by_what_its_advice_says(site: Site) -> None:
    loop(site, bad=-1, total=4000)
    for name in ("data", "wait"):
        (site.folder / name).touch()

    def reached(step: int, attempts: int) -> None:
        def has() -> bool:
            status = site.run.status()
            return (status.attempt or 0) == attempts and (status.progress.step or 0) >= step

        wait_for(has, END_S, f"step {step}")

    site.type("submit", "train.py", "checkpoint.every_steps=4000", "--executor", "local")
    reached(6, 1)
    # Cancelled: nothing is saved, and nothing is said to be.
    told = site.type("cancel", site.run.id).stdout
    assert "cancelled; `toolkit resume" in told
    assert "starts over, as there is no checkpoint" in told
    wait_for(site.run.result, END_S, "a result")
    site.follow_advice("`toolkit resume [^`]*` starts over, as there is no checkpoint")
    reached(6, 2)
    told = site.type("stop", site.run.id).stdout
    assert f"when it has ended, `toolkit resume {site.run.id}` continues from there" in told
    wait_for(site.run.result, END_S, "a result")
    site.follow_advice("`toolkit resume [^`]*` continues from the last checkpoint")
    reached(6, 3)
    # Lost: nothing of it is left.
    for pid in processes_with(f"TOOLKIT_RUNS={site.env['TOOLKIT_RUNS']}"):
        with contextlib.suppress(ProcessLookupError):  # ranks end when their agent does
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "lost" in site.type("status", site.run.id).stdout, END_S, "the run to be lost")
    (site.folder / "wait").unlink()
    site.follow_advice(
        "it does not restart by itself; `toolkit resume [^`]*` continues from the last checkpoint", "--wait"
    )
    assert site.state() == "completed"


def test_a_script_that_failed_is_started_again_once_it_is_mended(site: Site) -> None:
    """It fails twice, as a program of its own and in a fork. Each time all that looks at it shows its own words."""
    script = site.folder / "train.py"
    script.write_text("print('loading')\nif True:\n    raise ValueError('no such mode')\n")
    done = site.type("exec", "--follow", "--executor", "local", "--", sys.executable, str(script))
    assert done.returncode == EXIT_FAILED
    assert done.stdout.count("\nloading\nTraceback (most recent call last):\n") == 2, done.stdout
    words = "ValueError: no such mode; given up: the previous attempt ended with the same error at the same line"
    for told in (done.stdout, site.type("status", site.run.id).stdout, str(site.run.result())):
        assert words in told
    assert "train.py:3 in <module>" in site.type("why", site.run.id).stdout
    assert site.type("logs", site.run.id).stdout.startswith("loading\nTraceback")
    assert "attempt 2: crashed (give_up)" in site.type("logs", site.run.id, "--supervisor").stdout
    # The reason may be the text of an exit.
    script.write_text("import sys\nimport torch\nif True:\n    sys.exit('no file data.bin')\n")
    site.follow_advice(r"fix train.py:3 in <module>, then `toolkit resume \S+` starts the script again, .*", "--wait")
    assert [attempt.first_failure.how for attempt in site.run.attempts() if attempt.first_failure] == [
        *["ValueError: no such mode"] * 2,
        *["SystemExit: no file data.bin"] * 2,
    ]
    script.write_text("print('trained')\n")
    site.follow_advice(r"fix train.py:4 in <module>, then `toolkit resume \S+` starts the script again, .*", "--wait")
    assert site.state() == "completed"


#: It takes more than the device has for more than four samples at a time.
TOO_BIG = """
import torch
import toolkit

class Job(toolkit.Job):
    def train_set(self):
        return torch.utils.data.TensorDataset(torch.ones(32, 1), torch.ones(32, 1))

    def model(self):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        if len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return toolkit.Loss.mean((model(batch.inputs) - batch.targets).square().mean())
"""


def test_a_run_without_enough_memory_of_a_gpu_trains_in_parts(site: Site) -> None:
    (site.folder / "big.py").write_text(TOO_BIG)
    (site.folder / "big.yaml").write_text("name: big\njob: big\ndata: {global_batch_size: 8}\ntrain: {epochs: 1}\n")
    site.type("submit", "big.yaml", *LOCAL)
    assert [attempt.cause for attempt in site.run.attempts()] == ["out_of_memory"]
    site.follow_advice(r"`toolkit resume \S+ train.accumulate=2` starts over, as there is no checkpoint", "--wait")
    assert site.state() == "completed"


def test_a_longer_run_is_told_of_its_jumping_rate_and_keeps_it_by_the_command(site: Site) -> None:
    (site.folder / "doubling.py").write_text(DOUBLING)
    (site.folder / "doubling.yaml").write_text(FALLING)
    site.type("submit", "doubling.yaml", *LOCAL)
    step = site.run.result().step
    told = site.type("resume", site.run.id, "train.max_steps=null", "train.epochs=100000").stderr
    (warning,) = re.findall(r"(?m)^warning: (the learning rate was .*)$", told)
    # The rank says the same, in the log that is followed.
    rank = site.run.rank_log(2, 0)
    wait_for(lambda: rank.exists() and "WARNING the learning rate was" in rank.read_text(), END_S, "the rank's line")
    assert warning in rank.read_text()
    cancel, keep = re.findall(r"`toolkit ([^`]*)`", warning)
    site.type(*shlex.split(cancel))
    wait_for(lambda: site.run.result() is not None, END_S, "the end of the run")
    newest = newest_step(site.run.checkpoints)
    done = site.type(*shlex.split(keep), f"train.max_steps={newest + 4}", "--wait")
    assert site.state() == "completed", done.stderr
    lines = [json.loads(line) for line in (site.run.tensorboard / "metrics.jsonl").read_text().splitlines()]
    kept = [line["train/lr"] for line in lines if "train/lr" in line and line["step"] > newest]
    assert len(kept) == 4
    assert f"was {kept[-1]:.4g} at step {step}" in warning
