"""Real kills, full disks and slow disks at exact points of a training.

After them it must end bit for bit the same. CI takes a sample of the points, with a seed that is printed; ``make soak``
takes all.
"""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.test_trainer import assert_same, logged, train, undisturbed  # noqa: F401  # a fixture
from tests.waiting import PATIENCE
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.files import rundir
from toolkit.plugins.testing import faults as chaos
from toolkit.plugins.testing.faults import Fault
from toolkit.ranks.session import Session

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.sample(3)]

ROOT = Path(__file__).parents[2]
RANKS = 3
SEED = random.randrange(10**6)


def count_operations(session: Session, run_dir: Path) -> int:
    """On the files of checkpoints, by rank 0, from the first step to the last."""
    seen: list[str] = []
    with chaos.hook_disk_operations(lambda operation, path: seen.append(path) if "/checkpoints/" in path else None):
        train(session, run_dir)
    return len(seen)


def suffer(session: Session, run_dir: Path, faults: list[dict[str, Any]]) -> Any:
    """Train with these faults in rank 0."""
    mine = [Fault(**fields) for fields in faults if session.rank == 0]
    with chaos.hook_disk_operations(chaos.fault_hook(mine)):
        return train(session, run_dir)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> int:
    return run_ranks(RANKS, count_operations, tmp_path_factory.mktemp("counted"))[0]


def points(total: int, some: int | None) -> list[int]:
    """All of 1..total, or ``some`` of them."""
    print(f"seed {SEED}, {total} operations")
    return sorted(random.Random(SEED).sample(range(1, total + 1), some or total))


SAMPLE = pytest.param(4, id="sample")
ALL = pytest.param(None, id="all", marks=pytest.mark.soak)


@pytest.mark.parametrize("some", [SAMPLE, ALL])
def test_a_rank_killed_at_any_operation_of_its_saves_resumes_from_a_whole_checkpoint(
    undisturbed: Any,  # noqa: F811
    operations: int,
    tmp_path: Path,
    some: int | None,
) -> None:
    assert operations > 30, "three saves, of ten operations and more"
    for point in points(operations, some):
        folder = tmp_path / str(point)
        folder.mkdir()
        # The first error is the dead rank's own, or that of a rank that waits for it.
        first = r"rank 0:\nthe process ended without an answer|rank [12]:[\s\S]*(Connection|Broken pipe)"
        with pytest.raises(AssertionError, match=first):
            run_ranks(RANKS, suffer, folder, [asdict(Fault("SIGKILL", point))])
        checkpoints = CheckpointFolder(folder / "checkpoints")
        assert all(checkpoints.verify(path) for path in checkpoints.list())
        for result, state in run_ranks(RANKS, train, folder):
            assert result == undisturbed[1]
            assert_same(state, undisturbed[2])
        assert not [*checkpoints.folder.glob("*.tmp-*")]
        assert logged(folder, "train/loss") == logged(undisturbed[0], "train/loss")


@pytest.mark.parametrize("some", [pytest.param(3, id="sample"), ALL])
def test_a_disk_that_is_full_for_a_while_ends_no_training(
    undisturbed: Any,  # noqa: F811
    operations: int,
    tmp_path: Path,
    some: int | None,
) -> None:
    for point in points(operations, some):
        folder = tmp_path / str(point)
        folder.mkdir()
        for result, state in run_ranks(RANKS, suffer, folder, [asdict(Fault("ENOSPC", point, count=3))]):
            assert result == undisturbed[1]
            assert_same(state, undisturbed[2])
        checkpoints = CheckpointFolder(folder / "checkpoints")
        assert checkpoints.verify(checkpoints.list()[0]).step == result.step
        assert not [*checkpoints.folder.glob("*.tmp-*")]


def test_a_slow_disk_changes_nothing_but_the_time(undisturbed: Any, tmp_path: Path) -> None:  # noqa: F811
    started = time.monotonic()
    for result, state in run_ranks(RANKS, suffer, tmp_path, [asdict(Fault("slow", 1, count=1000, seconds=0.03))]):
        assert result == undisturbed[1]
        assert_same(state, undisturbed[2])
    assert time.monotonic() - started > 30 * 0.03


def test_a_fault_in_the_environment_strikes_the_rank_and_attempt_it_names(tmp_path: Path) -> None:
    """A user sets the fault, and a supervisor runs the job. Attempt 1 dies in its save, attempt 2 completes."""
    fault = [{"kind": "SIGKILL", "rank": 0, "attempt": 1, "operation": 5}]
    environ = {
        **os.environ,
        "TOOLKIT_RUNS": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        chaos.CHAOS_VARIABLE: json.dumps(fault),
    }
    argv = [sys.executable, "-m", "toolkit", "submit", "configs/digits_ddp.yaml", "--executor", "local", "--wait"]
    argv += ["train.max_steps=40", "checkpoint.every_steps=20"]
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE * 120)
    assert done.returncode == 0, done.stderr
    (run,) = rundir.all_runs(tmp_path)
    assert [attempt.cause for attempt in run.attempts()] == ["crashed", "completed"]


def test_a_fault_that_is_none_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ConfigError, match="'SIGFOO' is not a signal"):
        chaos.parse('[{"kind": "SIGFOO", "operation": 1}]')
    with pytest.raises(ConfigError, match="is not a list such as"):
        chaos.parse('{"kind": "SIGKILL"')
