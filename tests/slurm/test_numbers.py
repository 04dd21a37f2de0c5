"""A job is known by its cluster and its script, and not by its number alone."""

import json
from typing import Any

from tests.slurm.site import END_S, START_S, Site
from tests.waiting import wait_for
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

SIZE = ["cluster.nodes=1", "cluster.tasks_per_node=1", "cluster.cpus_per_task=1"]


def running(site: Site, name: str) -> RunDir:
    """Wait until the run of this name works, and return it."""

    def found() -> RunDir | None:
        runs = [run for run in rundir.all_runs(site.runs) if run.name == name]
        state = runs[0].status().state if runs else None
        return runs[0] if state is not None and state.has_ranks else None

    return wait_for(found, START_S, f"the run {name}")


def test_a_requeue_and_a_cancel_at_once_end_the_run(site: Site) -> None:
    for number in range(2):
        name = f"both{number}"
        site.run("toolkit", "exec", f"--name={name}", *SIZE, "--", "sleep", "600", cwd=site.folder)
        run = running(site, name)
        job = site.job_of(run)
        site.box.run(["scontrol", "requeue", job])
        # At once, and when its supervisor has left for the requeue.
        if number:
            wait_for(lambda it=run: it.status().state == "requeued", START_S, "the supervisor's end")  # type: ignore[misc]
        site.run("toolkit", "cancel", run.id)
        result = wait_for(run.result, END_S, "a result")
        assert result.state == "cancelled", result
        assert "cancelled" in site.run("toolkit", "why", run.id, check=False)
        wait_for(lambda it=job: site.box.job(it)["JobState"] == "CANCELLED", END_S, "the job's end")  # type: ignore[misc]


def change_owner(run: RunDir, **values: Any) -> None:
    path = run.path / "owner.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_number_alone_ends_no_job(site: Site) -> None:
    site.run("toolkit", "exec", "--name=ours", *SIZE, "--", "sleep", "600", cwd=site.folder)
    script = site.folder / "own.sh"
    script.write_text(f"#!/bin/bash\nexec toolkit exec --name=own {' '.join(SIZE)} -- sleep 600\n")
    site.give(script)
    own_job = site.sbatch("--ntasks=1", "--export=ALL", str(script), "a b")
    ours, own = running(site, "ours"), running(site, "own")
    job = site.job_of(ours)

    def state(number: str) -> str:
        return site.box.job(number)["JobState"]

    # A copy has the numbers, and none of the jobs.
    copy = RunDir(site.folder / "copy" / ours.name / ours.id)
    site.run("mkdir", "-p", str(copy.path.parent))
    site.run("cp", "-a", str(ours.path), str(copy.path))
    assert "is a copy, and the job is that of" in site.run("toolkit", "cancel", str(copy.path), check=False)
    # The number of a run that died was given again, to a job of somebody's own script.
    change_owner(copy, path=str(copy.path), jobs=[own_job])
    site.run("toolkit", "cancel", str(copy.path))
    assert copy.result().state == "cancelled"
    # The run is trained on another cluster, which has a job of the same number.
    change_owner(own, cluster="elsewhere")
    assert "works on the cluster elsewhere" in site.run("toolkit", "resume", own.id, check=False)
    assert f"belongs to job {own_job} of the cluster elsewhere" in site.run("toolkit", "stop", own.id, check=False)
    change_owner(
        own, cluster=site.box.run(["scontrol", "show", "config"]).stdout.partition("ClusterName")[2].split()[1]
    )
    assert (state(job), state(own_job)) == ("RUNNING", "RUNNING")
    # What is ours is found: by the user's own script, and in a folder that has another name by now.
    assert json.loads((own.path / "owner.json").read_text())["command"] in (str(script), f"{script} a b")
    site.run("toolkit", "cancel", own.id)
    renamed = ours.path.with_name("20260101-000000-00000000")
    site.run("mv", str(ours.path), str(renamed))
    site.run("toolkit", "cancel", str(renamed))
    for number in (job, own_job):
        wait_for(lambda each=number: state(each) not in ("RUNNING", "COMPLETING"), END_S, "the job's end")  # type: ignore[misc]
