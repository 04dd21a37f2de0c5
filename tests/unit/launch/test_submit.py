"""The sbatch script, word for word, and what cannot get into it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import rundir
from toolkit.config import JobConfig
from toolkit.errors import RequestError
from toolkit.launch import submit
from toolkit.launch.submit import Run, sbatch_script
from toolkit.rundir import RunDir

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=acc
#SBATCH --comment='it'"'"'s "quoted"; $(rm -rf /)'
#SBATCH --constraint='a100&ib'
#SBATCH --cpus-per-task=6
#SBATCH --exclude='node[3,7]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=a100:4
#SBATCH --job-name=train
#SBATCH --mem=1536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output='/r u n/submitit/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --time=60

# setup
export PYTHONPATH='/r u n/code'"${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONSAFEPATH=1
export TOOLKIT_RUNS=/
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
exec {python} -u -m submitit.core._submit '/r u n/submitit'
"""


def full_config() -> JobConfig:
    config = JobConfig(name="train")
    cluster = config.cluster
    cluster.nodes, cluster.tasks_per_node, cluster.cpus_per_task, cluster.time_min = 2, 4, 6, 60
    cluster.gpus_per_node, cluster.gpu_type, cluster.mem_gb = 4, "a100", 1.5
    cluster.partition, cluster.account, cluster.qos = "gpu", "acc", "high"
    cluster.constraint, cluster.exclude, cluster.exclusive = "a100&ib", "node[3,7]", True
    cluster.signal_delay_s, cluster.setup = 90, ["module load cuda"]
    cluster.extra = {"comment": 'it\'s "quoted"; $(rm -rf /)', "requeue": True, "no_kill": False}
    return config


def test_every_cluster_key_reaches_the_sbatch_script() -> None:
    run = RunDir(Path("/r u n"))
    assert sbatch_script(full_config(), run) == GOLDEN.replace("{python}", shlex.quote(sys.executable))


def test_a_default_config_asks_for_nothing_it_was_not_told() -> None:
    text = sbatch_script(JobConfig(), RunDir(Path("/run")))
    for word in ("partition", "account", "gpus", "mem", "wckey", "exclusive", "srun"):
        assert word not in text


def test_bash_sees_the_snapshot_first(tmp_path: Path) -> None:
    """The oracle is bash: what does the script export?"""
    run = RunDir(tmp_path / "it's a run/x/y")
    lines = sbatch_script(JobConfig(), run).split("# setup\n")[1].split("# command")[0]
    done = subprocess.run(
        ["bash", "-c", lines + 'printf "%s\\n%s\\n" "$PYTHONPATH" "$PYTHONSAFEPATH"'],
        env={"PYTHONPATH": "/mine"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{run.code}:/mine\n1\n"


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(RequestError, match="auto, slurm, local, debug"):
        submit.choose_executor("slrum")


def test_a_refused_config_leaves_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    config = tmp_path / "c.yaml"
    config.write_text("checkpoint: {keep: 1}\n")
    with pytest.raises(RequestError):
        submit.submit(config, executor="local")
    assert not (tmp_path / "runs").exists()


def test_environment_comes_back_after_submitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "mask")
    before = dict(os.environ)
    with submit._only_these({"A": "1"}):
        assert dict(os.environ) == {"A": "1"}
    assert dict(os.environ) == before


def make_run(tmp_path: Path, **status: object) -> Run:
    run = rundir.create("test", tmp_path)
    run.write_status(dict(status))
    return Run(run, "local", "1")


def test_waiting_ends_when_the_result_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.write_result({"state": "completed", "metrics": {}})
    assert run.wait()["state"] == "completed"
    assert run.result()["state"] == "completed"


def test_the_result_of_a_failed_run_is_an_error_with_its_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.write_result({"state": "failed", "why": "rank 1 on node1: ValueError: boom"})
    with pytest.raises(Exception, match="rank 1 on node1: ValueError: boom"):
        run.result()


def test_a_completed_run_is_not_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.write_result({"state": "completed"})
    with pytest.raises(RequestError, match="completed"):
        submit.resume(run.dir)


def test_a_running_run_is_not_resumed(tmp_path: Path) -> None:
    run = make_run(tmp_path, state="running")
    with pytest.raises(RequestError, match="running"):
        submit.resume(run.dir)
