"""Random schedules of faults and commands over short runs, and the invariants of each run.

* A run that no user ended continues, or ``status``, ``why`` and ``result.json`` say what a person must do.
* A run that a user ended never trains again, until a user resumes it.
* At no time do two jobs or two supervisors write one run.
* A run is completed only if rank 0 said so.

A schedule is drawn from one seed. Several run at a time on one box, because each spends most of its time in waits. A
fault of the cluster (a preemption, a full disk, a dead node) hits all of them.
"""

import json
import random
import re
import shlex
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.slurm.disturbances import EARLY, WEIGHTS, act
from tests.slurm.site import Site
from tests.slurm.sweep_schedules import STEPS as SWEPT_STEPS
from tests.slurm.sweep_schedules import SWEPT, WatchedSweep, play_sweep
from tests.slurm.watched import REST_S, Cluster, Violation, Watched, say
from tests.waiting import PATIENCE
from toolkit.files import rundir

#: 20 s of training: longer than a fault, and than the moments between two of them.
STEPS = 400
#: Both write a line for each step into a file that no fault touches: when, in which attempt, which rank, which step.
TRACE = """
import os, time
def trace(name, what):
    with open(f"{traces}/{{name}}", "a") as file:
        file.write(f"{{time.time():.3f}} {{os.environ['TOOLKIT_ATTEMPT']}} {{os.environ['RANK']}} {{what}}\\n")
"""
TRAINER = """
from jobs import classify
from jobs.trace import trace
from toolkit.data.loader import Loader
plain_at = Loader.at
def main(config):
    def at(self, step):
        time.sleep(0.05)
        trace(config.name, step)
        return plain_at(self, step)
    import time
    Loader.at = at
    classify.Classify.main(config, classify.Params())
    trace(config.name, "done")
"""
#: A script with a checkpoint of its own and no torch. At SIGTERM it saves and exits with the code in its last argument.
COUNTER = """
import os, signal, sys, time
sys.path.insert(0, os.path.dirname(__file__))
from jobs.trace import trace
name, code = sys.argv[1], int(sys.argv[2])
state = f"{states}/{{name}}.{{os.environ['RANK']}}"
count = int(open(state).read()) if os.path.exists(state) else 0
def save():
    with open(state + ".new", "w") as file:
        file.write(str(count))
    os.replace(state + ".new", state)
def stop(*_):
    save()
    os._exit(code)
signal.signal(signal.SIGTERM, stop)
while count < {steps}:
    time.sleep(0.05)
    count += 1
    trace(name, count)
save()
trace(name, "done")
"""
CONFIG = f"""
job: jobs.trainer
cluster: {{tasks_per_node: 1}}
retry: {{max_failures: 50, max_requeues: 1000, no_progress_attempts: 4}}
dist: {{timeout_s: 60}}
data: {{name: digits, global_batch_size: 64}}
train: {{epochs: 1000, max_steps: {STEPS}, eval_every: 50, log_every: 10}}
checkpoint: {{every_steps: 100}}
"""
#: The share of schedules that are of sweeps.
SWEEPS = 0.1
#: A person follows the advice that many times at the most, and tries to submit for so long.
ADVICE, PERSISTS_S = 6, 120 * PATIENCE


MOMENTS = (
    "queued",
    "starting",
    "starting",
    "running",
    "running",
    "running",
    "stopping",
    "requeued",
    "restarting",
    None,
)


def wait_for_the_moment(it: Watched) -> None:
    """Wait until a random time after the run enters a random state. After some seconds continue without it."""
    state, deadline = it.dice.choice(MOMENTS), time.monotonic() + it.dice.uniform(0, 15)
    while state is not None and it.run.status().state != state and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(it.dice.choice([0.0, it.dice.uniform(0, 1), it.dice.uniform(0, 6)]))


