"""The follow-up job where Slurm does not requeue. Its request to sbatch, its script, and when it continues."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.config import JobConfig, dump_config, load_config
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.testing.fake_slurm import REQUEUE_DELAY_S, CancelCall, FakeSlurm
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue import follow_up
from toolkit.run.requeue.follow_up import (
    _VARIABLE_OF,
    PREDECESSORS_VARIABLE,
    RUN_VARIABLE,
    dismiss,
    outcome_of,
    outcomes,
    prune_waiting,
    takes_over,
)
from toolkit.run.submission import executors
from toolkit.slurm.jobs import JobRow

#: What a batch script finds after `sbatch -p gpu -A phys -q high -N2 -n7 -c6 --mem=2G`.
OURS = {
    "SLURM_JOB_NAME": "train it's",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "phys",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "7",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_MEM_PER_NODE": "2048",
}


#: Has no files.
NOWHERE = RunDir(Path("/nowhere"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run in a job with the variables of ``OURS``. A careless shell script would split its path."""
    for name in (*_VARIABLE_OF.values(), "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    return rundir.create("digits", tmp_path / """it's "my" $HOME `runs`; ${A=$(touch hit)}""")


def running(slurm: FakeSlurm, *options: str) -> JobRow:
    """Start the run's own job; return its row."""
    job = slurm.sbatch(["--no-requeue", *options, "job.sh"])
    slurm.start(job)
    row = slurm.show_job(job)
    assert row is not None
    return row


def submitted(run: RunDir, slurm: FakeSlurm, row: JobRow, *waiting: str) -> list[str]:
    """Submit a follow-up job; return the arguments that sbatch got."""
    job = follow_up.submit_like_ours(run, row, waiting, slurm, "token")
    return slurm.submitted[job]


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


def test_the_follow_up_job_asks_for_what_our_own_job_has_and_waits_for_its_end(slurm: FakeSlurm, run: RunDir) -> None:
    *options, script = submitted(run, slurm, running(slurm, "--time=90", "--gres=gpu:a100:4"))
    assert sorted(options) == sorted(
        [
            "--job-name=train it's",
            "--partition=gpu",
            "--account=phys",
            "--nodes=2",
            "--ntasks=7",
            "--cpus-per-task=6",
            "--gres=gpu:a100:4",
            "--mem=2048",
            "--time=90",
            "--no-requeue",
            "--dependency=afterany:1",
            f"--output={run.logs}/follow-up-%j.out",
            "--open-mode=append",
        ]
    )
    assert Path(script).parent == run.submitit


@pytest.mark.parametrize("key", ["cluster.spare_nodes=1", "retry.allow_fewer_nodes=true", None])
def test_a_run_that_may_lose_nodes_keeps_them_in_its_follow_up_job_too(run: RunDir, key: str | None) -> None:
    """Before, Slurm ended such a job when a node died, although a spare was there."""
    run.config.write_text(dump_config(load_config(None, [key] if key else [], site=False)))
    slurm = FakeSlurm()
    assert ("--no-kill" in submitted(run, slurm, running(slurm))) == (key is not None)


def test_a_follow_up_job_has_the_components_of_our_own(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config.write_text(dump_config(load_config(None, ["cluster.spare_nodes=1"], site=False)))
    for name, value in {"HET_SIZE": "2", "JOB_NUM_NODES_HET_GROUP_0": "1", "JOB_NUM_NODES_HET_GROUP_1": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE_HET_GROUP_1", "1")
    slurm = FakeSlurm()
    row = running(slurm, "--time=90", "--gres=gpu:1")
    row = replace(row, others=(replace(row, job_id="2", options=("--constraint=old",)),))
    options = submitted(run, slurm, row)[:-1]
    first, second = options[: options.index(":")], options[options.index(":") + 1 :]
    assert {"--no-requeue", "--dependency=afterany:1", "--nodes=1", "--gres=gpu:1", "--time=90"} <= {*first}
    assert "--no-kill" not in first
    assert {"--nodes=3", "--ntasks-per-node=1", "--constraint=old", "--no-kill", "--time=90"} <= {*second}
    assert not any(option.startswith(("--ntasks=", "--gres", "--dependency")) for option in second)


def test_another_gres_of_the_config_does_not_cost_the_follow_up_job_its_gpus(run: RunDir) -> None:
    """Of a flag that is given twice sbatch takes the last."""
    run.config.write_text(dump_config(load_config(None, ["cluster.extra={gres: nvme:1}"], site=False)))
    slurm = FakeSlurm()
    options = submitted(run, slurm, running(slurm, "--gres=nvme:1,gpu:4"))
    assert [option for option in options if option.startswith("--gres")] == ["--gres=nvme:1,gpu:4"]


def test_cpus_of_a_gpu_that_a_site_has_added_do_not_meet_those_of_a_task(
    slurm: FakeSlurm, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch refuses both together."""
    row = replace(running(slurm), options=("--gres=gpu:8", "--cpus-per-gpu=8"))
    assert "--cpus-per-task=6" in submitted(run, slurm, row)
    assert "--cpus-per-gpu=8" not in submitted(run, slurm, row)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    assert "--cpus-per-gpu=8" in submitted(run, slurm, row)


def test_what_our_job_does_not_know_is_left_to_the_site(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name)
    slurm = FakeSlurm()
    names = {option.partition("=")[0] for option in submitted(run, slurm, running(slurm))[:-1]}
    assert names == {"--no-requeue", "--dependency", "--output", "--open-mode"}


@pytest.mark.parametrize("limit", ["1", "10", "2-00:00:00", "00:00:20"])
def test_the_time_limit_is_the_one_that_the_job_has_now(slurm: FakeSlurm, run: RunDir, limit: str) -> None:
    """One below a minute is rounded up: sbatch takes `--time=0` for no limit."""
    row = running(slurm, f"--time={limit}")
    submitted(run, slurm, row)
    follower = slurm.show_job("2")
    assert follower.time_limit_s == max(60.0, row.time_limit_s)
    assert not follower.can_requeue


def test_the_follow_up_job_of_an_array_element_waits_for_that_element_only(run: RunDir, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.sbatch(["--array=0-2", "--no-requeue", "job.sh"])
    slurm.start("1_1")
    row = slurm.show_job("1_1")
    assert row is not None
    arguments = submitted(run, slurm, row)
    assert f"--dependency=afterany:{row.job_id}" in arguments
    assert environment_of(arguments[-1], tmp_path)[PREDECESSORS_VARIABLE] == "1_1"


def environment_of(script: str, folder: Path) -> dict[str, str]:
    """Run the script; return the environment of the process that it becomes. That is an `env` in Python's place."""
    subprocess.run(["bash", script], check=True, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "/inherited"}, cwd=folder)
    return dict(entry.split("=", 1) for entry in (folder / "environ").read_text().split("\0") if entry)


@pytest.fixture(autouse=True)
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script in Python's place. It notes its process id, arguments and environment."""
    python = tmp_path / "my venv/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho $$ > pid\nprintf "%s\\0" "$@" > arguments\nenv -0 > environ\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return python


def test_the_script_is_bash_and_becomes_the_supervisor_of_this_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/their own/lib")
    slurm = FakeSlurm()
    script = submitted(run, slurm, running(slurm))[-1]
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    environ = environment_of(script, tmp_path)
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == ["-m", "toolkit", "supervise", str(run.config)]
    assert {name: environ[name] for name in (RUN_VARIABLE, PREDECESSORS_VARIABLE, "TOOLKIT_RUNS")} == {
        RUN_VARIABLE: str(run.path),
        PREDECESSORS_VARIABLE: "1",
        "TOOLKIT_RUNS": str(run.path.parent.parent),
    }
    assert environ["PYTHONPATH"].split(":") == [str(run.code), "/their own/lib"]
    assert environ["PYTHONSAFEPATH"] == "1"


def test_no_bash_stays_between_slurm_and_the_supervisor(slurm: FakeSlurm, run: RunDir, tmp_path: Path) -> None:
    """bash would die at the first SIGTERM and take the supervisor along."""
    script = submitted(run, slurm, running(slurm))[-1]
    with subprocess.Popen(["bash", script], cwd=tmp_path) as process:
        pass
    assert int((tmp_path / "pid").read_text()) == process.pid


def test_a_full_disk_submits_no_follow_up_job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    slurm = FakeSlurm()
    row = running(slurm)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        follow_up.submit_like_ours(run, row, [], slurm, "token")
    assert list(slurm.submitted) == [row.job_id]


def test_follow_up_jobs_that_are_not_needed_are_cancelled_the_last_one_first(slurm: FakeSlurm, run: RunDir) -> None:
    row = running(slurm)
    submitted(run, slurm, row), submitted(run, slurm, row, "2")
    dismiss(["2", "3"], slurm)
    assert slurm.sent == [CancelCall("3"), CancelCall("2")]
    assert {status and status.state for status in slurm.show_jobs(["2", "3"]).values()} == {"CANCELLED"}


def test_a_run_ends_well_also_when_a_follow_up_job_cannot_be_cancelled(
    slurm: FakeSlurm, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    submitted(run, slurm, running(slurm))
    slurm.is_up = False
    dismiss(["2"], slurm)
    assert "the follow-up job 2 could not be cancelled: Unable" in caplog.records[-1].getMessage()


def preempted(slurm: FakeSlurm) -> None:
    slurm.preempt("1", grace_s=30)
    slurm.advance(31)


def ending(slurm: FakeSlurm) -> None:
    preempted(slurm)
    slurm.advance(1)


def out_of_time(slurm: FakeSlurm) -> None:
    slurm.advance(601)


def cancelled(slurm: FakeSlurm) -> None:
    slurm.advance(5)
    slurm.cancel("1")


def forgotten(slurm: FakeSlurm) -> None:
    slurm.fail_node("1")
    slurm.forget("1")


def cancelled_and_forgotten(slurm: FakeSlurm) -> None:
    cancelled(slurm)
    slurm.advance(60)
    slurm.forget("1")


#: What became of job 1, seen at its end and a while after it.
ENDS: dict[str, tuple[Callable[[FakeSlurm], None], bool]] = {
    "preempted, still completing": (preempted, True),
    "preempted": (ending, True),
    "out of time": (out_of_time, True),
    "lost a node": (lambda slurm: slurm.fail_node("1"), True),
    "cancelled by somebody": (cancelled, False),
    "crashed": (lambda slurm: slurm.finish("1", exit_code=1), False),
    "killed": (lambda slurm: slurm.finish("1", signal=9), True),
    "completed": (lambda slurm: slurm.finish("1"), False),
    "forgotten by the controller": (forgotten, True),
    "cancelled, and forgotten by the controller": (cancelled_and_forgotten, False),
}


def predecessor(what_became_of_it: Callable[[FakeSlurm], None], accounting: bool = True) -> JobOutcome:
    slurm = FakeSlurm(preempt_mode="CANCEL", accounting=accounting)
    running(slurm, "--time=10")
    what_became_of_it(slurm)
    return outcome_of("1", NOWHERE, slurm)


def test_a_job_that_nobody_knows_any_more_is_over_and_its_run_goes_on(run: RunDir) -> None:
    run.write_status(RunStatus.from_json({"state": "running"}))
    outcome = predecessor(forgotten, accounting=False)
    assert outcome is JobOutcome.UNKNOWN
    assert takes_over(run, [outcome])


def test_a_controller_that_is_away_is_waited_for(change_limits: ChangeLimits) -> None:
    change_limits(retry_every_s=0.01)
    slurm = FakeSlurm(preempt_mode="CANCEL")
    running(slurm)
    preempted(slurm)
    slurm.is_up = False
    threading.Timer(0.05, setattr, (slurm, "is_up", True)).start()
    assert outcome_of("1", NOWHERE, slurm) is JobOutcome.PREEMPTED


def test_the_follow_up_job_gets_what_slurm_does_not_tell_from_the_config(run: RunDir) -> None:
    config = JobConfig()
    config.cluster.extra = {"no_requeue": True, "hold": True, "licenses": "matlab:1", "mail_type": "FAIL"}
    run.config.write_text(dump_config(config))
    slurm = FakeSlurm()
    given = submitted(run, slurm, running(slurm))
    for option in ("--licenses=matlab:1", "--mail-type=FAIL"):
        assert option in given
    assert "--hold" not in given
    assert given.count("--no-requeue") == 1


@pytest.mark.parametrize(("end", "wanted"), ENDS.values(), ids=ENDS.keys())
def test_what_was_taken_away_goes_on_and_what_was_ended_does_not(
    run: RunDir, end: Callable[[FakeSlurm], None], wanted: bool
) -> None:
    run.write_status(RunStatus.from_json({"state": "running"}))
    assert takes_over(run, [predecessor(end)]) is wanted


@pytest.mark.parametrize(
    ("wish", "state"), [(None, "cancelled"), (Intent.STOP, "stopped"), (Intent.CANCEL, "cancelled")]
)
def test_a_run_that_was_ended_too_fast_to_say_so_gets_a_result(run: RunDir, wish: Intent | None, state: str) -> None:
    """For example, its batch host was dead when a user cancelled the job."""
    owner = ownership.submit_as(run, "slurm", ownership.take(run, 0))
    run.write_status(RunStatus.from_json({"state": "starting"}))
    if wish is not None:
        user_requests.record_intent(run, wish)
    follow_up.finish_run(run, "1", owner.token, FakeSlurm(), "2")
    result = run.result()
    assert (result.state, run.status().state) == (state, state)
    assert result.why == f"job 1 was {state}, and could not report it"


def test_a_run_that_was_resumed_meanwhile_gets_no_result_of_its_old_job(run: RunDir) -> None:
    owner = ownership.submit_as(run, "slurm", ownership.take(run, 0))
    ownership.submit_as(run, "slurm", ownership.take(run, owner.number))
    follow_up.finish_run(run, "1", owner.token, FakeSlurm(), "2")
    assert run.result() is None


@pytest.mark.parametrize("end", [forgotten, lambda slurm: slurm.finish("1", exit_code=75)])
def test_a_run_whose_supervisor_has_left_it_to_be_continued_goes_on(
    run: RunDir, end: Callable[[FakeSlurm], None]
) -> None:
    run.write_status(RunStatus.from_json({"state": "requeued"}))
    assert takes_over(run, [predecessor(end)])


@pytest.mark.parametrize("state", ["completed", "failed", "stopped", "cancelled"])
def test_a_run_that_has_a_result_is_not_revived(run: RunDir, state: str) -> None:
    run.write_status(RunStatus.from_json({"state": "requeued"}))
    run.write_result(RunResult.from_json({"state": state}))
    assert not takes_over(run, [predecessor(preempted)])


@pytest.mark.parametrize("wish", Intent)
def test_a_run_that_its_user_has_ended_is_not_revived(run: RunDir, wish: Intent) -> None:
    run.write_status(RunStatus.from_json({"state": "requeued"}))
    user_requests.record_intent(run, wish)
    assert not takes_over(run, [predecessor(preempted)])
    user_requests.clear_intent(run)
    assert takes_over(run, [predecessor(preempted)])


def chain(run: RunDir, slurm: FakeSlurm) -> list[str]:
    """Make a chain of jobs: 1 runs for the run, 2 waits for its end. Job 3 waits for the ends of both."""
    owner = ownership.submit_as(run, "slurm", ownership.take(run, 0))
    row = running(slurm, "--time=10")
    submitted(run, slurm, row), submitted(run, slurm, row, "2")
    run.write_owner(owner.replace(jobs=("1",), follow_ups=("2", "3")))
    run.write_status(RunStatus.from_json({"state": "running"}))
    return ["1", "2"]


def take_away(slurm: FakeSlurm, job: str) -> None:
    slurm.preempt(job)
    slurm.advance(1), slurm.advance(1)


def test_a_follow_up_job_preempted_before_it_could_look_is_followed_by_the_next(run: RunDir) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    before = chain(run, slurm)
    take_away(slurm, "1")
    slurm.start("2")
    take_away(slurm, "2")
    assert takes_over(run, outcomes(run, before, slurm))


@pytest.mark.parametrize("accounting", [True, False])
def test_the_third_job_goes_on_though_slurm_has_forgotten_how_the_first_ended(run: RunDir, accounting: bool) -> None:
    """Days later only accounting knows of it, if there is any. The second job had judged it."""
    slurm = FakeSlurm(preempt_mode="CANCEL", accounting=accounting)
    before = chain(run, slurm)
    slurm.finish("1", exit_code=75)
    slurm.start("2")
    run.write_owner(run.owner().replace(jobs=("1", "2"), follow_ups=("3",)))
    slurm.advance(400)
    slurm.forget("1")
    slurm.finish("2", exit_code=75)
    run.write_status(RunStatus.from_json({"state": "requeued"}))
    assert takes_over(run, outcomes(run, before, slurm))


def test_after_a_long_wait_accounting_tells_how_the_job_before_ended(run: RunDir) -> None:
    for end, outcome in ((75, JobOutcome.REQUEUED), (1, JobOutcome.CANCELLED), (0, JobOutcome.NODE_FAILED)):
        slurm = FakeSlurm(preempt_mode="CANCEL")
        running(slurm)
        slurm.finish("1", exit_code=end, signal=0 if end else 9)
        slurm.advance(400)
        slurm.forget("1")
        assert outcome_of("1", NOWHERE, slurm) is outcome


@pytest.mark.parametrize("state", ["running", "requeued"])
def test_a_follow_up_job_that_somebody_has_cancelled_has_no_follow_up_either(run: RunDir, state: str) -> None:
    """`toolkit status` shows the waiting job as the run's job. To cancel it means to cancel the run."""
    slurm = FakeSlurm(preempt_mode="CANCEL")
    before = chain(run, slurm)
    run.write_status(RunStatus.from_json({"state": state}))
    take_away(slurm, "1")
    slurm.cancel("2")
    assert not takes_over(run, outcomes(run, before, slurm))


def test_a_cancelled_job_is_not_revived_where_its_follow_up_job_was_preempted_first(run: RunDir) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    chain(run, slurm)
    slurm.cancel("1")
    slurm.advance(1)
    slurm.start("2")
    take_away(slurm, "2")
    assert not takes_over(
        run, outcomes(run, ["2"], slurm)
    )  # nor by one that was submitted when 2 ran, and waited for it


def test_a_job_that_was_requeued_once_and_then_cancelled_is_not_revived(run: RunDir) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    job = slurm.sbatch(["--time=10", "job.sh"])
    slurm.start(job)
    slurm.requeue(job)
    slurm.advance(REQUEUE_DELAY_S)
    slurm.start(job)
    slurm.cancel(job)
    slurm.advance(1)
    run.write_status(RunStatus.from_json({"state": "running"}))
    assert outcome_of(job, run, slurm) is JobOutcome.CANCELLED


@pytest.mark.parametrize(("log", "outcome"), [(None, JobOutcome.NODE_FAILED), ("1_0_log.out", JobOutcome.CANCELLED)])
def test_a_job_whose_node_did_not_see_the_run_is_followed(run: RunDir, log: str | None, outcome: JobOutcome) -> None:
    """Since 23.02 Slurm makes the log's folder on the node's own disk. The batch script then fails by itself."""
    fsio.write_json(run.submission_path, {})
    slurm = FakeSlurm()
    row = running(slurm)
    if log is not None:
        (run.submitit / log).write_text("submitit INFO")
        os.utime(run.submitit / log, (2e9, 2e9))
    slurm.finish(row.job_id, exit_code=1)
    assert outcome_of(row.job_id, run, slurm) is outcome


def test_the_end_of_a_run_ends_the_follow_up_jobs_that_still_wait(run: RunDir) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    chain(run, slurm)
    slurm.cancel("1")
    slurm.advance(1)
    slurm.start("2")
    follow_up.finish_run(run, "1", run.owner().token, slurm, "2")
    assert [slurm.show_job(job).state for job in "23"] == ["RUNNING", "CANCELLED"]


def test_of_follow_up_jobs_those_behind_a_cancelled_one_are_cancelled_too(run: RunDir) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    chain(run, slurm)
    assert prune_waiting(["2", "3"], slurm) == ["2", "3"]
    slurm.cancel("2")
    assert prune_waiting(["2", "3"], slurm) == []
    assert slurm.show_job("3").state == "CANCELLED"
    slurm.is_up = False
    assert prune_waiting(["2", "3"], slurm) == ["2", "3"]


def test_the_script_from_the_login_node_asks_for_what_the_config_does(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JobConfig()
    config.cluster.nodes, config.cluster.partition, config.cluster.time_min = 2, "gpu", 90
    config.cluster.setup = ["export FROM_SETUP=1"]
    config.cluster.extra = {"hold": True, "begin": "now+1hour", "dependency": "afterok:7", "mail-type": "FAIL"}
    script = tmp_path / "script.sh"
    script.write_text(executors.follow_up_script(run, config, "token", "1"))
    asked = {line.partition(" ")[2] for line in script.read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--partition=gpu", "--time=90", "--mail-type=FAIL"} <= asked
    assert [option for option in asked if option.startswith(("--hold", "--begin", "--dependency"))] == []
    environ = environment_of(str(script), tmp_path)
    assert (environ[RUN_VARIABLE], environ[PREDECESSORS_VARIABLE]) == (str(run.path), "1")
    assert (environ["FROM_SETUP"], environ[ownership.TOKEN_VARIABLE]) == ("1", "token")
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == ["-m", "toolkit", "supervise", str(run.config)]


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"state": "FAILED", "exit_code": 75}, JobOutcome.REQUEUED),
        ({"state": "OUT_OF_MEMORY", "exit_code": 0}, JobOutcome.NODE_FAILED),
        ({"state": "FAILED", "exit_code": 0, "reason": "JobLaunchFailure"}, JobOutcome.NODE_FAILED),
    ],
    ids=["its supervisor left the run to be continued", "the batch host was out of memory", "it could not start"],
)
def test_a_predecessor_that_ended_so_is_followed(run: RunDir, fields: dict[str, Any], outcome: JobOutcome) -> None:
    slurm: Any = SimpleNamespace(show_job=lambda job: JobRow(job_id=job, **fields))
    assert outcome_of("7", run, slurm) is outcome
