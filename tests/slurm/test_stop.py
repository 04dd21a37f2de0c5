"""Jobs that end and come back: preemption, time limit, cancellation, faults of the controller.

``make test`` runs a sample. ``make soak`` runs all on every Slurm version and profile, and repeats the random ones.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box
from tests.slurm.conftest import visit
from tests.slurm.site import END_S, START_S, Site, attempts_of, nothing_lost, pid_of_supervisor, reached
from tests.waiting import wait_for
from toolkit.checkpoint.folder import newest_step
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership

pytestmark = [pytest.mark.slurm, pytest.mark.sample(2)]

NODES = ["cluster.nodes=2", "cluster.tasks_per_node=1"]
LONG = [*NODES, "train.epochs=20000", "checkpoint.every_steps=1000"]
#: The training of the reference job with a pause in each step, and another one late in the first attempt: a long one
#: where on a busy machine, too, something is to be done to the run before its end.
SLOW = """
import os, time
from jobs import classify
from toolkit.data.loader import Loader
plain_at = Loader.at
def at(self, step):
    time.sleep({late_s} if step > 200 and os.environ["TOOLKIT_ATTEMPT"] == "1" else {pause_s})
    return plain_at(self, step)
def main(config):
    Loader.at = at
    return classify.Classify.main(config, classify.Params())
"""


WITH_A_BAD_SAMPLE = """
import os
from jobs import classify
from toolkit.data.loader import Loader
plain_at = Loader.at
def at(self, step):
    if step == 30 and os.environ["RANK"] == "1":
        raise ValueError("bad sample")
    return plain_at(self, step)
def main(config):
    Loader.at = at
    return classify.Classify.main(config, classify.Params())
