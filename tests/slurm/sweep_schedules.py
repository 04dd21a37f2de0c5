"""Random schedules of faults and commands over sweeps.

* A sweep that nobody has stopped continues, or `sweep status` says which points `sweep retry` has to start again.
* No point of a stopped sweep trains, until somebody retries it.
* At no time do two starts write one point, and each point completes once.
"""

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.disturbances import CLUSTER_ACTIONS, TARGETS
from tests.slurm.watched import REST_S, Violation, Watched
from toolkit.files.rundir import RunDir

STEPS = 200
WIDTHS = (2, 3, 4)
SWEPT = """
import os, sys, time
from dataclasses import dataclass
sys.path.insert(0, "PROJECT")
from jobs.trace import trace
import torch, toolkit

@dataclass
class Params:
    width: int

with toolkit.start() as run:
    name = f"{run.config.name}-{run.config.params['width']}"
    run.resumable(model=torch.nn.Linear(1, 1))
    for step in run.steps(range(STEPS), total=STEPS):
        time.sleep(0.05)
        trace(name, step)
trace(name, "done")
"""
#: Times that each action is drawn. Those of other kinds are disturbances.py's.
WEIGHTS = {
    "sweep stop": 4,
    "sweep retry": 3,
    "scancel all": 1,
    "signal": 2,
    "requeue": 2,
    "kill a rank": 2,
    "kill the supervisor": 2,
    "preempt": 3,
    "controller away": 1,
    "node dead": 1,
}


@dataclass
class WatchedSweep(Watched):
    """A sweep: what has been done to it. ``ended`` once somebody has stopped it and nobody has retried it since."""

    def traces_of_points(self) -> dict[str, list[list[str]]]:
        paths = [self.traces / f"{self.name}-{width}" for width in WIDTHS]
        return {path.name: [line.split() for line in path.read_text().splitlines()] for path in paths if path.exists()}

    def nodes(self) -> list[str | None]:
        return ["node1", "node2", "node3", "node4"]

    def signature(self) -> tuple[Any, ...]:
        return (*map(len, self.traces_of_points().values()), tuple(self.jobs))

    def sweep(self, *words: str, cwd: Path | None = None) -> int:
        """A command as a person gives it; a traceback is a violation."""
        self.note(f"$ toolkit sweep {shlex.join(words)}")
        box, user = self.cluster.site.box, self.cluster.site.user
        variables = {"TOOLKIT_RUNS": str(self.cluster.site.runs)}
        done = box.run(["toolkit", "sweep", *words], cwd=cwd, env=variables, timeout=300, check=False, user=user)
        self.output = done.stdout + done.stderr
        self.note(f"  {done.returncode}: {self.output.strip()[-700:]}")
        if "Traceback" in self.output:
            self._violated(f"traceback of `toolkit sweep {words}`: {self.output[-2000:]}")
        return done.returncode

    def rows(self) -> list[dict[str, Any]]:
        if self.sweep("status", self.name, "--json") != 0:
            raise Violation(f"the sweep has no status: {self.output[-700:]}")
        found: list[dict[str, Any]] = json.loads(self.output[self.output.index("[") :])
        return found

    def stop(self) -> None:
        if self.sweep("stop", self.name) == 0:
            self.ended = True

    def retry(self) -> None:
        before, self.ended = self.ended, False  # from this moment on its points may train
        if self.sweep("retry", self.name) != 0:
            self.ended = before

    def check_points(self) -> None:
        """Steps of two attempts of a point never alternate."""
        for name, lines in self.traces_of_points().items():
            attempts = [int(line[1]) for line in lines]
            if attempts != sorted(attempts):
                raise Violation(f"{name} is written by two attempts at once: {attempts}")


def play_sweep(it: WatchedSweep, project: Path) -> None:
    script = (project / "swept.py").read_text()
    assert str(project) in script
    asked = [
        "swept.py",
        f"name={it.name}",
        f"--name={it.name}",
        "--executor=slurm",
        f"params.width={','.join(map(str, WIDTHS))}",
    ]
    asked += ["--max-running=2", "cluster.nodes=1", "cluster.tasks_per_node=1", "train.log_every=10"]
    asked += ["checkpoint.every_steps=50", "retry.max_failures=50", "retry.max_requeues=1000"]
    for _ in range(5):  # the controller may be away: a person tries again
        if it.sweep(*asked, cwd=project) == 0:
            break
        time.sleep(10)
    else:
        raise Violation("could not be submitted")
    for _ in range(it.dice.randint(1, 4)):
        time.sleep(it.dice.choice([it.dice.uniform(0, 3), it.dice.uniform(0, 20)]))
        action = it.dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        it.actions.append(action)
        disturb(it, action)
    settle(it)


def disturb(it: WatchedSweep, action: str) -> None:
    it.note(f"--- {action} (jobs {it.jobs})")
    if action == "sweep stop":
        it.stop()
    elif action == "sweep retry":
        it.retry()
    elif action == "scancel all":
        for job, _ in it.jobs:
            it.cluster.site.box.run(["scancel", job], check=False, user=it.cluster.site.user)
    elif action == "signal":
        number, target = it.dice.choice(["TERM", "USR1", "USR2", "HUP", "CONT"]), it.dice.choice(list(TARGETS))
        for job, state in it.jobs:
            if state == "RUNNING":
                it.note(f"{number} to {target} of {job}")
                it.cluster.site.box.run(["scancel", *TARGETS[target], f"--signal={number}", job], check=False)
    elif action == "requeue":
        it.requeue()
    elif action == "kill a rank":
        it.kill("toolkit run", it.name)
    elif action == "kill the supervisor":
        it.kill("supervise", it.name)
    else:
        with it.cluster.fault:
            CLUSTER_ACTIONS[action](it)


def settle(it: WatchedSweep) -> None:
    for _ in range(6):
        it.wait_until_at_rest()
        it.check_points()
        rows = it.rows()
        states = {row["state"] for row in rows}
        it.note(f"at rest: {sorted(states)}; ended by somebody: {it.ended}")
        if len(rows) != len(WIDTHS):
            raise Violation(f"{len(rows)} points of {len(WIDTHS)}: {rows}")
        if states == {"completed"}:
            check_completed(it, rows)
            return
        if it.ended:
            lines = it.signature()
            time.sleep(REST_S)
            if it.signature() != lines:
                raise Violation(f"it was stopped and continues: {lines}, {it.signature()}")
        if not it.ended and not set(it.actions) & {"sweep stop", "scancel all"}:
            it.note(f"NEEDED A PERSON: {[(row['state'], row.get('why')) for row in rows]}")
        it.retry()
    raise Violation("retried six times, and not completed")


def check_completed(it: WatchedSweep, rows: list[dict[str, Any]]) -> None:
    for name, lines in it.traces_of_points().items():
        whats = [line[3] for line in lines]
        # A node that dies just then takes the result with it: the script's last lines run again.
        if "done" not in whats or {*whats[whats.index("done") :]} != {"done"}:
            raise Violation(f"{name} continues after it is done, or is not: {lines[-3:]}")
    for row in rows:
        if RunDir(Path(row["path"])).result().step != STEPS:
            raise Violation(f"completed at another step: {row}")
