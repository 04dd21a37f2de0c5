"""A sweep on a real Slurm, as an array with a limit.

It has a preemption, a failed point that runs again, and a best point.
"""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.site import END_S, START_S, Site
from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.slurm

#: Its loss follows from the width and the step alone. One width fails until a file is there.
SCRIPT = """
import time
from dataclasses import dataclass
from pathlib import Path
import torch
import toolkit

@dataclass
class Params:
    width: int
    ready: str

with toolkit.start() as run:
    params = run.config.params
    if params["width"] == 3 and not Path(params["ready"]).exists():
        raise ValueError("width 3 is not ready yet")
    weights = torch.nn.Linear(1, 1)
    run.resumable(model=weights)
    for step in run.steps(range(120), total=120):
        time.sleep(0.1)
        run.log(loss=abs(params["width"] - 4.0) + 0.125)
"""


def toolkit_sweep(site: Site, project: Path, *argv: str) -> Any:
    """The JSON document that the command prints."""
    variables = {"TOOLKIT_RUNS": str(site.runs)}
    done = site.box.run(["toolkit", "sweep", *argv, "--json"], cwd=project, env=variables, user=site.user)
    return json.loads(done.stdout)


def last_loss(path: str) -> float:
    """The oracle: what rank 0 has written, line by line."""
    lines = (RunDir(Path(path)).tensorboard / "metrics.jsonl").read_text().splitlines()
    losses = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]
    return float(losses[-1])


def test_a_sweep_with_a_preemption_and_a_failure_ends_with_every_point_once(site: Site) -> None:
    project, ready = site.project(), site.folder / "ready"
    (project / "loop.py").write_text(SCRIPT)
    asked = ["loop.py", "params.width=2..5", f"params.ready={ready}", "cluster.mem_gb=1", "train.log_every=5"]
    asked += ["retry.max_failures=0", "--metric=-train/loss", "--max-running=2"]
    sent = toolkit_sweep(site, project, *asked)
    assert (sent["new"], len(sent["jobs"])) == (4, 1)
    assert toolkit_sweep(site, project, *asked)["jobs"] == []  # the same again: nothing

    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = toolkit_sweep(site, project, "status", "loop")
        running = site.run("squeue", "--noheader", "--array", "--states=RUNNING", f"--jobs={sent['jobs'][0]}")
        assert len(running.split("\n")) <= 2 + 1  # Slurm's own count; the last line is empty
        return found

    def all_over() -> list[dict[str, Any]] | None:
        found = rows()
        return found if all(row["state"] in ("completed", "failed") for row in found) else None

    wait_for(lambda: any((row["step"] or 0) > 5 for row in rows()), START_S, "a point at work")
    site.preempt()
    found = wait_for(all_over, END_S, "the end of all points")
    states = {row["values"]["params.width"]: row["state"] for row in found}
    assert states == {width: "failed" if width == 3 else "completed" for width in range(2, 6)}
    attempts = [attempt for row in found for attempt in RunDir(Path(row["path"])).attempts()]
    assert "preempted" in {attempt.cause for attempt in attempts}
    (failed,) = [row for row in found if row["state"] == "failed"]
    assert "width 3 is not ready yet" in site.run("toolkit", "why", failed["run"])
    # Only what failed is run again, and in the same folder.
    ready.touch()
    retried = toolkit_sweep(site, project, "retry", "loop")
    assert [row["run"] for row in retried["retried"]] == [failed["run"]]
    assert retried["retried"][0]["why"]
    wait_for(lambda: {row["state"] for row in rows()} == {"completed"}, END_S, "the point that had failed")
    assert len(list((site.runs / "loop").glob("*/result.json"))) == 4
    # The best by the files of the runs.
    best = toolkit_sweep(site, project, "best", "loop")
    by_loss = sorted(rows(), key=lambda row: last_loss(row["path"]))
    assert best[0]["values"]["params.width"] == by_loss[0]["values"]["params.width"] == 4
    exported = site.run("toolkit", "sweep", "export", "loop", cwd=project)
    table = {row["run"]: row for row in csv.DictReader(io.StringIO(exported[exported.index("run,point") :]))}
    assert {run: float(row["train/loss"]) for run, row in table.items()} == {
        row["run"]: pytest.approx(last_loss(row["path"])) for row in rows()
    }
