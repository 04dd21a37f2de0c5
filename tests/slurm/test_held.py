"""Jobs that are held in the queue, by their user or an administrator, before their start and after a requeue."""

from __future__ import annotations

import pytest

from tests.slurm.site import END_S, Site, attempts_of, nothing_lost, reached
from tests.slurm.test_stop import completed, slow_project, submit
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]


def says(site: Site, run: RunDir, note: str) -> None:
    """Check that `status` and `why` have the note, once Slurm's answer that commands share is of this job."""

    def shown() -> str | None:
        printed = site.run("toolkit", "status", run.id, "--wide")
        return printed if note in printed else None

    wait_for(shown, END_S, f"{note!r} in the status")
    assert f"next: {note}" in site.run("toolkit", "why", run.id)


def stopped(site: Site, run: RunDir, why: str) -> None:
    """Stop the run; check that it ends at once, and is not in the queue any more."""
    job = site.job_of(run)
    site.run("toolkit", "stop", run.id)
    result = wait_for(run.result, END_S, "a result")
    assert (result.state, result.why) == ("stopped", why)
    assert site.box.job(job)["JobState"] == "CANCELLED"


@pytest.mark.parametrize("who", ["user", "administrator"])
def test_a_job_that_is_held_in_the_queue_is_shown_so_and_ends_when_it_is_stopped(site: Site, who: str) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=1500", hold=True)
    job = site.job_of(run)
    if who == "administrator":
        site.box.run(["scontrol", "hold", job])
        says(site, run, f"an administrator holds job {job} (JobHeldAdmin), and can let it continue")
    else:
        says(site, run, f"Slurm holds job {job} (JobHeldUser); when that is fixed, `scontrol release {job}`")
    assert f"run {run.id} is queued" in site.run("toolkit", "resume", run.id, check=False)
    stopped(site, run, "stopped before it started")


@pytest.mark.parametrize("how", ["requeued", "special exit"])
def test_a_run_that_is_requeued_and_held_loses_nothing_and_says_what_releases_it(site: Site, how: str) -> None:
    run = submit(site, slow_project(site, 0.02), "train.max_steps=1500")
    reached(run, 50)
    job = site.job_of(run)
    site.box.run(["scontrol", "requeuehold", *(["State=SpecialExit"] if how == "special exit" else []), job])
    (attempt,) = attempts_of(run, 1)
    assert (attempt.cause, attempt.decision) == ("preempted", "requeue")
    assert attempt.line.startswith("put back into the queue by Slurm at step")
    wait_for(lambda: site.box.job(job)["JobState"] != "COMPLETING", END_S, "the end of the job's first start")
    says(site, run, f"Slurm holds job {job} (job requeued in held state); when that is fixed, `scontrol release {job}`")
    if how == "special exit":
        stopped(site, run, "stopped while it waited to continue")
        return
    site.box.run(["scontrol", "release", job])
    completed(site, run)
    nothing_lost(run)
