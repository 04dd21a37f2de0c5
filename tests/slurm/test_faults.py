"""Random faults of every kind over one long run.

It must end with the weights of an undisturbed run.

``make soak`` makes TOOLKIT_FAULTS faults, 50 by default, on each of its four kinds of box: 200 in all. TOOLKIT_SEED
repeats a sequence of faults (not its exact moments: those are the machine's, too), TOOLKIT_FAULT_KINDS ("node cut off,
preempted") makes these kinds only.
"""

import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.box import Box
from tests.slurm.conftest import visit_with_small_disk
from tests.slurm.site import END_S, START_S, Site, pid_of_supervisor
from tests.slurm.test_stop import completed
from tests.waiting import wait_for
from toolkit.checkpoint.folder import CheckpointFolder, newest_step
from toolkit.files.run_files import RunStatus
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.slurm

SAVE_EVERY = 20
EVALUATE_EVERY = 30
#: More than the faults can need: the run is to be given up for no number of them, only for getting nowhere.
CONFIG = f"""
job: jobs.faults
cluster: {{nodes: 2, spare_nodes: 1, tasks_per_node: 1, time_min: 1440}}
retry: {{max_failures: 100000, max_requeues: 100000, no_progress_attempts: 6}}
dist: {{timeout_s: 60}}
data: {{name: digits, global_batch_size: 64}}
optim: {{lr: 0.05}}
train: {{epochs: 1000000, max_steps: 1000000, eval_every: {EVALUATE_EVERY}, log_every: 10}}
checkpoint: {{every_steps: {SAVE_EVERY}}}
"""
#: The reference job; the disturbed run spends enough time in each phase for faults to hit it there.
JOB = """
import time
from jobs import classify
from toolkit.base import fsio
from toolkit.data.loader import Loader
from toolkit.train import job

def slowed(call, pause_s):
    def slow(*args):
        time.sleep(pause_s)
        return call(*args)
    return slow

def main(config):
    if config.name == "disturbed":
        Loader.at = slowed(Loader.at, 0.05)
        job.evaluate = slowed(job.evaluate, 1.0)
        fsio.write_stream = slowed(fsio.write_stream, 1.0)
    return classify.Classify.main(config, classify.Params())
"""
#: What the run is doing when a fault strikes. "starting" takes another fault, to make it start.
MOMENTS = ("starting", "train", "evaluate", "checkpoint")
#: A damaged node comes back after so long at the most, whether the run continues without it or not.
LONGEST_ABSENCE_S = 60
RECOVERY_S = 400


