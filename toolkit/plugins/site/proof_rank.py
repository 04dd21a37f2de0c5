"""``python -m toolkit.plugins.site.proof_rank``: a rank of the run that `toolkit doctor --prove` submits.

The first attempt measures, submits a follow-up job from its node, and makes steps until it is stopped. The attempt that
resumes ends the run. The follow-up job is this module with the run's folder as its argument.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.base import fsio, hostlist
from toolkit.base.errors import SlurmError, ToolkitError
from toolkit.files.records import FileRecord
from toolkit.files.run_files import Moment
from toolkit.slurm.commands import Slurm
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv

#: In the run's folder: what rank 0 has measured, what the follow-up job has found, and files for the ranks to compare.
MEASURED, FOLLOWED, SCRATCH = "measured.json", "followed.json", "proof"
#: More steps than are made until the stop comes, and the pause in each.
STEPS, STEP_S = 100_000, 0.05
STEP_LIMIT_S = 60.0
REDUCED_BYTES = 16 * 2**20
#: Files that are written by one rank and awaited by another, and how long each is awaited.
FILES, WAIT_S = 20, 30.0
#: A file that one rank replaces while another reads it.
REPLACEMENTS, REPLACED_BYTES = 200, 2**16


@dataclass(frozen=True)
class Measured(FileRecord):
    """What the ranks have found. ``follow_up`` is the job that rank 0 has submitted; None where that was refused."""

    backend: str
    hosts: tuple[str, ...]
    interfaces: tuple[str, ...]
    follow_up: str | None = None
    refusal: str = ""
    all_reduce: bool = False  #: the sum over all ranks was right on each
    folder: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed(FileRecord):
    """What the follow-up job has found. ``shrunk_s``: the time until a step ran on the rest; None if it did not."""

    started: Moment
    nodes: int
    shrunk_s: float | None = None
    why: str = ""


def main() -> None:
    import toolkit

    with toolkit.start() as run:
        state = {"steps": 0}
        run.resumable(state=state)
        is_last = run.step > 0
        if not is_last:
            _measure(run)
        elif state["steps"] != run.step:
            raise ToolkitError(f"the checkpoint of step {run.step} has given back {state}")
        for _ in run.steps(range(STEPS), total=STEPS):
            state["steps"] += 1
            time.sleep(STEP_S)
            if is_last:
                break


def _measure(run: Any) -> None:
    """Measure with all ranks. Rank 0 submits the follow-up job, and writes the record."""
    import torch
    import torch.distributed as dist

    values = torch.ones(REDUCED_BYTES // 4, device=run.device)
    dist.all_reduce(values)
    is_summed = all(run.gather(bool((values == run.world_size).all())))
    scratch = run.dir / SCRATCH
    if run.rank == 0:
        fsio.make_dir(scratch)
    seen = _SharedFolder(scratch, dist.barrier, run.rank == 0, run.rank == run.world_size - 1)
    folder = run.gather(seen.figures() if run.world_size > 1 else {})[-1]
    hosts = run.gather(socket.gethostname())
    interfaces = run.gather(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if run.rank == 0:
        job, refusal = submit_follow_up(run.dir, os.environ["SLURM_JOB_ID"], len({*hosts}))
        backend = str(dist.get_backend())
        record = Measured(backend, tuple(hosts), tuple(interfaces), job, refusal, is_summed, folder)
        fsio.write_json(run.dir / MEASURED, record.to_json())


@dataclass(frozen=True)
class _SharedFolder:
    """Measures how the last rank sees what rank 0 does in a folder. All ranks call each method in the same order."""

    path: Path
    barrier: Callable[[], object]
    writes: bool  #: rank 0
    reads: bool  #: the last rank, which is another one

    def figures(self) -> dict[str, float]:
        """Return the figures of the last rank.

        ``visible_s``: the longest wait for a renamed file, after the renaming rank has said that it is done. ``torn``:
        reads of a file that was being replaced which found neither the old nor the new content. ``lock_held``: 1 if a
        lock of the other rank kept this one out, and did not after its release. ``mtime_ahead_s``: the time of a file's
        last change, against the clock of the rank that wrote it.
        """
        return {
            "visible_s": max(self._visible_s(f"visible-{number}") for number in range(FILES)),
            "torn": self._torn_reads(),
            "lock_held": self._lock_held(),
            "mtime_ahead_s": self._mtime_ahead_s(),
        }

    def _write(self, name: str, content: str | bytes = "") -> Path:
        """Have rank 0 write a file, and all wait for that."""
        if self.writes:
            fsio.write_atomic(self.path / name, content, durable=False)
        self.barrier()
        return self.path / name

    def _visible_s(self, name: str) -> float:
        path, began = self._write(name), time.perf_counter()
        if self.reads:
            _wait(path.exists)
        longest_s = time.perf_counter() - began
        self.barrier()
        return longest_s

    def _torn_reads(self) -> float:
        path, done, torn = self._write("replaced", bytes(REPLACED_BYTES)), self.path / "replaced-done", 0
        if self.writes:
            for number in range(REPLACEMENTS):
                fsio.write_atomic(path, bytes([number % 256]) * REPLACED_BYTES, durable=False)
            fsio.write_atomic(done, "", durable=False)
        elif self.reads:
            _wait(path.exists)
            deadline = time.monotonic() + WAIT_S
            while not done.exists() and time.monotonic() < deadline:
                try:
                    content = path.read_bytes()
                except OSError:  # a replaced file must never be missing, nor stale
                    torn += 1
                    continue
                torn += len(content) != REPLACED_BYTES or len(set(content)) != 1
        self.barrier()
        return float(torn)

    def _lock_held(self) -> float:
        path, held, freed = self._write("lock"), False, False
        if self.reads:
            _wait(path.exists)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if self.writes or self.reads else -1
        # A barrier ends each stage: rank 0 locks, the last rank fails to lock, rank 0 unlocks, the last rank locks.
        try:
            if self.writes:
                _lock(fd)
            self.barrier()
            held = self.reads and not _lock(fd)
            self.barrier()
            if self.writes:
                fcntl.lockf(fd, fcntl.LOCK_UN)
            self.barrier()
            freed = self.reads and _lock(fd)
        finally:
            if fd >= 0:
                os.close(fd)
        self.barrier()
        return float(held and freed)

    def _mtime_ahead_s(self) -> float:
        ahead_s, path = 0.0, self._write("mtime")
        clock = self._write("mtime-clock", repr(time.time()))
        if self.reads and _wait(clock.exists):
            ahead_s = path.stat().st_mtime - float(clock.read_text())
        self.barrier()
        return ahead_s


def _lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _wait(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_true()


def submit_follow_up(run_dir: Path, after: str, nodes: int) -> tuple[str | None, str]:
    """Submit a job that runs when ``after`` has ended. Return its id, or None and why Slurm refused."""
    from toolkit.files.rundir import RunDir
    from toolkit.run.requeue import follow_up

    run, slurm = RunDir(run_dir), Slurm()
    path = run.submitit / "follower.sh"
    words = [sys.executable, "-m", "toolkit.plugins.site.proof_rank", str(run_dir)]
    fsio.write_atomic(path, f"#!/bin/bash\nexec {shlex.join(words)}\n")
    try:
        row = slurm.show_job(after)
        like_this = [] if row is None else list(follow_up.options_of_job(os.environ, row, run))
        wait = f"--dependency=afterany:{after}"
        output = f"--output={run.logs}/follower-%j.out"
        # The variables of a rank describe the ranks' step: state the size.
        size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        return slurm.sbatch([*like_this, *size, "--no-requeue", "--no-kill", wait, output, str(path)]), ""
    except SlurmError as error:
        return None, str(error)


def run_follow_up(run_dir: Path) -> None:
    """Be the follow-up job, which proves by running at all that such jobs come.

    Give back all nodes but this one, which leaves the job as the death of the other nodes would, and start an srun step
    in what is left.
    """
    started, hosts = time.time(), hostlist.expand(os.environ["SLURM_JOB_NODELIST"])
    shrunk_s, why = (None, "the job has one node") if len(hosts) == 1 else _step_after_loss(hosts, run_dir)
    fsio.write_json(run_dir / FOLLOWED, Followed(started, len(hosts), shrunk_s, why).to_json())


def _step_after_loss(hosts: list[str], run_dir: Path) -> tuple[float | None, str]:
    """Give back all nodes but the first and run a step there. Return the seconds it took, or None and why."""
    try:
        Slurm().release_nodes(os.environ["SLURM_JOB_ID"], keep=hosts[0])
    except SlurmError as error:
        return None, f"Slurm gives no nodes back: {error}"
    # The step must run on the node that is left: srun takes its hosts from this file.
    host_file = run_dir / "follower-hosts"
    fsio.write_atomic(host_file, f"{hosts[0]}\n")
    argv = srun_argv(SrunStep(["true"], hosts[:1], 1, None, overlap=True))
    environ = {**step_environment(os.environ), "SLURM_HOSTFILE": str(host_file)}
    began = time.monotonic()
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        return None, f"srun ended with {done.returncode}: {done.stderr.strip()}"
    return time.monotonic() - began, ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_follow_up(Path(sys.argv[1]))
    else:
        main()
