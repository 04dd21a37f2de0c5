"""An error for which the rules know that no restart helps is not tried again, unless the run has worked before."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.base import fsio
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import PastAttempt, RankFailure
from toolkit.run.supervise.conclude import note_recurring

HYDRA = "Could not override 'optim.lrr'.\nKey 'lrr' is not in struct\n    full_key: optim.lrr\n"
NO_MODULE = "ModuleNotFoundError: No module named 'einops'"
NO_FILE = "FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'"
NO_DRIVER = "RuntimeError: Found no NVIDIA driver on your system."
CONFIG = "ConfigAttributeError: Key 'lrr' is not in struct"


def judged(
    tmp_path: Path,
    failures: dict[int, str],
    hosts: str = "a",
    *,
    log: str = "",
    history: Sequence[PastAttempt] = (),
    steps: int | None = None,
) -> set[int | None]:
    """Return the ranks whose errors no restart would fix.

    ``hosts`` has a letter for the node of each rank. The run is a script, or with ``steps`` a job that has made these.
    """
    run = rundir.create("script", tmp_path / "runs")
    nodes = tuple(dict.fromkeys(hosts))
    plan = Allocation(nodes, tuple(map(hosts.count, nodes)), 1)
    attempt = Attempt(1, time.time(), plan, progress=RunProgress(step=steps, step_start=0))
    attempt.end(1)
    attempt.close()
    fsio.make_dir(run.attempt_logs(1))
    for rank, how in failures.items():
        traceback = "" if how.startswith("exit code") else f"Traceback (most recent call last):\n{how}\n"
        attempt.fail(RankFailure(rank, hosts[rank], how, 1.0, traceback=traceback))
        run.rank_log(1, rank).write_text(log)
    context: Any = SimpleNamespace(
        run=run,
        config=JobConfig(),
        is_script=steps is None,
        allocation=plan,
        nodes=SimpleNamespace(plan=lambda: None),
        journal=SimpleNamespace(history=lambda: history),
    )
    note_recurring(context, attempt)
    return {failure.rank for failure in attempt.failures if failure.comes_again}


@pytest.mark.parametrize("how", [NO_MODULE, NO_FILE, NO_DRIVER, CONFIG])
def test_what_each_attempt_would_lack_is_not_tried_again(how: str, tmp_path: Path) -> None:
    assert judged(tmp_path, {0: how, 1: how}, "aa") == {0, 1}
    assert judged(tmp_path, {0: how, 1: how}, "ab") == {0, 1}


def test_the_log_tells_of_a_script_without_an_exception(tmp_path: Path) -> None:
    assert judged(tmp_path, {0: "exit code 1; it printed last: Key"}, log=HYDRA) == {0}
    assert judged(tmp_path, {0: "exit code 127"}, log="train.sh: line 3: torchrun: command not found\n") == {0}
    # What was printed long before the end, or is not known, says nothing.
    assert judged(tmp_path, {0: "exit code 1"}, log=HYDRA + "loading a shard\n" * 40) == set()
    assert judged(tmp_path, {0: "exit code 1"}, log="bye\n") == set()


@pytest.mark.parametrize("how", [NO_MODULE, NO_FILE, NO_DRIVER])
def test_what_one_node_or_one_rank_may_lack_is_tried_again(how: str, tmp_path: Path) -> None:
    assert judged(tmp_path, {0: how}, "ab") == set()
    assert judged(tmp_path, {1: how}, "ab") == set()
    assert judged(tmp_path, {1: how}, "aa") == set()  # rank 0 may have been writing the file


@pytest.mark.parametrize(
    "how",
    [
        "OSError: [Errno 116] Stale file handle",
        "RuntimeError: CUDA error: unspecified launch failure",
        "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
        "ValueError: bad",
    ],
)
def test_other_errors_have_their_restarts(how: str, tmp_path: Path) -> None:
    assert judged(tmp_path, {0: how}) == set()


def test_a_run_that_has_worked_is_tried_again(tmp_path: Path) -> None:
    assert judged(tmp_path, {0: NO_FILE}, history=[PastAttempt("crashed", "restart", None, lost_s=4000.0)]) == set()
    assert judged(tmp_path, {0: NO_FILE}, history=[PastAttempt("crashed", "restart", None, lost_s=40.0)]) == {0}
    assert judged(tmp_path, {0: NO_FILE}, steps=7) == set()
    assert judged(tmp_path, {0: NO_FILE}, steps=0) == {0}