class Disturber:
    """Make faults in a run, one after the other. After each, wait until the run makes progress again."""

    def __init__(self, site: Site, run: RunDir, dice: random.Random) -> None:
        self.site, self.run, self.dice = site, run, dice
        self._looked = 0.0

    @property
    def status(self) -> RunStatus:
        return self.run.status()

    def some_rank(self) -> int:
        """Its pid."""
        node = self.dice.choice(self.status.nodes)
        return wait_for(lambda: self.site.ranks(node), START_S, f"a rank on {node}")[0]

    def disturb(self, kind: str) -> None:
        """Make one fault of this kind at a random moment. Wait until the run has recovered."""
        moment = "checkpoint" if kind == "rank killed in a save" else self.dice.choice(MOMENTS)
        self._await(moment)
        # A recovered run has ended its attempt, unless the fault passes, and has made a save interval of new steps.
        closed, best = len(self.run.attempts()), self._best()
        began = time.monotonic()
        say(f"{kind}, at step {self.run.step()} of attempt {self.status.attempt} ({moment}, {self.status.nodes})")
        fix = FAULTS[kind](self)
        ends = kind not in PASSING

        def gets_on() -> bool:
            assert self.run.result() is None, self.run.result()
            self._release_if_held()
            has_ended = len(self.run.attempts()) >= closed + ends
            return has_ended and self._is_training() and self.run.step() > best + SAVE_EVERY

        # A node returns at a random time, or once the run does without it, so that later faults find all nodes.
        if fix is not None:
            back = time.monotonic() + self.dice.uniform(1, LONGEST_ABSENCE_S)
            try:
                wait_for(lambda: gets_on() or time.monotonic() > back, RECOVERY_S, "the time of the node's return")
            finally:
                fix()
        try:
            wait_for(gets_on, RECOVERY_S, f"new steps after {kind!r}")
        except Exception:
            self._say_what_is_known()
            raise
        for attempt in self.run.attempts()[closed:]:
            say(f"    {attempt.cause}, {attempt.decision}: {attempt.line}")
        say(f"    gets on after {time.monotonic() - began:.1f} s")
        wait_for(self._nodes_are_well, END_S, "nodes that are well")

    def _say_what_is_known(self) -> None:
        """Print the state of queue, nodes and logs. A reader of the failure has no box to look at."""
        for command in (["squeue", "--all"], ["sinfo", "-NRl"], ["sinfo", "-Nl"], ["scontrol", "show", "job"]):
            say(f"{' '.join(command)}:\n{self.site.box.run(command, check=False).stdout}")
        say(f"status.json: {self.status}")
        for log in ("supervisor.log", *(path.name for path in self.run.logs.glob("agent*.log"))):
            say("\n".join([f"{log}:", *(self.run.logs / log).read_text().splitlines()[-60:]]))

    def _await(self, moment: str) -> None:
        if moment == "starting":
            attempt = self.status.attempt
            kill_a_rank(self)
            wait_for(lambda: self.status.attempt > attempt and self.status.state == moment, END_S, "a start")
            time.sleep(self.dice.uniform(0, 6))  # the random moment itself
        elif moment == "checkpoint":  # which is written while the training continues
            wait_for(lambda: self._is_training() and [*self.run.checkpoints.glob("step-*.tmp-*")], END_S, moment)
        else:
            wait_for(lambda: self._is_training() and self.status.progress.phase == moment, END_S, moment)

    def _best(self) -> int:
        return max(self.run.step(), *(a.step_end or 0 for a in self.run.attempts()), 0)

    def _is_training(self) -> bool:
        return self.status.state == "running" and self.status.progress.phase is not None

    def _release_if_held(self) -> None:
        """As an administrator does. A node that was cut off for so long that the job went on elsewhere may refuse its
        next start ("Duplicate jobid"): Slurm drains the node and holds the job, and nothing of ours runs then."""
        if time.monotonic() < self._looked + 5:
            return
        self._looked = time.monotonic()
        job = self.status.job_id
        if self.site.box.job(job).get("Reason") == "launch_failed_requeued_held":
            say("    Slurm holds the job, since a node refused it; released")
            drained = self.site.box.run(["sinfo", "--noheader", "--states=drain", "--format=%N"]).stdout.split()
            self.site.box.run(["scontrol", "update", f"nodename={','.join(drained)}", "state=resume"])
            self.site.box.run(["scontrol", "release", job])

    def _nodes_are_well(self) -> bool:
        states = self.site.box.run(["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"]).stdout.split()
        return set(states) <= {"idle", "mixed", "allocated", "completing"}


Fix = Callable[[], None]


def kill_a_rank(it: Disturber) -> None:
    os.kill(it.some_rank(), signal.SIGKILL)


def stop_a_rank(it: Disturber) -> None:
    os.kill(it.some_rank(), signal.SIGSTOP)


def kill_the_supervisor(it: Disturber) -> None:
    os.kill(pid_of_supervisor(it.site, it.run), signal.SIGKILL)


def kill_node(it: Disturber, node: str) -> Fix:
    it.site.box.kill_node(node)
    return lambda: it.site.box.start_node(node)


