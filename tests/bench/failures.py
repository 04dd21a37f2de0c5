"""Whether a job comes back after each fault, how fast, and which steps are lost.

The same small training runs under us and under others. It has two of the box's four nodes with one rank each, DDP on
gloo, a checkpoint every 20 steps and no spare node. Ours keeps its state in memory as well, each step
(`checkpoint.memory_every_steps: 1`). Slurm may requeue all jobs. Others are run as their pages say: ``torchrun
--max-restarts`` under srun, and Lightning with the requeue of its SLURMEnvironment. Where ``--peers`` names a Python
that has them, NVIDIA's ``ft_launcher`` (NVRx) and torchft run too. torchft has a lighthouse on the batch host and a
group of replicas on each node. Under torchft the other rank continues.

*Seconds* are from the fault to the first step of the restarted rank 1; at the time limit from the last step before it.
Where nothing was restarted they are the longest pause between two steps. *Lost* are repeated steps. The box lets a
requeued job start after 6 s (Slurm's default is 121), and calls a node down after 30 s. It gives 10 s of grace.

    python -m tests.bench.failures [--faults rank node ...] [--ways ours torchrun ...] [--rounds N] [--again ours ...]

With ``--json`` rounds that the file has already are not repeated, except those of the ways after ``--again``.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench import page, record
from tests.bench.restart import SCRIPT, inner_pid, notes
from tests.box import Box, BoxUnavailable
from tests.box.cluster import FINISHED
from tests.slurm.site import Site
from tests.waiting import wait_for

#: Limits in seconds: for a first step, and for one after the fault.
START_S, BACK_S = 100.0, 80.0
#: How long a fault lasts that passes.
PASSING_S = 10.0
#: From the signal of a preemption to SIGKILL.
GRACE_S = 10
#: What notes each step: the beginning of the script of restart.py.
HEAD = SCRIPT[: SCRIPT.index("import torch")]
OURS = (
    HEAD
    + """
import torch, toolkit
from torch import nn
with toolkit.start() as run:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(torch.utils.data.TensorDataset(torch.randn(4096, 64)), global_batch_size=16)
    run.resumable(model=model, optimizer=optimizer)
    for (inputs,) in run.steps(loader, total=10**9):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        step = run.step + 1
        note("step")
"""
)
LIGHTNING = (
    HEAD.replace("os.environ['RANK']", "os.environ['SLURM_PROCID']")
    + """
import signal
import lightning as L, torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 10)
    def training_step(self, batch, number):
        time.sleep(0.02)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Note(L.Callback):
    def on_train_batch_end(self, trainer, *others):
        global step
        step = trainer.global_step
        note("step")
saves = L.pytorch.callbacks.ModelCheckpoint(dirpath=sys.argv[-1], every_n_train_steps=20, save_last=True)
trainer = L.Trainer(accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=-1, logger=False,
                    enable_progress_bar=False, callbacks=[Note(), saves], default_root_dir=sys.argv[-1],
                    plugins=[SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)])
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=8), ckpt_path="last")
"""
)
TORCHFT = (
    HEAD.replace("os.environ['RANK']", "os.environ['SLURM_PROCID']")
    + """
from datetime import timedelta
import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
model, saved, rank = torch.nn.Linear(64, 10), sys.argv[-1] + "/saved.pt", os.environ["SLURM_PROCID"]
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def state():
    return {"model": model.state_dict(), "optimizer": sgd.state_dict()}
def load(found):
    model.load_state_dict(found["model"])
    sgd.load_state_dict(found["optimizer"])
manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=load, state_dict=state,
                  min_replica_size=1, replica_id=f"replica_{rank}", timeout=timedelta(seconds=30))
