"""`toolkit resume-check` says IDENTICAL only if it is true.

With each cure switched off it finds the difference that the cure prevents.
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import in_run, run_ranks
from tests.waiting import PATIENCE, wait_for
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data import workers
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader, eval_batches
from toolkit.data.randomness import seed_for_init
from toolkit.files.run_files import AttemptRecord, RunResult
from toolkit.files.rundir import TRACE_VARIABLE, RunDir, all_runs
from toolkit.plugins.site.resume_compare import (
    DIFFERENT,
    EPOCH_END,
    FIRST_EPOCH,
    IDENTICAL,
    InterruptionPlan,
    Resume,
    ResumeCheckReport,
    compare,
)
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.strategies.optimizer_state import OptimizerState
from toolkit.strategies.spmd import Spmd
from toolkit.train import loop
from toolkit.train.evaluate import evaluate
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

STEPS, DIES_IN, SAVED = 10, 7, 4
SAMPLES, BATCH = 50, 26  # over 4 ranks: shares of 6 and 7, and an epoch ends within a batch


class Images:
    """A data set whose augmentation draws from all three generators."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 3, 8, 8, generator=draw)
        self.targets = torch.randint(5, (SAMPLES,), generator=draw)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shifted = torch.roll(self.inputs[index], int(torch.randint(8, ())), dims=-1)
        bright = shifted * random.uniform(0.5, 1.5) + np.random.normal()
        return bright, int(self.targets[index])


def model() -> nn.Module:
    """Wide enough for several of DDP's buckets, whose layout changes after its first iteration."""
    wide = nn.Linear(8 * 64, 1024), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1024, 5)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), *wide)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 5))


def from_its_own_start(plain_at: Callable[[Loader, int], Any]) -> Callable[[Loader, int], Any]:
    """Return a loader's ``at`` that ignores the step. It counts the batches since the loader was made."""
    given: dict[int, int] = {}

    def at(self: Loader, step: int) -> Any:
        if step or given:
            given[id(self)] = given.get(id(self), -1) + 1
        return plain_at(self, given.get(id(self), 0))

    return at


#: Each by what it is good for: how to switch it off, and what then differs first. Buffers that are not equalised are
#: missing here: the save itself refuses them.
CURES: dict[str, tuple[Callable[[], None], str]] = {
    "each sample has its seed": (lambda: setattr(workers, "seed_sample", lambda *_: None), "inputs"),
    "each step has its seed": (lambda: setattr(loop, "reseed", lambda *_: None), "random"),
    "every start primes": (lambda: setattr(Spmd, "_prime", lambda *_: None), "weights"),
    "the step is the position": (lambda: setattr(Loader, "at", from_its_own_start(Loader.at)), "positions"),
    "the optimizer is saved": (lambda: setattr(OptimizerState, "entries", lambda _: {}), "weights"),
}


def judge(strategy: Strategy, is_interrupted: Callable[[], bool]) -> dict[str, float] | None:
    draw = torch.Generator().manual_seed(2)
    test_set = InMemory(torch.randn(37, 3, 8, 8, generator=draw), torch.randint(5, (37,), generator=draw))
    return evaluate(strategy, eval_batches(test_set, strategy.share, 8), 37, classification, is_interrupted)


