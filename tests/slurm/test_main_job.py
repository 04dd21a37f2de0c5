"""The main job on a real Slurm, submitted in both ways, undisturbed and disturbed."""

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.site import END_S, Site, reached
from tests.waiting import wait_for
from toolkit.files import rundir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(2)]

SHORT = ["train.max_steps=40", "checkpoint.every_steps=20"]
#: 450,000 steps: nobody waits for its end.
LONG = ["train.epochs=20000", "checkpoint.every_steps=20"]


@pytest.mark.parametrize("tasks_per_node", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_sbatch_trains_on_four_nodes(site: Site, tasks_per_node: int) -> None:
    job = site.sbatch(f"--ntasks-per-node={tasks_per_node}", "sbatch/ddp_4node.sh")
    assert site.box.wait_job(job, END_S)["JobState"] == "COMPLETED"
    run = site.only_run()
    result = run.result()
    assert result.state == "completed"
    assert result.metrics["eval/accuracy"] >= 0.97
    (attempt,) = run.attempts()
    assert sorted(attempt.nodes) == ["node1", "node2", "node3", "node4"]
    assert attempt.world_size == 4 * tasks_per_node
    assert (run.code / "jobs/classify.py").is_file()


def test_sbatch_takes_a_config_and_overrides_and_the_allocation_wins(site: Site) -> None:
    """The allocation has three tasks on two nodes. The config asks for four nodes with one task each."""
    script = ["sbatch/ddp_4node.sh", "configs/digits_ddp.yaml", "optim.lr=0.2", *SHORT]
    job = site.sbatch("--nodes=2", "--ntasks=3", *script)
    assert site.box.wait_job(job, END_S)["JobState"] == "COMPLETED"
    run = site.only_run()
    (attempt,) = run.attempts()
    assert (sorted(attempt.nodes), attempt.world_size) == (["node1", "node2"], 3)
    config = run.config.read_text()
    assert "nodes: 2" in config
    assert "lr: 0.2" in config
    logs = {path.name for path in run.attempt_logs(1).glob("rank-*.log")}
    assert logs == {"rank-0.log", "rank-1.log", "rank-2.log"}


@pytest.mark.parametrize(
    ("env", "words"),
    [({"TOOLKIT_HOME": "/nowhere"}, "/nowhere is not the project"), ({}, "no environment with the toolkit")],
    ids=["project", "environment"],
)
def test_the_script_says_what_is_missing(site: Site, env: dict[str, str], words: str) -> None:
    project = site.project(classify="")
    home: dict[str, Any] = {"TOOLKIT_HOME": str(project), **env, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    out = site.run("sbatch", "--parsable", f"--output={site.folder}/out", "sbatch/ddp_4node.sh", **home)
    row = site.box.wait_job(out.strip(), END_S)
    assert row["ExitCode"] == "2:0"
    assert words in (site.folder / "out").read_text()


def test_submit_waits_and_reports(site: Site) -> None:
    out = site.submit("configs/digits_ddp.yaml", "--wait", "cluster.nodes=2", "cluster.tasks_per_node=1")
    assert "test accuracy: 0.9" in out
    run = site.only_run()
    assert run.result().metrics["eval/accuracy"] >= 0.97
    assert json.loads((run.submitit / "submission.json").read_text())["executor"] == "slurm"
    assert "completed" in site.run("toolkit", "status")
    assert "completed" in site.run("toolkit", "logs", run.id, "--supervisor")
    assert "training from step 0" in site.run("toolkit", "logs", run.id, "--rank", "1")


def test_make_train_is_a_real_job_where_sbatch_answers(site: Site) -> None:
    """make takes the environment as up to date. The box cannot reach a package registry."""
    out = site.run("make", "--old-file=.venv/ready", "train")
    assert "Slurm job" in out
    assert "accuracy: 0.9" in out
    assert "tensorboard" in out
    assert site.only_run().submission().executor == "slurm"


#: The least that a job of one's own has to do: rank 0 hands over a result.
TINY = """
from toolkit.ranks.session import open_session
def main(config):
    with open_session(config.dist) as session:
        print("the old code runs")
        session.finish({})
"""
#: Below which runs are to be the same as anywhere else; see tests/unit/run/test_script_paths.py.
ODD_FOLDER = """it's "my" $HOME `touch /tmp/hurt`; ${A=$(touch /tmp/hurt)} #x & (a) [b] {c} * ? ~ ! | <d> = , ü"""


TINY = """
from toolkit.ranks.session import open_session
def main(config):
    print("the old code runs", flush=True)
    with open_session(config.dist) as session:
        session.finish({})
"""


def test_what_was_submitted_is_what_runs_and_odd_texts_and_folders_arrive_unharmed(site: Site) -> None:
    """The job is held in the queue while its sources are broken. No shell must expand the comment and the folder."""
    project = site.project(tiny=TINY)
    (project / "tiny.yaml").write_text("job: jobs.tiny\ncluster: {nodes: 2}\n")
    comment = 'it\'s "quoted" $(touch /tmp/hurt) `id` \\ ; #x'
    extra = json.dumps({"comment": comment, "hold": True})
    odd_runs = site.runs / ODD_FOLDER
    site.run("toolkit", "submit", "tiny.yaml", f"cluster.extra={extra}", cwd=project, TOOLKIT_RUNS=str(odd_runs))
    (run,) = rundir.all_runs(odd_runs)
    job = run.submission().job_id
    assert site.box.job(job)["Comment"] == comment
    (project / "jobs/tiny.py").write_text("raise SystemExit('the new code runs')\n")
    site.run("scontrol", "release", job)
    assert site.box.wait_job(job, END_S)["JobState"] == "COMPLETED"
    for rank in (0, 1):
        assert "the old code runs" in run.rank_log(1, rank).read_text()


def test_two_runs_on_the_same_nodes_do_not_disturb_each_other(site: Site) -> None:
    overrides = ["cluster.nodes=2", "cluster.tasks_per_node=1", *SHORT]
    for name in ("first", "second"):
        site.submit("configs/digits_ddp.yaml", f"name={name}", *overrides)
    runs = [site.find(name) for name in ("first", "second")]
    rows = [site.box.wait_job(run.submission().job_id, END_S) for run in runs]
    assert [row["JobState"] for row in rows] == ["COMPLETED", "COMPLETED"]
    assert [sorted(run.attempts()[0].nodes) for run in runs] == [["node1", "node2"]] * 2
    assert runs[0].attempts()[0].started < runs[1].attempts()[0].ended
    assert runs[1].attempts()[0].started < runs[0].attempts()[0].ended
    assert site.result("first").metrics == site.result("second").metrics


def test_every_launcher_reaches_the_same_loss(site: Site) -> None:
    job = ["-m", "toolkit", "run", "configs/digits_ddp.yaml", *SHORT]
    local = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2"]
    launchers = {
        "srun": ["srun", "--nodes=2", "--ntasks=3", "python", *job],
        "pmix": ["srun", "--nodes=2", "--ntasks=2", "--mpi=pmix", "python", *job],
        "torchrun": [*local, "torchrun", "--standalone", "--nproc-per-node=2", *job],
        "python": [*local, "python", *job],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "python", *job],
    }
    for name, argv in launchers.items():
        out = site.run(*argv, f"name={name}")
        assert "no supervisor" in out or name == "pmix"
    losses = {name: site.result(name).metrics["train/loss"] for name in launchers}
    accuracies = {name: site.result(name).metrics["eval/accuracy"] for name in launchers}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["python"]), rel=1e-5)
    assert len(set(accuracies.values())) == 1