if os.path.exists(saved):
    found = torch.load(saved)
    load(found["state"])
    manager.load_state_dict(found["manager"])
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, sgd)
while not os.path.exists(folder + "/stop"):
    optimizer.zero_grad()
    ddp(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    step = manager.current_step()
    note("step")
    if step % 20 == 0 and rank == "0":
        torch.save({"state": state(), "manager": manager.state_dict()}, saved + ".new")
        os.replace(saved + ".new", saved)
"""
)
ELASTIC = (
    "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 {python} -m {module} --nnodes=2 --nproc-per-node=1 "
    "--max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 {script} {folder} {disk}"
)
#: The script and the command of a batch job; ours is submitted by `toolkit submit`.
WAYS: Mapping[str, tuple[str, str]] = {
    "ours": (OURS, ""),
    "torchrun": (SCRIPT, ELASTIC.replace("{module}", "torch.distributed.run")),
    "Lightning": (LIGHTNING, "srun --ntasks-per-node=1 {python} {script} {folder} {disk}"),
    "torchft": (
        TORCHFT,
        "export TORCHFT_LIGHTHOUSE=http://$(hostname):29510\n"
        "$(dirname {python})/torchft_lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --join_timeout_ms 5000 &\n"
        "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 bash -c 'exec {python} -m torch.distributed.run "
        "--nnodes=1 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29511 "
        "--local-addr=$(hostname) {script} {folder} {disk}'",
    ),
    "NVRx": (SCRIPT, ELASTIC.replace("{module}", "nvidia_resiliency_ext.fault_tolerance.launcher")),
}
#: Those that need ``--peers``.
OTHERS = ("NVRx", "torchft")
PACKAGES = ("nvidia-resiliency-ext", "torchft")
#: Undoes a fault.
Undo = Callable[[], object]


class Job:
    """One job that trains, and its notes."""

    def __init__(self, site: Site, disk: Path, way: str, python: str, *, is_short: bool) -> None:
        self.site, self.box, self.folder, self.disk = site, site.box, site.folder, disk
        script, command = WAYS[way]
        self.is_ours = not command
        (self.folder / "train.py").write_text(script)
        if self.is_ours:
            self._submit(is_short)
        else:
            place = {"python": python, "script": self.folder / "train.py", "folder": self.folder, "disk": disk}
            text = f"#!/bin/bash\nexport OMP_NUM_THREADS=1\ncd {self.folder}\n{command.format(**place)}\n"
            (self.folder / "job.sh").write_text(text)
            size = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
            size += ["--time=3" if is_short else "--time=600"]
            size += ["--signal=USR1@20"] if way == "Lightning" else []  # others would die of it
            self.id = site.sbatch(*size, str(self.folder / "job.sh"))

    def _submit(self, is_short: bool) -> None:
        # The script gets no arguments: it finds its folder by the first line.
        text = (self.folder / "train.py").read_text().replace("sys.argv[1]", repr(str(self.folder)))
        (self.folder / "train.py").write_text(text)
        keys = ["cluster.nodes=2", "cluster.tasks_per_node=1", "checkpoint.every_steps=20"]
        keys.append("checkpoint.memory_every_steps=1")
        keys += ["cluster.time_min=3", "cluster.save_before_limit_s=20"] if is_short else ["cluster.time_min=600"]
        self.site.run("toolkit", "submit", "train.py", *keys, cwd=self.folder, TOOLKIT_RUNS=str(self.disk / "runs"))
        self.id = self.box.run(["squeue", "--noheader", "--format=%A"]).stdout.split()[0]

    def steps(self, rank: int, since: float = 0.0) -> list[dict[str, Any]]:
        return notes(self.folder, rank, since)["step"]

    def node_of(self, rank: int) -> str:
        return str(self.steps(rank)[-1]["node"])

    def pid_of(self, rank: int) -> int:
        last = self.steps(rank)[-1]
        return next(pid for pid, _ in self.box.processes(last["node"]) if inner_pid(pid) == last["pid"])

    def is_over(self) -> bool:
        row = self.box.run(["scontrol", "--oneliner", "show", "job", self.id], check=False).stdout
        return any(f"JobState={state} " in row for state in FINISHED) and "Reason=BeginTime" not in row


def kill_rank(job: Job) -> Undo:
    os.kill(job.pid_of(1), signal.SIGKILL)
    return lambda: None


def kill_node_of(rank: int) -> Callable[[Job], Undo]:
    def kill(job: Job) -> Undo:
        node = job.node_of(rank)
        job.box.kill_node(node)
        return lambda: job.box.start_node(node)

    return kill


def cut(job: Job) -> Undo:
    node = job.node_of(1)
    job.box.cut_node(node)
    time.sleep(PASSING_S)
    job.box.join_node(node)
    return lambda: None


def fill_disk(job: Job) -> Undo:
    filler = job.disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    time.sleep(PASSING_S)
    filler.unlink()
    return lambda: None


def stop_controller(job: Job) -> Undo:
    job.box._stop_daemon("login", "slurmctld")
    time.sleep(PASSING_S)
    job.box._start_slurmctld()
    return lambda: None


def preempt(job: Job) -> Undo:
    job.site.preempt()
    return lambda: None


def preempt_at_once(job: Job) -> Undo:
    set_grace(job.box, 0)
    job.site.preempt()
    return lambda: set_grace(job.box, GRACE_S)


def set_grace(box: Box, seconds: int) -> None:
    box.run(["scontrol", "update", "PartitionName=main", f"GraceTime={seconds}"])


def wait_for_the_limit(job: Job) -> Undo:
    wait_for(lambda: job.steps(1)[-1]["time"] < time.time() - 5, 200, "the time limit")
    return lambda: None


FAULTS: Mapping[str, Callable[[Job], Undo]] = {
    "rank": kill_rank,
    "node": kill_node_of(1),
    "batch host": kill_node_of(0),
    "network": cut,
    "disk": fill_disk,
    "controller": stop_controller,
    "preemption": preempt,
    "preemption without grace": preempt_at_once,
    "time limit": wait_for_the_limit,
}
#: After these the ranks need not be started again.
PASSING = {"network", "disk", "controller"}


def outcome(job: Job, fault: str) -> dict[str, Any]:
    """Play the fault; return the row."""
    wait_for(lambda: min(len(job.steps(0)), len(job.steps(1))) > 50, START_S, f"50 steps ({job.folder})")
    began = time.time()
    undo = FAULTS[fault](job)
    if fault == "time limit":
        began = job.steps(1)[-1]["time"] - 1e-3
    fixed = time.time() if fault in PASSING else began
    deadline = time.monotonic() + 3 * BACK_S
    result, over_since = None, float("inf")
    while result is None and time.monotonic() < deadline:
        time.sleep(0.2)
        starts = notes(job.folder, 1, began)["start"]
        since = starts[-1]["time"] if starts else fixed + 2 if fault in PASSING else float("inf")
        if len(job.steps(1, since)) > 20:
            result = came_back(job, began, bool(starts))
        # A job that Slurm is about to requeue may be called PREEMPTED for a moment.
        over_since = min(over_since, time.monotonic()) if job.is_over() else float("inf")
        if result is None and time.monotonic() - over_since > 10:
            result = {"back": False, "end": "the job has ended"}
    undo()
    return result or {"back": False, "end": f"nothing after {3 * BACK_S:.0f} s"}


def came_back(job: Job, began: float, is_restarted: bool) -> dict[str, Any]:
    steps = job.steps(1, began)
    if not is_restarted:
        before = [job.steps(1)[-len(steps) - 1], *steps]
        pause = max(b["time"] - a["time"] for a, b in itertools.pairwise(before))
        return {"back": True, "restarted": False, "seconds": round(pause, 2), "lost": 0}
    start = notes(job.folder, 1, began)["start"][-1]["time"]
    first = job.steps(1, start)[0]
    reached = max(note["step"] for rank in (0, 1) for note in job.steps(rank) if note["time"] < start)
    took = first["time"] - began
    return {"back": True, "restarted": True, "seconds": round(took, 2), "lost": max(0, reached - first["step"] + 1)}


def one_row(box: Box, disk: Path, number: int, fault: str, way: str, python: str) -> dict[str, Any]:
    """Run one job to its fault and back, and clean up."""
    folder = box.shared / f"{fault}-{way}-{number}".replace(" ", "-")
    folder.mkdir()
    own_disk = disk / folder.name
    own_disk.mkdir()
    job = Job(Site(box, folder), own_disk, way, python, is_short=fault == "time limit")
    try:
        return outcome(job, fault)
    finally:
        (folder / "stop").touch()
        box.run(["scancel", "--user=root"], check=False)
        box.run(["scancel", "--signal=KILL", "--full", "--user=root"], check=False)
        with suppress(AssertionError):
            wait_for(lambda: job.is_over(), 10, "its end")
        box.revive()


def row(name: str, outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a cell's row: the share of rounds that came back, and all rounds."""
    came_back = [100.0 * outcome["back"] for outcome in outcomes]
    return record.row(f"{name}", came_back, "% came back", better="more") | {"outcomes": [*outcomes]}


def in_order(rows: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows in the order of FAULTS and WAYS."""
    names = (f"{fault}, {way}" for fault, way in itertools.product(FAULTS, WAYS))
    return [rows[name] for name in names if name in rows]


def versions(python: str, names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages that a Python has."""
    code = "from importlib.metadata import distributions\nfor each in distributions(): print(each.name, each.version)"
    lines = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: version for name, version in (line.split() for line in lines) if name in names}


def main() -> None:
    """Play the faults, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[way for way in WAYS if way not in OTHERS])
    parser.add_argument("--peers", metavar="PYTHON", help="one that has nvidia-resiliency-ext and torchft")
    parser.add_argument("--rounds", type=int, default=1, help="of each cell")
    parser.add_argument("--again", nargs="+", choices=[*WAYS], default=[], help="play these though the file has them")
    record.add_option(parser)
    args = parser.parse_args()
    kept = record.rows_of(args.json)
    cells = [*itertools.product(args.faults, args.ways)]
    for fault, way in itertools.product(args.faults, args.again):
        kept.pop(f"{fault}, {way}", None)
    more = versions(args.peers) if args.peers else record.versions_of(args.json, PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder)
        disk.chmod(0o777)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=1777", "tmpfs", folder], check=True)
        try:
            homes = [Path(args.peers).parents[1]] if args.peers else []
            with Box(nodes=4, grace_s=GRACE_S, shared=[disk, *homes]) as box:
                for number, (fault, way) in itertools.product(range(args.rounds), cells):
                    name = f"{fault}, {way}"
                    outcomes = kept.get(name, {}).get("outcomes", [])
                    if len(outcomes) <= number:
                        if way in OTHERS and not args.peers:
                            continue
                        python = args.peers if way in OTHERS else sys.executable
                        try:
                            outcomes = [*outcomes, one_row(box, disk, number, fault, way, python)]
                        except AssertionError as error:  # it did not start within the limit: nothing was measured
                            print(f"{fault:27}{way:12}not measured: {error}", flush=True)
                            continue
                        kept[name] = row(name, outcomes)
                        record.write(args.json, in_order(kept), more)
                    print(f"{fault:27}{way:12}{page.outcome(outcomes[number : number + 1])}", flush=True)
                print(page.failures(in_order(kept)))
        except BoxUnavailable as reason:
            print(f"no Slurm to be had: {reason}")
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    main()
