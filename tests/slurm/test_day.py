"""A day on a cluster: a sweep of many runs under faults.

Nodes die, jobs are preempted, the disk fills and Slurm restarts.

``make soak`` plays it with TOOLKIT_DAY_RUNS runs, 300 by default. TOOLKIT_SEED repeats the order of the faults.
"""

import itertools
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box, BoxError
from tests.slurm.conftest import visit_with_small_disk
from tests.slurm.site import END_S, Site
from tests.slurm.watched import say
from tests.waiting import wait_for
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

#: About six seconds of training, most of it waiting.
STEPS = 120
SAVE_EVERY = 20
#: Runs that work at a time: each fault meets some of them.
ABREAST = 12
CONFIG = f"""
job: jobs.day
cluster: {{nodes: 1, tasks_per_node: 1, time_min: 600, preflight: false}}
retry: {{max_failures: 100, max_requeues: 1000, no_progress_attempts: 10}}
dist: {{timeout_s: 120}}
data: {{name: digits, global_batch_size: 64}}
train: {{epochs: 1000, max_steps: {STEPS}, eval_every: {STEPS}, log_every: 10}}
checkpoint: {{every_steps: {SAVE_EVERY}}}
"""
#: Each step is written where no fault reaches.
JOB = """
import os, time
from jobs import classify
from toolkit.data.loader import Loader
plain_at = Loader.at
def main(config):
    def at(self, step):
        time.sleep(0.05)
        return plain_at(self, step)
    Loader.at = at
    classify.Classify.main(config, classify.Params())
    with open(f"{traces}/{{config.train.seed}}", "a") as file:
        file.write("done\\n")
"""
#: The longest time without a newly completed run.
STUCK_S = 420


@pytest.fixture
def day(make_box: Callable[..., Box], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Site, Path]]:
    """A site whose runs lie on a small shared disk, and that disk."""
    yield from visit_with_small_disk(make_box, request, tmp_path, "1g")


def kill_a_node(node: str) -> Callable[[Site, Path], Callable[[], None]]:
    def kill(site: Site, disk: Path) -> Callable[[], None]:
        site.box.kill_node(node)

        def fix() -> None:
            site.box.start_node(node)
            site.box.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)

        return fix

    return kill


def preempt(site: Site, disk: Path) -> Callable[[], None]:
    """Take all nodes for five seconds."""
    site.preempt(5)
    return lambda: None


def fill_the_disk(site: Site, disk: Path) -> Callable[[], None]:
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler.unlink


def restart_the_controller(site: Site, disk: Path) -> Callable[[], None]:
    site.box.restart_slurmctld()
    return lambda: None


FAULTS: Mapping[str, Callable[[Site, Path], Callable[[], None]]] = {
    "node2 dies": kill_a_node("node2"),
    "node3 dies": kill_a_node("node3"),
    "node4 dies": kill_a_node("node4"),
    "a preemption of all": preempt,
    "the disk is full": fill_the_disk,
    "the controller restarts": restart_the_controller,
}
#: A dead node, and a full disk, come back after this time.
ABSENCE_S = 20.0