"""


def slow_project(site: Site, pause_s: float, late_s: float | None = None) -> Path:
    """A project with the reference job, slowed down, and its config ``slow.yaml``."""
    source = Path(__file__).parents[2] / "jobs"
    jobs = {name: (source / f"{name}.py").read_text() for name in ("classify", "models")}
    project = site.project(**jobs, slow=SLOW.format(pause_s=pause_s, late_s=late_s or pause_s))
    (project / "slow.yaml").write_text(
        "job: jobs.slow\ncluster: {nodes: 2, tasks_per_node: 1}\n"
        "data: {name: digits, global_batch_size: 64}\noptim: {lr: 0.05}\n"
        "train: {epochs: 100, eval_every: 50, log_every: 10}\ncheckpoint: {every_steps: 100000}\n"
    )
    return project


def submit(site: Site, project: Path, *overrides: str, **extra: Any) -> RunDir:
    """Submit ``slow.yaml``; ``extra`` are sbatch flags."""
    flags = json.dumps({name.replace("_", "-"): value for name, value in extra.items()})
    site.run("toolkit", "submit", "slow.yaml", f"cluster.extra={flags}", *overrides, cwd=project)
    return site.only_run()


def completed(site: Site, run: RunDir, timeout_s: float = END_S) -> RunResult:
    """The result of a run that completes."""
    result = wait_for(run.result, timeout_s, "a result")
    assert result.state == "completed", f"{result.state}: {result.why}\n{site.run('toolkit', 'why', run.id)}"
    return result


def preempt_at_random_moments(site: Site, times: int, seed: int) -> None:
    """Preempt a run ``times`` times. All but the first come at a random moment after a restart; nothing is lost."""
    print(f"seed {seed}")
    moments = random.Random(seed)
    tell = ["notify.command=[sh, -c, 'echo $TOOLKIT_EVENT']", "notify.when=[first_step, preemption, end]"]
    run = submit(site, slow_project(site, 0.02), "train.max_steps=1500", *tell)
    reached(run, 50)
    site.preempt()
    attempts_of(run, 1, 20)  # not only at the end of the grace time of 30 s, when Slurm tells the batch host, too
    for number in range(2, times + 1):
        # A preemption may strike when all steps are made: then no attempt follows.
        wait_for(lambda n=number: run.status().attempt == n or run.result(), END_S, f"attempt {number}")  # type: ignore[misc]
        time.sleep(moments.uniform(0.0, 12.0))
        if run.result() is not None:
            break
        site.preempt()
        attempts_of(run, number)
    result = completed(site, run)
    preempted = [a for a in run.attempts() if a.cause == "preempted"]
    print(json.dumps([(a.cause, a.step_start, a.step_end) for a in run.attempts()]))
    assert preempted
    assert all(a.decision == "requeue" for a in preempted)
    nothing_lost(run)
    assert result.step == 1500
    expected = ["first_step", *["preemption"] * len(preempted), "end"]
    wait_for(lambda: (run.logs / "notify.log").read_text().split() == expected, 30, f"the notices {expected}")


def test_preempted_in_the_grace_time_it_commits_and_comes_back_with_nothing_lost(site: Site) -> None:
    preempt_at_random_moments(site, 2, random.randrange(10**6))


@pytest.mark.soak
def test_preempted_ten_times_in_a_row_at_random_moments(site: Site) -> None:
    preempt_at_random_moments(site, 10, random.randrange(10**6))


def came_back(run: RunDir) -> None:
    """Assert that a preempted run completed with nothing lost. A quick restart may have been preempted again."""
    *before, last = run.attempts()
    assert before
    assert {(a.cause, a.decision) for a in before} == {("preempted", "requeue")}, before
    assert last.cause == "completed"
    nothing_lost(run)


def test_where_preemption_cancels_a_follow_up_job_takes_over_without_any_message(site: Site) -> None:
    """Without grace only KillWait separates the first signal from the end. A busy batch host needs longer.

    The supervisor and its guard are stopped again and again, as the SIGCONT that Slurm sends first lets them continue.
    """
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=300", "cluster.partition=cancel")
    wait_for(lambda: run.step() >= 50, END_S, "step 50")
    first = site.job_of(run)
    busy = [pid for pid, command in site.box.processes("node1") if "submitit.core._submit" in command]
    preempted = threading.Event()

    def keep_busy() -> None:
        while not preempted.wait(0.005):
            for pid in busy:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    site.preempt()
    row = site.box.wait_job(first, 60)
    preempted.set()
    thread.join()
    assert row["JobState"] == "PREEMPTED"
    assert run.attempts() == []  # it could not say how it ended
    result = completed(site, run)
    before, last = run.attempts()
    assert (before.cause, before.decision, last.cause) == ("preempted", "requeue", "completed")
    assert (result.step, before.job_id) == (300, first)
    assert last.job_id != first
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")


@contextlib.contextmanager
def held_up(site: Site, words: str) -> Iterator[None]:
    """Stop all processes with ``words`` in their command again and again. So none makes progress."""
    done = threading.Event()

    def hold_up() -> None:
        while not done.wait(0.01):
            for pid in [pid for pid, command in site.box.processes() if words in command]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=hold_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def preempted_at_its_start(site: Site, words: str) -> str:
    """Preempt the next job at its start, and return its id. ``words`` name the supervisor, which can do nothing."""

    def running() -> str:
        return site.run("squeue", "--noheader", "--partition=cancel", "--states=RUNNING", "--format=%A").strip()

    with held_up(site, words):
        job = wait_for(running, START_S, "the start of a job")
        site.preempt()
        assert site.box.wait_job(job, 60)["JobState"] == "PREEMPTED"
    return job


def test_a_follow_up_job_that_is_preempted_at_its_start_is_followed_by_another(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=300", "cluster.partition=cancel")
    wait_for(lambda: run.step() >= 50, END_S, "step 50")
    first = site.job_of(run)
    site.preempt()
    site.box.wait_job(first, 60)
    second = preempted_at_its_start(site, "toolkit supervise")
    completed(site, run)
    jobs = [attempt.job_id for attempt in run.attempts()]
    assert jobs[0] == first
    assert second not in jobs  # it could do nothing
    nothing_lost(run)
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")


def test_a_job_that_is_preempted_before_its_supervisor_is_up_is_followed_by_another(site: Site) -> None:
    project = slow_project(site, 0.02)
    with held_up(site, "submitit.core._submit"):
        run = submit(site, project, "train.max_steps=300", "cluster.partition=cancel")
        first = preempted_at_its_start(site, "submitit.core._submit")
    completed(site, run)
    assert first not in [attempt.job_id for attempt in run.attempts()]
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")


@pytest.mark.soak
def test_where_preemption_cancels_under_load_one_job_after_the_other_has_the_run(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=600", "cluster.partition=cancel")
    for number in range(1, 4):
        wait_for(lambda n=number: run.status().attempt == n, END_S, f"attempt {number}")  # type: ignore[misc]
        time.sleep(random.uniform(0.0, 12.0))
        site.preempt()
        attempts_of(run, number)
    completed(site, run, 2 * END_S)
    attempts = run.attempts()
    print(json.dumps([(a.job_id, a.cause, a.decision, a.line) for a in attempts]))
    assert len({a.job_id for a in attempts}) == len(attempts)
    assert {a.decision for a in attempts[:-1]} == {"requeue"}


def test_where_requeue_is_forbidden_the_run_is_its_follow_up_jobs(site: Site) -> None:
    nodes = ["cluster.exclude=node4", "cluster.exclusive=true"]
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=2000", *nodes, no_requeue=True)
    reached(run, 50)
    ours = site.job_of(run)
    first, second = ownership.jobs_of(run)[1:]
    assert {*site.run("squeue", "--noheader", "--format=%A").split()} == {ours, first, second}
    for asked in ("ExcNodeList", "OverSubscribe", "NumTasks", "TimeLimit", "MinMemoryNode"):
        assert {site.box.job(job).get(asked) for job in (first, second)} == {site.box.job(ours).get(asked)}
    intruder = site.preempt(seconds=600)
    attempts_of(run, 1)
    site.box.wait_job(ours, 60)
    # the follow-up job waits: it is the run's job, and nobody may start another one
    status = site.run("toolkit", "status", run.id)
    assert "requeued (PENDING" in status
    assert f"  {first}  " in status
    assert "it can be resumed when it has ended" in site.run("toolkit", "resume", run.id, check=False)
    site.box.run(["scancel", intruder])
    # it runs: it is the one that is told, twice
    wait_for(lambda: run.status().attempt == 2 and run.step() >= 100, END_S, "step 100 of attempt 2")
    assert site.job_of(run) == first
    assert "can be resumed when" in site.run("toolkit", "resume", run.id, check=False)
    for _ in range(2):
        site.run("toolkit", "stop", run.id)
    assert wait_for(run.result, 60, "a result").state == "stopped"
    assert [(a.cause, a.job_id) for a in run.attempts()] == [("preempted", ours), ("stopped", first)]
    nothing_lost(run)
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")
    # resumed, taken away again, and its follow-up job cancelled: the run says what to do
    site.run("toolkit", "resume", run.id)
    wait_for(lambda: run.status().attempt == 3, END_S, "attempt 3")
    site.run("scancel", run.owner().follow_ups[0])
    site.preempt(seconds=1)
    result = wait_for(run.result, END_S, "a result")
    assert result.state == "stopped"
    assert "preempted" in result.why
    assert "Slurm did not take it back" in result.why
    assert f"`toolkit resume {run.id}` continues" in site.run("toolkit", "why", run.id)
    nothing_lost(run)


def test_a_follow_up_job_asks_for_what_the_batch_script_asks_for(site: Site) -> None:
    """Of what neither the job's environment nor its size tells. sbatch's own command line goes before the script."""
    script = site.folder / "job.sh"
    asked = "--no-requeue --nodes=1 --switches=1@00:05:00 --nice=7 --hint=nomultithread --comment='two words'"
    script.write_text(f"#!/bin/bash\n#SBATCH {asked}\nexec toolkit exec cluster.preflight=false -- sleep 600\n")
    job = site.sbatch("--mail-type=END", "--mail-user=me@here", "--nice=9", str(script))
    run = site.only_run()
    wait_for(lambda: len(ownership.jobs_of(run)) == 3, START_S, "two follow-up jobs")
    others = ownership.jobs_of(run)[1:]
    for field in ("Switches", "Nice", "MailUser", "MailType", "Comment"):
        assert {site.box.job(each).get(field) for each in others} == {site.box.job(job)[field]}
    lines = site.run("scontrol", "write", "batch_script", others[0], "-")  # those after it get them from here
    assert "#SBATCH --hint=nomultithread\n" in lines
    assert "no-requeue" not in lines
    site.run("scancel", job)
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")


@pytest.fixture
def forgetful(make_box: Callable[..., Box], request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site without requeue whose controller forgets jobs at once. Real ones do so within a job of hours."""
    box = make_box(nodes=2)
    path = Path(box.box_dir / "etc/slurm.conf")
    path.write_text(path.read_text().replace("JobRequeue=1", "JobRequeue=0") + "MinJobAge=2\n")
    box.run(["scontrol", "reconfigure"])
    yield from visit(box, request)