def test_a_rank_killed_in_mid_epoch_is_noticed_named_and_the_run_completes(site: Site) -> None:
    site.submit("configs/digits_ddp.yaml", "cluster.nodes=2", "train.epochs=120", "checkpoint.every_steps=20")
    run = site.only_run()
    reached(run, 60)
    # The victim's environment tells its rank, which the record must name.
    victim = site.ranks("node2")[0]
    rank = int(
        dict(p.split("=", 1) for p in Path(f"/proc/{victim}/environ").read_text().split("\0") if "=" in p)[
            "SLURM_PROCID"
        ]
    )
    os.kill(victim, signal.SIGKILL)
    wait_for(run.attempts, 10, "the attempt's end")
    assert site.box.wait_job(run.submission().job_id, END_S)["JobState"] == "COMPLETED"
    first, second = run.attempts()
    assert (first.cause, first.decision) == ("crashed", "restart")
    assert (first.first_failure.rank, first.first_failure.host) == (rank, "node2")
    assert "SIGKILL" in first.first_failure.how
    assert second.step_start >= 20
    result = run.result()
    assert (result.state, result.attempts, result.step) == ("completed", 2, 2695)
    told = json.loads(site.run("toolkit", "report", run.id, "--json"))["runs"][0]
    nodes = [list(attempt.nodes) for attempt in (first, second)]
    assert [(each["cause"], each["nodes"]) for each in told["attempts"]] == [
        ("crashed", nodes[0]),
        ("completed", nodes[1]),
    ]
    steps = [json.loads(line)["step"] for line in (run.tensorboard / "metrics.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader(site.run("toolkit", "upload", run.id, "csv").splitlines()))
    assert [int(row["step"]) for row in rows] == steps


def test_cancel_ends_a_running_and_a_waiting_run_for_good(site: Site) -> None:
    for name, extra in (("running", {}), ("waiting", {"hold": True})):
        nodes = ["cluster.nodes=2", "cluster.tasks_per_node=1", f"cluster.extra={json.dumps(extra)}"]
        site.submit("configs/digits_ddp.yaml", f"name={name}", *nodes, *LONG)
    reached(site.find("running"), 20)
    for name in ("running", "waiting"):
        site.run("toolkit", "cancel", name)
        run = site.find(name)
        wait_for(run.result, 30, "a result")
        assert site.result(name).state == "cancelled"
        assert site.box.wait_job(run.submission().job_id, END_S)["JobState"] == "CANCELLED"
    wait_for(lambda: not site.processes(), 20, "no process of ours on any node")


def test_scancel_is_recognised_and_never_undone(site: Site) -> None:
    tell = "notify.command=[sh, -c, 'echo $TOOLKIT_STATE; squeue --noheader --format=%i --me']"
    job = site.sbatch("--nodes=2", "sbatch/ddp_4node.sh", *LONG, tell)
    run = site.only_run()
    reached(run, 20)
    site.run("scancel", job)
    wait_for(run.result, 30, "a result")
    assert site.box.wait_job(job, END_S)["JobState"] == "CANCELLED"
    assert run.attempts()[0].cause == "cancelled"
    assert (run.logs / "notify.log").read_text().split() == ["cancelled", job]  # within KillWait, and Slurm answers it


def test_a_killed_job_is_the_same_run_as_an_undisturbed_one(site: Site) -> None:
    size = ["cluster.nodes=2", "cluster.tasks_per_node=2"]
    out = site.run("toolkit", "resume-check", "configs/digits_ddp.yaml", *size, "--steps", "40", check=False)
    assert "IDENTICAL: 40 steps on 4 ranks" in out