def submit(it: Watched, project: Path) -> None:
    """A run of a random kind."""
    dice = it.dice
    it.is_exec = dice.random() < 0.75  # each start of a trainer imports torch in all ranks
    nodes, spare = dice.choice([(1, 0), (2, 0), (2, 0), (2, 1)])
    overrides = [f"cluster.nodes={nodes}", f"cluster.spare_nodes={spare}", "cluster.tasks_per_node=1"]
    overrides += [f"cluster.partition={dice.choice(['main', 'main', 'cancel'])}"]
    if dice.random() < 0.25:
        overrides.append("cluster.extra={no-requeue: true}")
    if dice.random() < 0.1:
        overrides += ["cluster.time_min=1", "cluster.save_before_limit_s=10"]
    if it.is_exec:
        overrides += ["retry.max_failures=50", "retry.max_requeues=1000"]
        command = ["exec", "--executor=slurm", f"name={it.name}", *overrides, "--"]
        command += ["python", str(project / "counter.py"), it.name, str(dice.choice([0, 143]))]
    else:
        command = ["submit", "--executor=slurm", "trainer.yaml", f"name={it.name}", *overrides]
    it.note(f"$ toolkit {shlex.join(command)}")
    deadline = time.monotonic() + PERSISTS_S
    while time.monotonic() < deadline:  # the controller may be away, the disk full: a person tries again
        box, user, env = it.cluster.site.box, it.cluster.site.user, {"TOOLKIT_RUNS": str(it.cluster.site.runs)}
        done = box.run(["toolkit", *command], cwd=project, env=env, timeout=300, check=False, user=user)
        it.note(f"  {done.returncode}: {(done.stdout + done.stderr).strip()[-700:]}")
        if "Traceback" in done.stdout + done.stderr:
            raise Violation(f"traceback when submitted: {(done.stdout + done.stderr)[-2000:]}")
        if done.returncode == 0:
            return
        if [run for run in rundir.all_runs(it.cluster.site.runs) if run.name == it.name]:
            raise Violation("the submission failed and left a run")
    raise Violation("could not be submitted")


def play(cluster: Cluster, seed: int, project: Path, traces: Path) -> Watched:
    """Play one schedule to its end. The result lists the violations; an exception counts as one."""
    dice = random.Random(seed)
    it: Watched
    if dice.random() < SWEEPS:
        it = WatchedSweep(cluster, f"w{seed}", dice, traces)
        try:
            play_sweep(it, project)
        except BaseException as error:
            it.violations.append(f"{type(error).__name__}: {error}")
        return it
    it = Watched(cluster, f"s{seed}", dice, traces)
    observer = threading.Thread(target=it.observe, daemon=True)
    try:
        submit(it, project)
        observer.start()
        is_early = it.dice.random() < 0.3
        for number in range(it.dice.randint(1, 4)):
            if is_early and number == 0:
                time.sleep(it.dice.uniform(0, 4))
                action = it.dice.choice(EARLY)
            else:
                wait_for_the_moment(it)
                action = it.dice.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
            # A run that has completed by itself is over: nothing more is done to it.
            if it.run.result() is None or it.ended:
                it.actions.append(action)
                act(it, action)
        settle(it)
    except BaseException as error:
        it.violations.append(f"{type(error).__name__}: {error}")
    finally:
        it._stop.set()
        if observer.ident is not None:
            observer.join()
    return it


def settle(it: Watched) -> None:
    """Wait for the end. A run that stands still gets the help that its texts ask for, and must complete then."""
    for _ in range(ADVICE):
        it.wait_until_at_rest()
        it.check_trace()
        result = it.run.result()
        state, why = (None, None) if result is None else (result.state, result.why)
        it.note(f"at rest: {state}, {why}; ended by somebody: {it.ended}")
        if re.match(r"the supervisor failed: (?!OSError)\w+Error", why or ""):
            raise Violation(f"an error of our own: {why}")
        if state == "completed":
            check_completed(it)
            return
        if it.ended:
            check_that_it_stays_ended(it)
        it.toolkit("status")
        it.toolkit("why")
        if "toolkit resume" not in it.output:
            raise Violation(f"nobody continues with it and `why` does not say what to do: {it.output[-1500:]}")
        if not it.ended:
            it.note(f"NEEDED A PERSON: {result.why if result else it.run.status().why}")
        it.resume()  # on a full disk, say, a person tries again
    raise Violation(f"resumed {ADVICE} times, and not completed")


