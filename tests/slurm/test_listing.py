"""Waiting jobs of a real queue, with squeue's reasons and one call for many commands.

The runs of live jobs are kept.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.site import START_S, Site
from tests.slurm.test_stop import slow_project
from tests.waiting import wait_for
from toolkit.files import rundir

pytestmark = pytest.mark.slurm

#: Calls of squeue are noted here, and passed on.
COUNTED = '#!/bin/sh\necho "$*" >> {log}\nexec {squeue} "$@"\n'


def counted_squeue(site: Site) -> tuple[str, Path]:
    """A PATH on which squeue notes its calls, and the file with them."""
    log, folder = site.folder / "calls", site.folder / "bin"
    folder.mkdir()
    squeue = site.run("sh", "-c", "command -v squeue").strip()
    (folder / "squeue").write_text(COUNTED.format(log=log, squeue=squeue))
    (folder / "squeue").chmod(0o755)
    log.write_text("")
    site.give(site.folder)
    return f"{folder}:{site.run('sh', '-c', 'echo $PATH').strip()}", log


def test_waiting_runs_say_why_and_ten_commands_at_once_ask_slurm_once(site: Site) -> None:
    project = slow_project(site, 0.02)
    hog = site.sbatch("--nodes=4", "--exclusive", "--wrap=sleep 300")
    wait_for(lambda: "RUNNING" in site.run("squeue", "-h", f"-j{hog}", "-o%T"), START_S, "the hog runs")
    for name in ("one", "two"):
        site.run("toolkit", "submit", "slow.yaml", f"name={name}", cwd=project)
    jobs = {run.name: site.job_of(run) for run in rundir.all_runs(site.runs)}

    def reasons() -> dict[str, str]:
        return {name: site.run("squeue", "-h", f"-j{job}", "-o%r").strip() for name, job in jobs.items()}

    wait_for(lambda: {*reasons().values()} <= {"Resources", "Priority"}, START_S, "the scheduler looks at them")
    path, log = counted_squeue(site)
    env: dict[str, Any] = {"PATH": path, "XDG_CACHE_HOME": str(site.folder / "cache")}
    at_once = "for i in 0 1 2 3 4 5 6 7 8 9; do toolkit status --all --json > $0/rows-$i.json & done; wait"
    site.run("sh", "-c", at_once, str(site.folder), **env)
    assert len(log.read_text().splitlines()) <= 2, "the ten may take longer than an answer is fresh"
    expected = reasons()
    for number in range(10):
        rows = json.loads((site.folder / f"rows-{number}.json").read_text())
        assert {row["name"]: row["reason"] for row in rows} == expected
    page = site.run("toolkit", "status", "--wide", **env)
    assert "waits for free nodes (Resources)" in page or "jobs with a higher priority come first (Priority)" in page
    # A run in the queue is alive.
    assert "when it has ended it can be removed" in site.run("toolkit", "rm", "one", check=False)
    for name in ("one", "two"):
        site.run("toolkit", "cancel", name)
    site.run("scancel", hog)
    site.run("toolkit", "rm", "one", "two")
    assert rundir.all_runs(site.runs) == []