def train(session: Session, run_dir: Path, attempt: int, off: str | None, dies: bool, small: bool) -> Any:
    """Make one attempt. With ``dies`` rank 1 loses its data in step ``DIES_IN``, and nothing is saved at the end."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers
    if off is not None:
        CURES[off][0]()
    os.environ[TRACE_VARIABLE] = "{}"
    torch.manual_seed(attempt)  # as a process that has just started has its own
    random.seed(attempt)
    np.random.seed(attempt)
    session = in_run(session, run_dir, attempt)
    config = TrainConfig(epochs=100, max_steps=STEPS, seed=3, log_every=5, eval_every=5)
    seed_for_init(config.seed)
    strategy = build_strategy(StrategyConfig(), session)
    loader = Loader(Images(), global_batch_size=BATCH, seed=3, share=strategy.share, workers=0 if small else 2)
    optim = OptimConfig("adamw", lr=0.01)
    make = partial(build_optimizer, optim)
    strategy.build(plain_model if small else model, make, criterion_objective(cross_entropy), loader.at(0))
    checkpoints = Checkpoints(CheckpointConfig(SAVED), session, strategy, identity(JobConfig()))
    schedule = partial(build_schedule, optim)
    trainer = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    if dies:
        mourn(trainer)
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.fit(judge)
    else:
        result = trainer.fit(judge)
    loader.close()
    return None if dies else asdict(result)


def mourn(trainer: Trainer) -> None:
    plain_at = trainer._loader.at

    def at(step: int) -> Any:
        if step == DIES_IN:
            raise OSError("the disk is gone")
        return plain_at(step)

    trainer._loader.at = at


def note_attempt(run: RunDir, attempt: int, world_size: int, step_start: int) -> None:
    """The line that a supervisor would have written at its end."""
    times = {"started": "2026-11-20T15:00:00.000+00:00", "ended": "2026-11-20T15:01:00.000+00:00"}
    end = {"step_end": newest_step(run.checkpoints), "cause": "crashed", "decision": "restart"}
    end |= {"line": "", "nodes": "here"}
    run.add_attempt(
        AttemptRecord.from_json(
            {"attempt": attempt, "world_size": world_size, "step_start": step_start, **times, **end}
        )
    )


def check(folder: Path, *, off: str | None = None, then: int = 4) -> ResumeCheckReport:
    """Both runs on 4 ranks, the second one continuing with ``then``, and the comparison."""
    small, plan = then != 4, InterruptionPlan(STEPS, struck=("rank 1",))
    whole, killed = RunDir(folder / "whole"), RunDir(folder / "killed")
    for run, ranks in ((whole, [4]), (killed, [4, then])):
        run.path.mkdir()
        for attempt, count in enumerate(ranks, 1):
            dies = attempt < len(ranks)
            results = run_ranks(count, train, run.path, attempt, off, dies, small)
            start = 0 if attempt == 1 else SAVED
            note_attempt(run, attempt, count, start)
        run.write_result(RunResult.from_json({"state": "completed", **results[0]}))
    return compare(whole, killed, plan)


def test_a_killed_run_is_identical_with_batch_norm_dropout_augmentation_and_workers(
    tmp_path: Path,
) -> None:
    report = check(tmp_path)
    assert (report.first, report.different, report.conditions) == (None, {}, {})
    assert report.verdict == IDENTICAL
    assert (report.steps, report.ranks) == (STEPS, (4,))
    assert report.resumed == (Resume(SAVED, EPOCH_END),)


@pytest.mark.parametrize(("off", "first"), [(name, cure[1]) for name, cure in CURES.items()])
def test_each_cure_is_missed(off: str, first: str, tmp_path: Path) -> None:
    report = check(tmp_path, off=off)
    assert (report.verdict, report.broken) == (DIFFERENT, 0)
    assert next(iter(report.different)) == first, report.different
    assert report.first in range(SAVED, STEPS)


@pytest.mark.parametrize("then", [3, 2])
def test_another_number_of_ranks_goes_on_with_the_same_samples(then: int, tmp_path: Path) -> None:
    report = check(tmp_path, then=then)
    assert report.verdict == IDENTICAL, report.different
    assert report.ranks == (4, then)
    assert 0 < report.worst_loss < 1e-4


def command(runs: Path, *words: str, project: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "toolkit", "resume-check", *words, "--executor", "local"]
    environ = {"TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        argv, cwd=project, env=environ, capture_output=True, text=True, timeout=PATIENCE * 120, check=False
    )


def test_the_command_says_what_was_done_and_found(tmp_path: Path) -> None:
    """Its two runs are no longer there, for they have nothing to show."""
    done = command(tmp_path, "configs/digits_ddp.yaml", "--steps", "20", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["steps"], report["ranks"]) == (IDENTICAL, 20, [2])
    assert "seed" in done.stderr
    assert all_runs(tmp_path) == []


#: A layer and the job itself draw from generators of their own, of each kind.
NOISY_JOB = """
import random
import numpy as np
import torch
from torch import nn
import toolkit

class Noise(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.rngs = [torch.Generator().manual_seed(seed), np.random.default_rng(seed)]

    def forward(self, x):
        return x + torch.randn(x.shape, generator=self.rngs[0]) + float(self.rngs[1].normal())

class Noisy(toolkit.Job):
    def setup(self):
        self.rng = random.Random(3)

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), Noise(1), nn.ReLU(), nn.Linear(8, 2), Noise(2))

    def train_set(self):
        return torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randint(2, (30,)))

    def loss(self, model, batch):
        each = nn.functional.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        return self.rng.uniform(0.5, 1.5) * each
"""


def test_generators_that_a_job_and_its_layers_hold_come_to_their_place(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY_JOB)
    (tmp_path / "noisy.yaml").write_text("job: noisy\ndata: {global_batch_size: 6}\ncluster: {tasks_per_node: 3}\n")
    done = command(tmp_path / "runs", "noisy.yaml", "--steps", "24", "--json", project=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["steps"], report["ranks"]) == (IDENTICAL, 24, [3])


#: A loop of one's own that decides by itself how long it is.
SHORT_LOOP = """
import torch
import toolkit

with toolkit.start() as run:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.resumable(model=model, optimizer=optimizer)
    loader = run.loader([(torch.ones(1), 0)] * 24, global_batch_size=2)
    for batch in run.steps(loader, total=12):
        loss = (model(batch.inputs) - 2).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