def check_completed(it: Watched) -> None:
    done = [line for line in it.trace() if line[2:] == ["0", "done"]]
    if not done:
        raise Violation(f"completed, and rank 0 has not said so: {it.trace()[-3:]}")
    result = it.run.result()
    if not it.is_exec and result.step != STEPS:
        raise Violation(f"completed at step {result.step}")
    if it.run.attempts()[-1].cause != "completed":
        raise Violation(f"completed, and its last attempt is {it.run.attempts()[-1]}")


def check_that_it_stays_ended(it: Watched) -> None:
    """Check that an ended run says so and writes no more. Twice the time of a requeue is waited for."""
    it.toolkit("status", "--json")
    if not any(word in it.output for word in ("stopped", "cancelled", "failed", "CANCELLED", "lost")):
        raise Violation(f"somebody has ended it, and its status is {it.output}")
    lines = len(it.trace())
    time.sleep(REST_S)
    if len(it.trace()) != lines or it.jobs:
        raise Violation(f"it was ended and continues: {it.trace()[-3:]}, {it.jobs}")


def make_project(site: Site, traces: Path) -> Path:
    source = Path(__file__).parents[2] / "jobs"
    jobs = {name: (source / f"{name}.py").read_text() for name in ("classify", "models")}
    folder = site.project(**jobs, trainer=TRAINER, trace=TRACE.format(traces=traces))
    (folder / "counter.py").write_text(COUNTER.format(states=traces, steps=STEPS))
    (folder / "trainer.yaml").write_text(CONFIG)
    (folder / "swept.py").write_text(SWEPT.replace("PROJECT", str(folder)).replace("STEPS", str(SWEPT_STEPS)))
    return folder


def play_all(cluster: Cluster, seeds: list[int], project: Path, traces: Path, abreast: int) -> list[Watched]:
    """The schedules that did not hold, each with its whole story printed."""

    def one(seed: int) -> Watched:
        it = play(cluster, seed, project, traces)
        persons = sum("NEEDED A PERSON" in line for line in it.log)
        held = "; ".join(it.violations) or "holds"
        say(f"schedule {seed} ({', '.join(it.actions)}): {held}" + (f", needed a person {persons}x" if persons else ""))
        for line in it.log if it.violations else [line for line in it.log if "NEEDED A PERSON" in line]:
            say(f"  [{seed}] {line}")
        if it.violations:
            tell(it)
        elif isinstance(it, WatchedSweep):
            shutil.rmtree(cluster.site.runs / it.name, ignore_errors=True)
        else:  # hundreds of them would fill the small disk
            shutil.rmtree(it.run.path, ignore_errors=True)
        return it

    with ThreadPoolExecutor(abreast) as pool:
        try:
            return [it for it in pool.map(one, seeds) if it.violations]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # else those that wait are played, too
            raise


def tell(it: Watched) -> None:
    """All that is known of a run."""
    with suppress(Exception):
        for attempt in it.run.attempts():
            said = [attempt.attempt, attempt.job_id, attempt.cause, attempt.decision, attempt.line]
            say(f"  [{it.name}] {json.dumps(said)}")
        say(f"  [{it.name}] status {it.run.status()}")
        say(f"  [{it.name}] result {it.run.result()}")
        for line in (it.run.logs / "supervisor.log").read_text(errors="replace").splitlines()[-80:]:
            say(f"  [{it.name}] | {line}")