def play(site: Site, disk: Path, project: Path, runs: int, dice: random.Random) -> None:
    """Make each fault once, evenly over the sweep, and wait until every run has ended."""
    order = dice.sample(sorted(FAULTS), len(FAULTS))
    for number, name in enumerate(order, 1):
        await_done(site, runs * number // (len(order) + 1))
        say(f"{done(site)} of {runs} runs are done: {name}")
        fix = FAULTS[name](site, disk)
        time.sleep(ABSENCE_S)
        fix()
    await_done(site, runs)


def done(site: Site) -> int:
    return len(list((site.folder / "traces").iterdir()))


def await_done(site: Site, count: int) -> None:
    """Wait until so many runs are done. Jobs that a full disk has ended before their runs get what the table says."""
    seen, since, looked = done(site), time.monotonic(), time.monotonic()
    while seen < count:
        time.sleep(0.5)
        if done(site) > seen:
            seen, since = done(site), time.monotonic()
        if time.monotonic() > looked + 30:
            looked = time.monotonic()
            release_held(site)
            states = Counter(row["state"].split()[0] for row in rows_of(site))
            say(f"{seen} runs are done; {dict(states)}")
            if states.keys() <= {"completed", "lost"} and states["lost"]:
                say(out_of(site, "sweep", "retry", "day"))
        assert time.monotonic() < since + STUCK_S, site.run("toolkit", "sweep", "status", "day", "--all", check=False)


def goes_on_from_its_last_checkpoint(run: RunDir) -> None:
    attempts = [attempt for attempt in run.attempts() if attempt.step_end is not None]
    for before, after in itertools.pairwise(attempts):
        assert 0 <= before.step_end - after.step_start <= SAVE_EVERY, (before, after)


def release_held(site: Site) -> None:
    """Release held jobs, as an administrator does. A node that died refuses jobs from before its death."""
    box = site.box
    with suppress(BoxError, subprocess.TimeoutExpired):
        away = box.run(["sinfo", "--noheader", "--states=drain", "--format=%N"]).stdout.split()
        if away:
            box.run(["scontrol", "update", f"nodename={','.join(away)}", "state=resume"], check=False)
        for line in box.run(["squeue", "--noheader", "--array", "--format=%i %T %r"]).stdout.splitlines():
            job, state, reason = line.split(maxsplit=2)
            if state == "REQUEUE_HOLD" or (state == "PENDING" and "held" in reason.lower()):
                box.run(["scontrol", "release", job], check=False)


def rows_of(site: Site) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(out_of(site, "sweep", "status", "day", "--json"))
    return rows


def slurms_word(site: Site) -> Mapping[str, Sequence[tuple[str, float, float]]]:
    """Return each start of each job as accounting has it: final state, begin and end."""
    argv = ["sacct", "--duplicates", "--allocations", "--allusers", "--noheader", "--parsable2", "--starttime=today"]
    out = site.box.run([*argv, "--format=JobID,State,Start,End"], env={"SLURM_TIME_FORMAT": "%s"}).stdout
    starts: dict[str, list[tuple[str, float, float]]] = {}
    for line in out.splitlines():
        job, state, begin, end = line.split("|")
        if begin.isdigit() and end.isdigit():  # else it waited, and was cancelled or requeued without a start
            starts.setdefault(job, []).append((state.split()[0], float(begin), float(end)))
    return starts


def attempts_as_slurm_has_them(
    run: RunDir, starts: Mapping[str, Sequence[tuple[str, float, float]]]
) -> list[AttemptRecord]:
    """Return the run's attempts. Assert that each was in a start of its job, and that one start completed."""
    attempts = run.attempts()
    own = {str(attempt.job_id): starts[str(attempt.job_id)] for attempt in attempts}
    assert [state for each in own.values() for state, _, _ in each].count("COMPLETED") == 1, (run.path, own)
    for attempt in attempts:
        # Slurm counts in whole seconds. To it a start ends as it is preempted, and its processes have KillWait to end.
        spans = [(begin - 1, end + (30 if how == "PREEMPTED" else 1)) for how, begin, end in own[str(attempt.job_id)]]
        assert any(begin <= attempt.started <= attempt.ended <= end for begin, end in spans), (attempt, own)
    return attempts


def out_of(site: Site, *argv: str) -> str:
    env = {"TOOLKIT_RUNS": str(site.runs)}
    return site.box.run(["toolkit", *argv], env=env, user=site.user, timeout=END_S).stdout


def test_a_day_of_many_runs_ends_with_nothing_lost(day: tuple[Site, Path]) -> None:
    site, disk = day
    runs = int(os.environ.get("TOOLKIT_DAY_RUNS", "300"))
    seed = int(os.environ.get("TOOLKIT_SEED", random.randrange(10**6)))
    say(f"TOOLKIT_SEED={seed}, {runs} runs")
    source = Path(__file__).parents[2] / "jobs"
    jobs = {name: (source / f"{name}.py").read_text() for name in ("classify", "models")}
    project = site.project(**jobs, day=JOB.format(traces=site.folder / "traces"))
    (project / "day.yaml").write_text(CONFIG)
    began = time.monotonic()
    say(
        site.run(
            "toolkit",
            "sweep",
            "day.yaml",
            f"train.seed=0..{runs - 1}",
            "--name",
            "day",
            f"--max-running={ABREAST}",
            cwd=project,
        )
    )
    say(f"submitted after {time.monotonic() - began:.1f} s")
    play(site, disk, project, runs, random.Random(seed))
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), END_S, "an empty queue")
    say(f"everything has ended after {time.monotonic() - began:.0f} s")

    # Every point once, and all of its steps.
    rows = rows_of(site)
    assert sorted(row["values"]["train.seed"] for row in rows) == list(range(runs))
    assert Counter(row["state"] for row in rows) == {"completed": runs}, [r for r in rows if r["state"] != "completed"]
    assert {row["step"] for row in rows} == {STEPS}
    for row in rows:
        # An attempt may have said "done" and been preempted before it could end: then its last one says so, too.
        assert (site.folder / "traces" / str(row["values"]["train.seed"])).read_text().startswith("done\n")
        goes_on_from_its_last_checkpoint(RunDir(Path(row["path"])))

    # Slurm's accounting says the same: each point has come to its end once, and each attempt was in a start of its job.
    starts = slurms_word(site)
    say(f"by sacct: {dict(Counter(ended for each in starts.values() for ended, _, _ in each))}")
    attempts = [attempt for row in rows for attempt in attempts_as_slurm_has_them(RunDir(Path(row["path"])), starts)]

    # What the faults did is in the runs' own files, and in the report.
    causes = Counter(attempt.cause for attempt in attempts)
    say(f"{len(attempts)} attempts: {dict(causes)}")
    assert causes["completed"] == runs
    assert causes["preempted"]
    disturbed = [row["run"] for row in rows if row["attempt"] > 1]
    assert disturbed
    report = site.folder / "day.html"
    site.run("toolkit", "report", *disturbed[:20], "--to", str(report), cwd=project)
    text = report.read_text()
    shown = {attempt.cause for run in disturbed[:20] for attempt in site.find(run).attempts()}
    assert [cause for cause in shown if cause.replace("_", " ") not in text and cause not in text] == []
