"""A node that is really slow, for long.

Its rank gets a fraction of the processor, by SIGSTOP and SIGCONT.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.site import END_S, Site
from tests.slurm.test_stop import slow_project
from tests.waiting import wait_for
from toolkit.files.run_files import Straggler
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

#: A rank on the slow node is frozen for this long of each period.
FROZEN_S, PERIOD_S = 0.12, 0.16
#: The reference job, slowed down, and "for long" brought down to the seconds of a test.
QUICK = """
from functools import partial
from toolkit.plugins.report import stragglers
from jobs import slow
def main(config):
    stragglers.Stragglers = partial(stragglers.Stragglers, span_s=4.0)
    return slow.main(config)
"""


@contextmanager
def throttled(pid: int) -> Iterator[None]:
    """The process runs a quarter of the time only."""
    done = threading.Event()

    def throttle() -> None:
        while not done.wait(PERIOD_S - FROZEN_S):
            os.kill(pid, signal.SIGSTOP)
            done.wait(FROZEN_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def slow_now(run: RunDir) -> list[Straggler]:
    told = run.status().progress.stragglers
    return [entry for entry in told if entry.until is None]


def test_a_slow_node_is_named_while_it_is_slow_and_remembered_afterwards(site: Site) -> None:
    project = slow_project(site, 0.02)
    # QUICK shortens the span over which a rank must be slow, else the test would take minutes.
    (project / "jobs/quick.py").write_text(QUICK)
    size = ["cluster.nodes=4", "job=jobs.quick", "train.log_every=20", "notify.command=[sh, -c, 'echo $TOOLKIT_STATE']"]
    size.append("cluster.preflight=false")  # it would put a node last whose core it finds slow
    site.run("toolkit", "submit", "slow.yaml", *size, cwd=project)
    run = site.only_run()
    wait_for(lambda: run.step() >= 40, END_S, "step 40")
    with throttled(site.ranks("node3")[0]):
        (entry,) = wait_for(lambda: slow_now(run), END_S, "the slow node's name")
        status = site.run("toolkit", "status", run.id)
        print(status)
    assert (entry.host, entry.ranks) == ("node3", (2,))
    assert entry.ratio > 1.3
    assert "node3 (rank 2) is " in status
    wait_for(lambda: not slow_now(run), END_S, "its recovery")
    assert " times slower" not in site.run("toolkit", "status", run.id)
    site.run("toolkit", "stop", run.id)
    site.box.wait_job(run.submission().job_id, END_S)
    why = site.run("toolkit", "why", run.id)
    print(why)
    assert "slow: node3 (rank 2) was " in why
    assert "cluster.exclude=node3" in why
    (attempt,) = run.attempts()
    assert [slow.host for slow in attempt.slow_nodes] == ["node3"]
    assert (run.logs / "notify.log").read_text() == "stopped\n"


def test_the_error_files_of_a_foreign_script_lie_in_the_runs_logs_and_are_told(site: Site) -> None:
    """torch's own ``record`` writes them, where it finds TORCHELASTIC_ERROR_FILE."""
    script = site.folder / "train.py"
    script.write_text(FOREIGN)
    overrides = ["cluster.nodes=2", "cluster.tasks_per_node=2", "retry.max_failures=0"]
    out = site.run("toolkit", "exec", *overrides, "--wait", "--", "python", str(script), check=False)
    run = site.only_run()
    files = sorted(run.attempt_logs(1).glob("error-*.json"))
    assert [path.name for path in files] == ["error-1.json", "error-3.json"], out
    one, three = (json.loads(path.read_text())["message"]["extraInfo"]["timestamp"] for path in files)
    first = 1 if int(one) <= int(three) else 3  # on a busy machine it may be the other one
    why = site.run("toolkit", "why", run.id)
    print(why)
    assert (
        f"first failure: rank {first} on node{1 + first // 2}, attempt 1: ValueError: rank {first} has no data" in why
    )
    assert "1 other rank failed after it" in why
    assert str(Path(run.path) / f"logs/attempt-001/rank-{first}.log") in why


FOREIGN = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    rank = int(os.environ["RANK"])
    if rank % 2 == 0:
        time.sleep(600)
    time.sleep(rank * 0.1)
    raise ValueError(f"rank {rank} has no data")
main()
"""