"""


def test_a_loop_that_ends_before_the_steps_asked_for_is_struck_within(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHORT_LOOP)
    done = command(tmp_path / "runs", "train.py", "--json", project=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["steps"]) == (IDENTICAL, 12)
    assert [resume["place"] for resume in report["resumed"]] == [FIRST_EPOCH]


def test_what_a_script_leaves_in_its_project_is_no_source_of_the_second_run(tmp_path: Path) -> None:
    """As scripts do that write their own checkpoints into the current folder."""
    leaves = "    with open('own.pt', 'wb') as own:\n        own.truncate(201 * 2**20)\n"
    (tmp_path / "train.py").write_text(SHORT_LOOP + leaves)
    done = command(tmp_path / "runs", "train.py", "--json", project=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == IDENTICAL


def test_a_resume_that_has_a_run_fail_is_told_as_different(tmp_path: Path) -> None:
    """The script forgets a count, and fails of it two steps after the resume."""
    count, ends = (
        "    seen = 0\n    for",
        "        seen += 1\n        assert seen > 3 or run.step != 9, 'fell behind'\n",
    )
    (tmp_path / "train.py").write_text(
        SHORT_LOOP.replace("    for", count).replace("loss=loss)", "loss=loss, seen=float(seen))") + ends
    )
    done = command(tmp_path / "runs", "train.py", "checkpoint.every_steps=7", "--at", "7", project=tmp_path)
    assert done.returncode == 1, done.stderr
    words = " ".join(done.stdout.split())
    assert "DIFFERENT from step 7 on" in words
    assert "fell behind" in words
    assert len(all_runs(tmp_path / "runs")) == 2


def test_a_script_that_loads_its_own_checkpoint_is_told_that_it_reads_the_first_run(tmp_path: Path) -> None:
    loads = "        model.load_state_dict(torch.load('last.pt'))\n    run.resumable"
    (tmp_path / "train.py").write_text(
        "import os\n"
        + SHORT_LOOP.replace("    run.resumable", f"    if os.path.exists('last.pt'):\n{loads}")
        + "    torch.save(model.state_dict(), 'last.pt')\n"
    )
    done = command(tmp_path / "runs", "train.py", project=tmp_path)
    assert done.returncode == 1, done.stderr
    words = " ".join(done.stdout.split())
    assert "DIFFERENT from step 0 on" in words
    assert "such as a checkpoint of the script's own" in words


def test_a_run_that_fails_by_itself_is_not_resumed(tmp_path: Path) -> None:
    before = "from pathlib import Path\nif Path('last').exists():\n    import no_such_module\n"
    (tmp_path / "train.py").write_text(before + SHORT_LOOP + "    Path('last').touch()\n")
    done = command(tmp_path / "runs", "train.py", project=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "no_such_module" in done.stderr
    (disturbed,) = (run for run in all_runs(tmp_path / "runs") if "-disturbed" in str(run.path))
    assert len(disturbed.attempts()) == 1


def test_a_step_after_the_end_of_a_loop_is_refused_with_what_to_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHORT_LOOP)
    done = command(tmp_path / "runs", "train.py", "--at", "20", project=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "ended by itself after 12 of the 60 steps, and --at must be within 1..10" in done.stderr
    assert "the script's own loop" in done.stderr


@pytest.mark.parametrize(
    ("script", "words", "code", "says"),
    [
        (SHORT_LOOP.replace("lr=0.1", "lr=0.0"), (), 3, "PROVES NOTHING: nothing of what is saved changes"),
        # The kill comes before the user's first save.
        (SHORT_LOOP, ("checkpoint.every_steps=10", "--at", "5"), 3, "PROVES NOTHING: no resumed run read a checkpoint"),
        ("import torch\nprint(torch.ones(1))\n", (), 2, "its training must be a job of the toolkit's"),
        (
            "from toolkit.plugins.integrations import LightningCallback\ncallback = LightningCallback()\n",
            (),
            2,
            "a library's own loop is not recorded",
        ),
    ],
    ids=["no state to lose", "no checkpoint read", "no toolkit", "a library's loop"],
)
def test_a_check_that_proves_nothing_does_not_pass(
    script: str, words: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    done = command(tmp_path / "runs", "train.py", *words, project=tmp_path)
    assert done.returncode == code, done.stderr
    assert says in " ".join((done.stdout + done.stderr).split())
    assert all_runs(tmp_path / "runs") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_interrupted_leaves_no_run(tmp_path: Path, number: signal.Signals) -> None:
    slow = SHORT_LOOP.replace("        loss", "        time.sleep(1)\n        loss", 1)
    (tmp_path / "train.py").write_text("import time\n" + slow)
    runs = tmp_path / "runs"
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "toolkit", "resume-check", "train.py"]
    argv += ["--executor", "local"]
    environ = {"TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(argv, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: any((run.status().progress.step or 0) > 0 for run in all_runs(runs)), 120, "a step")
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE * 60)
    assert "is ended and removed" in said
    assert all_runs(runs) == []


def test_a_function_that_makes_no_steps_of_the_toolkit_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main(config):\n    print(config.optim.lr)\n")
    done = command(tmp_path / "runs", "train.py", project=tmp_path)
    assert done.returncode != 0
    assert "a loop over run.steps() of toolkit.start()" in done.stderr
    assert all_runs(tmp_path / "runs") == []
