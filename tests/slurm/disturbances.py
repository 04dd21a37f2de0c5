"""What random schedules do to a run, and to the cluster under all of them."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from tests.slurm.watched import Watched


def kill_a_rank(it: Watched) -> None:
    it.kill(*(["counter.py", f" {it.name} "] if it.is_exec else ["toolkit run", it.run.id]))


def kill_the_supervisor(it: Watched) -> None:
    it.kill("submitit", it.run.id) if not it.pids("toolkit supervise", it.run.id) else it.kill("supervise", it.run.id)


#: To a job's steps, its batch script, and all its processes.
TARGETS = {"steps": (), "batch": ("--batch",), "all": ("--full",)}
#: SIGINT to the batch script is a person's stop, as with Ctrl-C.
SIGNALS = [
    (number, target)
    for number in ("TERM", "USR1", "USR2", "INT", "HUP", "CONT")
    for target in TARGETS
    if number != "INT" or target == "steps"
]


def signal_the_job(it: Watched) -> None:
    for job, state in it.jobs:
        if state == "RUNNING":
            number, target = it.dice.choice(SIGNALS)
            it.note(f"{number} to {target} of {job}")
            it.cluster.site.box.run(["scancel", *TARGETS[target], f"--signal={number}", job], check=False)


RUN_ACTIONS: Mapping[str, Callable[[Watched], Any]] = {
    "stop": lambda it: it.end_by("stop"),
    "cancel": lambda it: it.end_by("cancel"),
    "resume": lambda it: it.resume(),
    "stop twice": lambda it: it.twice("stop"),
    "cancel twice": lambda it: it.twice("cancel"),
    "resume twice": lambda it: it.twice("resume"),
    "scancel": lambda it: it.scancel(),
    "requeue": lambda it: it.requeue(),
    "signal": signal_the_job,
    "kill a rank": kill_a_rank,
    "kill the supervisor": kill_the_supervisor,
}


def preempt(it: Watched) -> None:
    it.cluster.site.preempt(it.dice.choice([1, 5]))


def fill_the_disk(it: Watched) -> None:
    filler = it.cluster.disk / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    time.sleep(it.dice.uniform(1, 20))
    filler.unlink()


def stop_the_controller(it: Watched) -> None:
    box = it.cluster.site.box
    box._stop_daemon("login", "slurmctld")
    time.sleep(it.dice.uniform(0, 10))
    box._start_slurmctld()


def hide_the_shared_folder(it: Watched) -> None:
    """From one node: what runs there continues, and nothing new can be opened."""
    box, node = it.cluster.site.box, some_node(it)
    box.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0755", "tmpfs", str(it.cluster.disk)], node=node)
    time.sleep(it.dice.uniform(1, 20))
    box.run(["umount", "-l", str(it.cluster.disk)], node=node)


def kill_the_batch_host(it: Watched) -> None:
    box, node = it.cluster.site.box, some_node(it)
    box.kill_node(node)
    time.sleep(it.dice.uniform(1, 40))
    box.start_node(node)


def some_node(it: Watched) -> str:
    """The batch host, or one of the run's other nodes."""
    return str(
        it.dice.choice([node for node in it.nodes() if node in it.cluster.site.box.spec.node_names] or ["node1"])
    )


CLUSTER_ACTIONS: Mapping[str, Callable[[Watched], None]] = {
    "preempt": preempt,
    "disk full": fill_the_disk,
    "controller away": stop_the_controller,
    "shared folder gone": hide_the_shared_folder,
    "node dead": kill_the_batch_host,
}
#: Faults come first: a run that is ended by each second action never gets to a fault.
WEIGHTS = {**dict.fromkeys(RUN_ACTIONS, 2), **dict.fromkeys(CLUSTER_ACTIONS, 3), "preempt": 6, "resume": 3, "signal": 4}
#: What a person, or Slurm, does to a job before any of our code may have started.
EARLY = ("stop", "stop twice", "cancel", "scancel", "requeue", "signal", "signal", "resume", "preempt")


def act(it: Watched, action: str) -> None:
    it.note(f"--- {action} (jobs {it.jobs}, state {it.run.status().state}, step {it.run.step()})")
    if action in RUN_ACTIONS:
        RUN_ACTIONS[action](it)
        return
    with it.cluster.fault:
        CLUSTER_ACTIONS[action](it)
    it.note(f"    {action} is over")