def kill_a_ranks_node(it: Disturber) -> Fix:
    return kill_node(it, it.dice.choice([node for node in it.status.nodes if node != it.status.host]))


def kill_the_batch_host(it: Disturber) -> Fix:
    return kill_node(it, it.status.host)


def cut_a_node_off(it: Disturber) -> Fix:
    node = it.dice.choice(sorted({*it.status.nodes, it.status.host}))
    it.site.box.cut_node(node)
    return lambda: it.site.box.join_node(node)


def preempt(it: Disturber) -> None:
    it.site.preempt()


def requeue(it: Disturber) -> None:
    it.site.run("scontrol", "requeue", it.status.job_id)


def signal_the_batch_host(it: Disturber) -> None:
    it.site.run("scancel", "--batch", "--signal=USR1", it.status.job_id)


def restart_the_controller(it: Disturber) -> None:
    it.site.box.restart_slurmctld()


FAULTS: Mapping[str, Callable[[Disturber], Fix | None]] = {
    "rank killed": kill_a_rank,
    "rank killed in a save": kill_a_rank,
    "rank stopped": stop_a_rank,
    "supervisor killed": kill_the_supervisor,
    "rank's node killed": kill_a_ranks_node,
    "batch host killed": kill_the_batch_host,
    "node cut off": cut_a_node_off,
    "preempted": preempt,
    "requeued": requeue,
    "told to stop": signal_the_batch_host,
    "controller restarted": restart_the_controller,
}
#: These may pass without the end of an attempt.
PASSING = ("node cut off", "controller restarted")
#: Half a minute and more until they are noticed.
SLOW = ("batch host killed", "node cut off", "rank stopped", "rank's node killed")


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)


def project(site: Site) -> Path:
    source = Path(__file__).parents[2] / "jobs"
    folder = site.project(**{name: (source / f"{name}.py").read_text() for name in ("classify", "models")}, faults=JOB)
    (folder / "faults.yaml").write_text(CONFIG)
    return folder


def submit(site: Site, folder: Path, name: str, *overrides: str) -> RunDir:
    site.run("toolkit", "submit", "faults.yaml", f"name={name}", *overrides, cwd=folder)
    return site.find(name)


def ends_with_the_weights_of_an_undisturbed_run(site: Site, draw: Callable[[random.Random], list[str]]) -> None:
    """Play the drawn faults, stop the run, and resume it to its end. The end is a few steps later."""
    seed = int(os.environ.get("TOOLKIT_SEED", random.randrange(10**6)))
    print(f"TOOLKIT_SEED={seed}")
    dice, folder = random.Random(seed), project(site)
    run = submit(site, folder, "disturbed")
    disturber = Disturber(site, run, dice)
    wait_for(lambda: run.step() > SAVE_EVERY, END_S, "the first steps")
    for kind in draw(dice):
        disturber.disturb(kind)
    steps = finish(site, run)
    is_sound(run)
    left_nothing_behind(site, run)
    undisturbed = submit(site, folder, "undisturbed", f"train.max_steps={steps}")
    completed(site, undisturbed, END_S + steps * 0.1)
    assert tensors(run, steps) == tensors(undisturbed, steps)


def finish(site: Site, run: RunDir) -> int:
    """Stop the run, set its end a few steps later, and resume it. Return the number of its steps."""
    site.run("toolkit", "stop", run.id)
    assert wait_for(run.result, END_S, "a result").state == "stopped"
    steps = run.attempts()[-1].step_end + SAVE_EVERY
    run.config.write_text(re.sub(r"max_steps: \d+", f"max_steps: {steps}", run.config.read_text()))
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), END_S, "an empty queue")
    site.run("toolkit", "resume", run.id)
    assert completed(site, run).step == steps
    return steps


