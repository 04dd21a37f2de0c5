"""`toolkit doctor --prove --gpus`: what the GPUs of a site do, shown by short runs that any user may submit.

Each is a run of a small project in a temporary folder, a copy of evidence_rank.py. Without GPUs the same ranks work on
CPUs over gloo. No row names a host, a user or a path: what failed is in the log, and its run is kept.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.base import fsio, logs
from toolkit.base.errors import ToolkitError
from toolkit.config import JobConfig, argv_override
from toolkit.files import rundir
from toolkit.files.run_files import RunState
from toolkit.plugins.site import resume_check
from toolkit.plugins.site.proof import Proof
from toolkit.plugins.site.resume_compare import DIFFERENT, IDENTICAL, InterruptionPlan
from toolkit.run.submission.handle import Run
from toolkit.run.submission.submit import submit

SCRIPT, CONFIG, RECORD = "evidence_rank.py", "evidence.yaml", "evidence.json"
NO_GPU, NO_SLURM, ONE_RANK, ONE_NODE = "no GPU", "no Slurm", "one rank", "one node"
#: A loss may differ from one device's by this share of it: the order of the sums is another one.
CLOSE = 1e-3
#: A rank that hangs is found after half of it.
HANG_TIMEOUT_S = 60
MOST_INTERFACES = 3  #: of those that the ranks do not choose

#: A row, what its figure is called in the record, the factor to its unit, and the unit.
_FIGURES = (
    ("matrix products", "gemm_s", 1e-12, "TFLOP/s"),
    ("copies from the host", "copy_s", 1e-9, "GB/s"),
    *((f"overhead of a step of {ms} ms", f"overhead_{ms}_ms", 1.0, "ms") for ms in (1, 10, 100)),
    ("stall of a save of 64 MiB a rank", "stall_ms", 1.0, "ms"),
)

log = logs.get(__name__)


def collect(config: JobConfig, executor: str) -> tuple[dict[str, Any], list[Proof]]:
    """Run all parts on ``config.cluster``. Return what they ran on, and the rows. A part that fails ends no other."""
    cluster = config.cluster
    cluster.time_min, cluster.components = 10, []
    cluster.tasks_per_node = cluster.gpus_per_node or cluster.tasks_per_node
    values = {
        "job": SCRIPT,
        "cluster": asdict(cluster),
        "dist": asdict(config.dist),
        "train": {"deterministic": True, "log_every": 10},
        "checkpoint": {"every_steps": 10**9},
    }
    runs = _Runs(config, executor)
    with (
        tempfile.TemporaryDirectory() as folder,
        resume_check.environment_set(TOOLKIT_RUNS=str(rundir.runs_root())),
        contextlib.chdir(folder),
    ):
        shutil.copy(Path(__file__).with_name(SCRIPT), SCRIPT)
        fsio.write_atomic(Path(CONFIG), json.dumps(values), durable=False)
        rows = [*runs.rows()]
        runs.remove_completed()
        return runs.facts, rows


class _Runs:
    """The runs, one after the other. ``facts`` are what the first of them has found."""

    def __init__(self, config: JobConfig, executor: str) -> None:
        self.facts: dict[str, Any] = {}
        self._config, self._executor = config, executor
        self._completed: list[Run] = []

    def rows(self) -> Iterator[Proof]:
        yield from self._measured()
        yield from self._other_interfaces()
        yield self._resumed("kill")
        yield self._resumed("stop")
        # A requeued job waits for two minutes: once is enough.
        yield self._resumed("preempt", 15) if self._executor == "slurm" else Proof("preempt and resume", None, NO_SLURM)
        yield from self._failed_ranks()

    def remove_completed(self) -> None:
        for run in self._completed:
            resume_check.remove(run.dir.path)

    def _measured(self) -> Iterator[Proof]:
        failed, found = self._figures("measure")
        self.facts |= {key: found.get(key) for key in ("gpu", "backend", "nodes", "ranks", "interfaces", "others")}
        at = f"{found.get('backend')} over {', '.join(found.get('interfaces') or ['loopback'])}"
        yield self._of_network("network of the ranks", at, failed, found)
        for name in ("ddp", "fsdp"):
            distance = found.get(name)
            text = failed if distance is None else "the largest distance of 20 steps' losses"
            is_equal = distance is not None and distance <= CLOSE
            yield Proof(f"{name} equal to one device", is_equal, text, distance, "of the loss")
        for name, key, factor, unit in _FIGURES:
            if key in ("gemm_s", "copy_s") and found and not found.get("gpu"):
                yield Proof(name, None, NO_GPU)
            elif key in found:
                yield Proof(name, True, "", found[key] * factor, unit)
            else:
                yield Proof(name, False, failed)

    def _of_network(self, name: str, text: str, failed: str, found: Mapping[str, Any]) -> Proof:
        if found.get("ranks") == 1:
            return Proof(name, None, ONE_RANK)
        is_summed, speed = found.get("is_summed", False), found.get("bus_gb_s")
        text = text if is_summed else failed or "a rank has got a wrong sum"
        return Proof(name, is_summed, text, speed, "GB/s on the bus")

    def _other_interfaces(self) -> Iterator[Proof]:
        others = self.facts.get("others") or ()
        if not others or self.facts.get("nodes") == 1:
            yield Proof("other interfaces", None, "there are none" if self.facts.get("nodes") != 1 else ONE_NODE)
            return
        for name in others[:MOST_INTERFACES]:
            with resume_check.environment_set(
                NCCL_SOCKET_IFNAME=f"={name}", GLOO_SOCKET_IFNAME=name, NCCL_IB_DISABLE="1"
            ):
                failed, found = self._figures("network", "dist.timeout_s=60")
            yield self._of_network(f"network over {name}", f"{found.get('backend')} over {name}", failed, found)

    def _figures(self, part: str, *overrides: str) -> tuple[str, Mapping[str, Any]]:
        """Run a part that measures. Return why it has not completed, and what it has found until then."""
        run, why = self._submit([part], "retry.max_failures=0", *overrides)
        path = run and run.dir.path / RECORD
        return why, json.loads(fsio.read_text(path)) if path and path.exists() else {}

    def _resumed(self, how: str, step: int | None = None) -> Proof:
        name = f"{how} and resume, bit for bit"
        overrides = [argv_override(["train"])]
        try:
            report = resume_check.check(CONFIG, overrides, InterruptionPlan(how=how, step=step), self._executor)
        except ToolkitError as error:
            log.warning("%s: %s", name, error)
            return Proof(name, False, f"the check failed ({type(error).__name__})")
        text = f"{report.steps} steps after {len(report.resumed)} resumes: {report.verdict}"
        if report.first is not None:
            text += f" from step {report.first} on, in {', '.join(report.different)}"
        if report.verdict == DIFFERENT:
            log.warning("%s: the runs are kept: %s and %s", name, *report.runs)
        else:
            for path in report.runs:
                resume_check.remove(path)
        return Proof(name, report.verdict == IDENTICAL, text)

    def _failed_ranks(self) -> Iterator[Proof]:
        timeout_s = min(HANG_TIMEOUT_S, self._config.dist.timeout_s)
        yield self._with_bad_rank("hung rank named", ["hang", "1"], f"dist.timeout_s={timeout_s}")[1]
        nodes = self._config.cluster.nodes
        has_spare = nodes > 1 and self._executor == "slurm"
        # A node is replaced once its devices have failed twice.
        times, size = ("2", [f"cluster.nodes={nodes - 1}", "cluster.spare_nodes=1"]) if has_spare else ("1", [])
        run, lost = self._with_bad_rank("error of a lost GPU named", ["lose", times], *size)
        yield lost
        if not has_spare or run is None:
            yield Proof("spare node used", None, ONE_NODE if not has_spare else "the run before it failed")
            return
        used = [{*attempt.nodes} for attempt in run.dir.attempts()]
        yield Proof("spare node used", used[0] != used[-1], f"{len(used[-1] - used[0])} nodes replaced")

    def _with_bad_rank(self, name: str, words: list[str], *overrides: str) -> tuple[Run | None, Proof]:
        """Have the last rank fail, and look at what is said about the first attempt."""
        run, why = self._submit(words, *overrides)
        attempts = run.dir.attempts() if run else []
        if not run or not attempts:
            return None, Proof(name, False, why)
        first = attempts[0]
        rank, last = first.first_failure and first.first_failure.rank, (first.world_size or 1) - 1
        text = f"{first.cause} of rank {rank}, and it was rank {last}; {why or f'attempt {len(attempts)} completed'}"
        hung = json.loads(fsio.read_text(run.dir.path / RECORD))["hung"] if words[0] == "hang" else first.ended
        return run, Proof(name, rank == last and not why, text, first.ended - hung or None, "s until the end")

    def _submit(self, words: list[str], *overrides: str) -> tuple[Run | None, str]:
        """Run the script with these arguments. Return the run, and why it has not completed; "" if it has."""
        run = None
        log.info("part: %s", words[0])
        try:
            run = submit(CONFIG, overrides, args=words, executor=self._executor)
            ended = run.wait()
        except (ToolkitError, OSError) as error:
            log.warning("%s: %s", words[0], error)
            return run, f"the run failed ({type(error).__name__})"
        except BaseException:  # Ctrl-C leaves no job behind
            with contextlib.suppress(ToolkitError):
                if run is not None:
                    run.cancel()
            raise
        if ended["state"] == RunState.COMPLETED:
            self._completed.append(run)
            return run, ""
        log.warning("%s: run %s %s: %s", words[0], run.id, ended["state"], ended.get("why"))
        attempts = run.dir.attempts()
        return run, f"the run ended: {attempts[-1].cause if attempts else ended['state']}"