@pytest.mark.soak
def test_a_chain_of_jobs_out_of_time_goes_on_though_the_first_is_forgotten(forgetful: Site) -> None:
    site = forgetful
    run = submit(site, slow_project(site, 0.06), "train.max_steps=2000", "cluster.time_min=1", "cluster.nodes=1")
    result = wait_for(run.result, 900, "a result")
    attempts = run.attempts()
    print(json.dumps([(a.job_id, a.cause, a.decision, a.line) for a in attempts]))
    assert (result.state, len({a.job_id for a in attempts}) >= 3) == ("completed", True), result
    assert {a.cause for a in attempts[:-1]} == {"timeout"}
    first = site.run("sacct", "--noheader", "--allocations", "--format=State,ExitCode", f"--jobs={attempts[0].job_id}")
    assert first.split() == ["FAILED", "75:0"]
    assert "Invalid job id" in site.run("scontrol", "show", "job", attempts[0].job_id, check=False)
    nothing_lost(run)


def test_a_follow_up_job_never_revives_a_cancelled_job(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=3000", no_requeue=True)
    reached(run, 50)
    site.run("scancel", site.job_of(run))
    wait_for(run.result, 30, "a result")
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")
    assert run.result().state == "cancelled"
    assert len(run.attempts()) == 1


@pytest.fixture
def ungraceful(make_box: Callable[..., Box], request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site whose preemption gives no grace time."""
    yield from visit(make_box(grace_s=0), request)


def test_preempted_without_grace_it_comes_back(ungraceful: Site) -> None:
    site = ungraceful
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=300")
    reached(run, 50)
    site.preempt()
    completed(site, run)
    came_back(run)


def to_one_rank(site: Site, job: str) -> None:
    os.kill(site.ranks("node2")[0], signal.SIGUSR1)


def to_all_at_different_times_and_twice(site: Site, job: str) -> None:
    for node in ("node2", "node1", "node2"):
        for pid in site.ranks(node):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def to_the_supervisor(site: Site, job: str) -> None:
    site.run("scancel", "--batch", "--signal=USR2", job)


@pytest.mark.parametrize(
    "deliver",
    [pytest.param(to_one_rank, marks=pytest.mark.soak), to_all_at_different_times_and_twice, to_the_supervisor],
)
def test_a_signal_makes_all_ranks_stop_at_one_step_and_the_run_goes_on(
    site: Site, deliver: Callable[[Site, str], None]
) -> None:
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=300")
    reached(run, 50)
    deliver(site, site.job_of(run))
    completed(site, run)
    first, second = run.attempts()
    assert (first.cause, first.decision, second.cause) == ("stopped", "requeue", "completed")
    nothing_lost(run)


#: At 0.1 s a step. Start and stop take something of a limit, too.
STEPS_IN_A_MINUTE = 600


def run_in_links(site: Site, steps: int, limit_min: int, *delays_s: int) -> None:
    """Run ``steps`` steps of 0.1 s under a time limit, for each ``cluster.save_before_limit_s`` at once."""
    project, links = slow_project(site, 0.1), -(-steps // (limit_min * STEPS_IN_A_MINUTE))
    size = ["train.epochs=1000", f"train.max_steps={steps}", f"cluster.time_min={limit_min}"]
    for delay_s in delays_s:
        delay = [f"name=delay-{delay_s}", f"cluster.save_before_limit_s={delay_s}"]
        site.run("toolkit", "submit", "slow.yaml", *size, *delay, cwd=project)
    for delay_s in delays_s:
        run = site.find(f"delay-{delay_s}")
        completed(site, run, 200.0 * limit_min * links)
        attempts = run.attempts()
        assert {a.cause for a in attempts[:-1]} == {"timeout"}
        assert len(attempts) >= links
        nothing_lost(run)


def test_a_run_longer_than_its_limit_goes_on_in_links_without_any_signal(site: Site) -> None:
    run_in_links(site, STEPS_IN_A_MINUTE + 1, 1, 0)


@pytest.mark.soak
def test_a_run_of_four_limits_loses_nothing_with_and_without_a_signal(site: Site) -> None:
    # Limits of two minutes: beside other stories, on two cores, a start alone may take most of one.
    run_in_links(site, 4 * 2 * STEPS_IN_A_MINUTE, 2, 0, 30)


def in_the_queue(site: Site, run: RunDir) -> None:
    assert run.status().state == "queued"
    assert f"scontrol release {site.job_of(run)}" in site.run("toolkit", "status", run.id)


def in_the_preflight(site: Site, run: RunDir) -> None:
    wait_for(lambda: [*run.path.glob(".preflight-*")], START_S, "the checks of the nodes")


def at_the_start(site: Site, run: RunDir) -> None:
    wait_for(lambda: run.status().state == "starting", START_S, "the start")


def in_training(site: Site, run: RunDir) -> None:
    reached(run, 50)


def in_the_queue_again(site: Site, run: RunDir) -> None:
    """Preempted, committed, and waiting for nodes that somebody else has."""
    reached(run, 50)
    site.preempt(seconds=600)
    attempts_of(run, 1, 90)
    wait_for(lambda: site.box.job(site.job_of(run))["JobState"] == "PENDING", 60, "the requeued job to wait")


PHASES = [in_the_queue, in_the_preflight, at_the_start, in_training, in_the_queue_again]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["scancel", "toolkit"])
def test_a_cancelled_run_stays_ended(site: Site, phase: Callable[[Site, RunDir], None], how: str) -> None:
    extra = {"hold": True} if phase is in_the_queue else {}
    run = submit(site, slow_project(site, 0.02), "train.max_steps=3000", **extra)
    phase(site, run)
    job = site.job_of(run)
    site.run(*(["scancel", job] if how == "scancel" else ["toolkit", "cancel", run.id]))
    row = site.box.wait_job(job, 60)
    assert row["JobState"] == "CANCELLED"
    wait_for(lambda: not site.processes(), 20, "no process of ours on any node")
    if how == "toolkit" or phase in (in_the_preflight, at_the_start, in_training):
        assert wait_for(run.result, 10, "a result").state == "cancelled"
    assert all(a.decision != "requeue" or a.cause == "preempted" for a in run.attempts())


def test_a_job_that_is_cancelled_between_verdict_and_requeue_stays_cancelled(site: Site) -> None:
    """The supervisor is stopped once its verdict is on disk. It continues while its job is being cancelled."""
    run = submit(site, slow_project(site, 0.02), "train.max_steps=3000")
    reached(run, 50)
    job, supervisor = site.job_of(run), pid_of_supervisor(site, run)
    to_the_supervisor(site, job)
    while not run.attempts():
        time.sleep(0.0005)
    os.kill(supervisor, signal.SIGSTOP)
    site.run("scancel", job)
    os.kill(supervisor, signal.SIGCONT)  # Slurm's own reaches it with proctrack/linuxproc only
    row = site.box.wait_job(job, 60)
    assert row["JobState"] == "CANCELLED"
    assert run.attempts()[0].decision == "requeue"
    if row["Restarts"] == "0":  # else the requeue was quicker than we, and Slurm has cancelled a job that waits
        assert run.result().state == run.status().state == "cancelled"


def test_toolkit_stop_leaves_a_checkpoint_that_resume_goes_on_from(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=400")
    reached(run, 50)
    site.run("toolkit", "stop", run.id)
    result = wait_for(run.result, 60, "a result")
    assert result.state == "stopped"
    (attempt,) = run.attempts()
    assert (attempt.cause, attempt.decision) == ("stopped", "finish")
    assert newest_step(run.checkpoints) == attempt.step_end
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), 30, "an empty queue")
    site.run("toolkit", "resume", run.id, "--wait")
    assert completed(site, run).step == 400
    nothing_lost(run)


def test_a_crash_at_the_same_step_is_given_up_and_why_names_the_first_rank(site: Site) -> None:
    project = slow_project(site, 0.0)
    (project / "jobs/slow.py").write_text(WITH_A_BAD_SAMPLE)
    out = site.run("toolkit", "submit", "slow.yaml", "--wait", "checkpoint.every_steps=20", cwd=project, check=False)
    assert "failed" in out
    run = site.only_run()
    *restarts, last = [a.decision for a in run.attempts()]
    # Rank 0's last report may be a step late: the second attempt may seem to have come one step further.
    assert (restarts, last) in ((["restart"], "give_up"), (["restart", "restart"], "give_up"))
    why = site.run("toolkit", "why", run.id, "--all")
    assert "rank 1 on node2" in why
    assert "ValueError: bad sample" in why
    assert "in at" in why  # the traceback
    assert "last checkpoint: step 20" in why
    assert site.box.wait_job(site.job_of(run), 30)["ExitCode"] == "1:0"


#: A script with its own checkpoint and no torch: it counts to 60. Told to end it saves, and exits with 0.
COUNTER = """
import os, signal, sys, time
state = sys.argv[1] + "/" + os.environ["SLURM_ARRAY_TASK_ID"]
count = int(open(state).read()) if os.path.exists(state) else 0
with open(state + ".starts", "a") as starts:
    starts.write(f"{count} {os.environ['SLURM_JOB_ID']} {os.environ['RANK']}/{os.environ['WORLD_SIZE']}\\n")
def save(*_):
    open(state + ".new", "w").write(str(count)); os.replace(state + ".new", state); sys.exit(0)
signal.signal(signal.SIGTERM, save)
while count < 60:
    time.sleep(0.1); count += 1
open(state, "w").write(str(count))
"""


def test_each_element_of_an_array_resumes_itself_and_none_its_neighbour(site: Site) -> None:
    """Twenty elements, preempted twice; `toolkit exec` supervises a script that knows nothing of us."""
    elements = 20
    (site.folder / "counter.py").write_text(COUNTER)
    site.run("mkdir", str(site.folder / "state"))
    (site.folder / "array.sh").write_text(
        f"#!/bin/bash\nexec toolkit exec -- python {site.folder}/counter.py {site.folder}/state\n"
    )
    options = [f"--array=0-{elements - 1}", "--ntasks=1", "--mem=900", str(site.folder / "array.sh")]
    job = site.sbatch(*options)

    def starts() -> int:
        return sum(len(path.read_text().splitlines()) for path in (site.folder / "state").glob("*.starts"))

    def have_begun(count: int) -> bool:
        return starts() >= count

    for _ in range(2):
        wait_for(partial(have_begun, starts() + 2), END_S, "some elements to run, for 6 s each")
        time.sleep(random.uniform(0, 3))
        site.preempt()

    def all_done() -> bool:
        runs = list(site.runs.glob("counter/*/result.json"))
        return len(runs) == elements

    wait_for(all_done, END_S, "all elements to complete")
    for index in range(elements):
        assert (site.folder / f"state/{index}").read_text() == "60"
        counts = [int(line.split()[0]) for line in (site.folder / f"state/{index}.starts").read_text().splitlines()]
        assert counts == sorted(counts)  # no start began from less than the one before, as from a neighbour's state
    results = [json.loads(path.read_text()) for path in site.runs.glob("counter/*/result.json")]
    assert {result["state"] for result in results} == {"completed"}
    restarted = [result for result in results if result["attempts"] > 1]
    assert restarted
    wait_for(lambda: job not in site.run("squeue", "--noheader", "--format=%A"), 30, "an empty queue")


#: Hard to end: deaf to SIGTERM, with a child that is, too.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done", "toolkit-test-child"])
open(sys.argv[1] + os.environ["RANK"], "w").close()
while True:
    time.sleep(1)
"""


def by_scancel(site: Site, job: str) -> None:
    site.run("scancel", job)


def by_killing_the_supervisor(site: Site, job: str) -> None:
    supervisor = next(pid for pid, command in site.box.processes("node1") if "toolkit exec" in command)
    os.kill(supervisor, signal.SIGKILL)


@pytest.mark.parametrize("end", [by_scancel, by_killing_the_supervisor])
def test_nothing_of_a_foreign_script_survives_its_job(site: Site, end: Callable[[Site, str], None]) -> None:
    (site.folder / "stubborn.py").write_text(STUBBORN)
    (site.folder / "job.sh").write_text(
        f"#!/bin/bash\nexec toolkit exec -- python {site.folder}/stubborn.py {site.folder}/up\n"
    )
    job = site.sbatch("--nodes=2", "--ntasks=2", str(site.folder / "job.sh"))
    wait_for(lambda: len(list(site.folder.glob("up*"))) == 2, START_S, "both ranks")
    end(site, job)
    site.box.wait_job(job, 120)
    wait_for(lambda: not site.processes(), 60, "no process of ours on any node")


def test_a_restarted_controller_is_not_noticed_by_the_run(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=400")
    reached(run, 50)
    site.box.restart_slurmctld()
    completed(site, run)
    assert [a.cause for a in run.attempts()] == ["completed"]


def test_a_controller_that_was_away_at_the_end_of_checks_only_delays_the_ranks(site: Site) -> None:
    """The agents have started by then, and nothing more is asked of it."""
    run = submit(site, slow_project(site, 0.01), "train.max_steps=50")
    checks = "toolkit.plugins.site.checks"
    wait_for(lambda: any(checks in command for _, command in site.processes()), START_S, "the checks of the nodes")
    site.box._stop_daemon("login", "slurmctld")
    try:
        log = run.logs / "supervisor.log"
        wait_for(lambda: log.exists() and "attempt 1: " in log.read_text(), START_S, "the start of the ranks")
    finally:
        site.box._start_slurmctld()
    completed(site, run)
    print(log.read_text())
    assert [a.cause for a in run.attempts()] == ["completed"]


@pytest.mark.soak
def test_a_preemption_is_told_apart_while_accounting_is_down(site: Site) -> None:
    run = submit(site, slow_project(site, 0.02, 0.5), "train.max_steps=300")
    reached(run, 50)
    site.box.stop_slurmdbd()
    back = time.monotonic() + 60
    try:
        site.preempt()
        completed(site, run)
        time.sleep(max(0.0, back - time.monotonic()))  # the outage itself is the story's length
    finally:
        site.box.start_slurmdbd()
    came_back(run)


def test_a_full_disk_is_waited_out_also_by_a_job_that_comes_back(site: Site) -> None:
    """One node, whose run folder is a small disk. It is full for 30 s of training, and then while the job starts."""
    project = slow_project(site, 0.02)
    site.run("mkdir", str(site.runs))
    options = f"size=24m,mode=0755,uid={site.user or 'root'}"  # in a folder of root's, each user's runs have their own
    site.box.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(site.runs)], node="node1")
    (site.folder / "job.sh").write_text(f'#!/bin/bash\ncd {project}\nexec toolkit supervise slow.yaml "$@"\n')
    overrides = ["train.max_steps=2000", "checkpoint.every_steps=50"]
    job = site.sbatch("--nodes=1", "--nodelist=node1", "--ntasks=2", str(site.folder / "job.sh"), *overrides)

    def read(name: str) -> str:
        done = site.box.run(["sh", "-c", f"cat {site.runs}/*/*/{name}"], check=False, node="node1")
        return done.stdout

    def step() -> int:
        try:
            return int((json.loads(read("status.json")).get("progress") or {}).get("step") or 0)
        except json.JSONDecodeError:  # not there yet
            return 0

    wait_for(lambda: step() >= 100, END_S, "step 100")
    fill = f"cat /dev/zero > {site.runs}/filler 2>/dev/null; true"
    site.box.run(["sh", "-c", fill], node="node1")
    time.sleep(30)
    assert step() >= 100  # what was written last is still there
    site.run("scontrol", "requeue", job)
    again = lambda: site.box.job(job)["Restarts"] == "1" and site.box.job(job)["JobState"] == "RUNNING"  # noqa: E731
    wait_for(again, END_S, "the job to start again")
    output = site.folder / f"slurm-{job}.out"
    wait_for(lambda: "cannot be written: [Errno 28]" in output.read_text(), START_S, "a start on the full disk")
    assert "Traceback" not in output.read_text()
    site.box.run(["rm", f"{site.runs}/filler"], node="node1")
    assert site.box.wait_job(job, END_S)["JobState"] == "COMPLETED"
    result = json.loads(read("result.json"))
    assert (result["state"], result["attempts"], result["step"]) == ("completed", 2, 2000)
    assert "No space left" in read("logs/supervisor.log") + read("logs/attempt-001/rank-0.log")
    logged = [json.loads(line) for line in read("tensorboard/metrics.jsonl").splitlines()]
    assert [line["step"] for line in logged if "train/loss" in line] == list(range(10, 2001, 10))
    site.box.run(["umount", "-l", str(site.runs)], node="node1")