def is_sound(run: RunDir) -> None:
    """The attempts are numbered without gaps; each began at the newest checkpoint that there was."""
    attempts = run.attempts()
    print(*(json.dumps([a.attempt, a.step_start, a.step_end, a.line]) for a in attempts), sep="\n")
    assert [a.attempt for a in attempts] == list(range(1, len(attempts) + 1))
    saved = 0
    for attempt in attempts:
        if attempt.step_start is not None:
            assert attempt.step_start >= saved, attempt
            assert attempt.step_start in (saved, *range(0, saved + 2 * SAVE_EVERY, SAVE_EVERY)), attempt
        saved = max([saved, *saved_in(run, attempt.attempt)])


def saved_in(run: RunDir, attempt: int) -> list[int]:
    """The steps that rank 0 says to have committed."""
    log = run.rank_log(attempt, 0)
    text = log.read_text(errors="replace") if log.exists() else ""
    return [int(step) for step in re.findall(r"saved \S+/step-(\d+) in ", text)]


def left_nothing_behind(site: Site, run: RunDir) -> None:
    wait_for(lambda: not site.run("squeue", "--noheader").strip(), END_S, "an empty queue")
    wait_for(lambda: not site.processes(), 60, f"no process of ours on any node, but {site.processes()}")
    names = [path.name for path in run.checkpoints.iterdir()]
    assert all(re.fullmatch(r"step-\d+", name) for name in names), names


def tensors(run: RunDir, step: int) -> tuple[Any, dict[str, bytes]]:
    """What the last checkpoint holds, every bit of it, verified."""
    assert newest_step(run.checkpoints) == step
    checkpoints = CheckpointFolder(run.checkpoints)
    manifest = checkpoints.verify(checkpoints.path(step))
    return manifest.tensors, {name: (checkpoints.path(step) / name).read_bytes() for name in manifest.files}


def test_after_three_random_faults_the_weights_are_those_of_an_undisturbed_run(site: Site) -> None:
    def draw(dice: random.Random) -> list[str]:
        kinds = [dice.choice(SLOW), *dice.sample(sorted({*FAULTS} - {*SLOW}), 2)]
        return dice.sample(kinds, 3)

    ends_with_the_weights_of_an_undisturbed_run(site, draw)


@pytest.mark.soak
@pytest.mark.parametrize("half", [1, 2])
def test_after_many_faults_of_all_kinds_the_weights_are_those_of_an_undisturbed_run(site: Site, half: int) -> None:
    """Two runs, for there is a second worker."""
    count = int(os.environ.get("TOOLKIT_FAULTS", "50")) // 2

    def draw(dice: random.Random) -> list[str]:
        """All kinds in random order, and again."""
        kinds = [kind for kind in os.environ.get("TOOLKIT_FAULT_KINDS", "").split(",") if kind] or sorted(FAULTS)
        endless = itertools.chain.from_iterable(dice.sample(kinds, len(kinds)) for _ in itertools.count())
        return list(itertools.islice(endless, count))

    ends_with_the_weights_of_an_undisturbed_run(site, draw)


@pytest.fixture
def small(make_box: Callable[..., Box], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Site, Path]]:
    yield from visit_with_small_disk(make_box, request, tmp_path, "1m")


def test_a_run_whose_script_ends_on_a_full_disk_has_its_result(small: tuple[Site, Path]) -> None:
    site, disk = small
    (site.folder / "fill.py").write_text(
        f"with open({str(disk / 'filler')!r}, 'wb', buffering=0) as file:\n"
        "    for size in (4096, 1):\n"
        "        try:\n"
        "            while True:\n"
        "                file.write(bytes(size))\n"
        "        except OSError:\n"
        "            pass\n"
    )
    (site.folder / "job.sh").write_text(f"#!/bin/bash\ncd {site.folder}\nexec toolkit exec -- python fill.py\n")
    site.give(site.folder)
    site.sbatch("--nodes=1", "--ntasks=1", str(site.folder / "job.sh"))
    assert wait_for(lambda: site.only_run().result(), START_S, "a result").state == "completed"
