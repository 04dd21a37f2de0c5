"""`toolkit doctor`: the checks that a job makes before its ranks start, made on request.

Nodes are checked by an srun step: every task makes the checks once, and its labeled output is the answer. So only what
srun reaches must be reachable, and no disk is needed: it may be the faulty part.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from toolkit import __version__
from toolkit.base import fsio, hostlist, logs
from toolkit.base.durations import in_units
from toolkit.base.errors import RequestError, SlurmError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.devices import kinds
from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.children import start_child
from toolkit.nodes.start.launcher import LaunchFailed, RanksExited
from toolkit.nodes.start.srun import parse_srun_line
from toolkit.plugins.site.checks import ANSWER_HEAD, FIRST_NODE, LAUNCHER, CheckAnswer, CheckRequest
from toolkit.plugins.site.checks.host import CORE, MEMORY
from toolkit.plugins.site.checks.preflight import SharedFolder, command
from toolkit.plugins.site.checks.verdict import NodeCheck, NodesReport, failed_report, judge
from toolkit.plugins.site.proof import Proof, prove
from toolkit.plugins.site.site_profile import USED, SiteProfile, read_site
from toolkit.run.submission import executors
from toolkit.slurm.commands import PROBE_TIMEOUT_S, Slurm
from toolkit.slurm.environment import step_environment, submit_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv, srun_nodes_argv

#: Columns of the table, by check. A column is left out if no node has a figure for it.
COLUMNS = {
    "CPUS": "cpus",
    "GPUS": "gpus",
    "GPU MEM": "gpu memory",
    "CORE": CORE,
    "MEMORY": MEMORY,
    "RUNS FREE": "run folder space",
    "TEMP FREE": "temp space",
    "CLOCK": "clock",
    "ADDRESS": "network",
    "INFINIBAND": "infiniband",
}

#: The files of `toolkit doctor --prove --gpus`, in the current folder.
EVIDENCE = "gpu-evidence"
#: For each program that reads the site: a user waits for all of them.
SITE_TIMEOUT_S = 15.0

log = logs.get(__name__)


def examine(config: JobConfig, nodes: int | None = None) -> NodesReport:
    """Check the nodes of this process's allocation, or new ones, or this machine.

    Outside an allocation Slurm is asked for ``nodes`` nodes (``cluster.nodes`` if None), as it would be for the
    config's job. Without Slurm this machine is checked.
    """
    environ = os.environ
    if "SLURM_JOB_ID" in environ:
        return _examine_allocation(Allocation.slurm(environ, Slurm()), nodes)
    config.cluster.nodes = nodes or config.cluster.nodes
    if Slurm().available():
        cluster = config.cluster
        cpus = cluster.tasks_per_node * cluster.cpus_per_task
        # The nodes are not chosen yet: they check the network against the first of them, and have no names until they
        # answer.
        shared = SharedFolder(_folder())
        gpus = cluster.gpus_per_node
        request = CheckRequest(str(shared.path), shared.token, [cpus], gpus, FIRST_NODE, may_load=True)
        options = [f"--cpus-per-task={cpus}", *executors.srun_options(config)]
        log.info("waiting for %d nodes; Ctrl-C ends it", cluster.nodes)

        def start(request: CheckRequest, hosts: Sequence[str]) -> CheckStep:
            return CheckStep(srun_nodes_argv(command(request), len(hosts), options), submit_environment(environ))

        names = [f"node {number} of {cluster.nodes}" for number in range(1, cluster.nodes + 1)]
        return _ask(shared, request, names, start, is_queued=True)
    return _examine_allocation(Allocation.local(config.cluster), None)


def _examine_allocation(allocation: Allocation, nodes: int | None) -> NodesReport:
    there = len(allocation.hosts)
    if allocation.components:
        raise RequestError(
            "toolkit doctor looks at nodes by one step of srun, and this heterogeneous job needs several; "
            "call it on a login node, with cluster.partition=NAME for each kind of nodes"
        )
    if nodes is not None and nodes > there:
        raise RequestError(f"--nodes {nodes}: this allocation has {there}; ask for fewer, or call it on a login node")
    count = nodes or there
    shared = SharedFolder(_folder())
    in_job = "SLURM_JOB_ID" in os.environ
    # Inside a job the ranks' network leads to the launcher; without Slurm the loopback is enough. One step looks at all
    # nodes, and gets as many GPUs on each as the node with the fewest has.
    request = CheckRequest(
        folder=str(shared.path),
        token=shared.token,
        cpus=[tasks * allocation.cpus_per_task for tasks in allocation.tasks[:count]],
        gpus=min(allocation.gpus, default=0),
        peer=LAUNCHER if in_job else "127.0.0.1",
    )

    def start(request: CheckRequest, hosts: Sequence[str]) -> CheckStep:
        # Without Slurm there is only this machine, and no srun.
        if not in_job:
            return CheckStep(command(request), os.environ)
        host_file = os.memfd_create("hosts")  # not on a disk: the checks find out whether one can be written
        try:
            os.write(host_file, "".join(f"{host}\n" for host in hosts).encode())
            variables = {**step_environment(os.environ), "SLURM_HOSTFILE": f"/proc/self/fd/{host_file}"}
            # Once on each of these nodes, on every CPU, with the memory that is there.
            options, gres = ["--cpu-bind=none", "--mem=0", "--label"], allocation.gres(allocation.hosts)
            step = SrunStep(command(request), hosts, None, None, gres=gres, overlap=True, extra=options)
            return CheckStep(srun_argv(step), variables, [host_file])
        finally:
            os.close(host_file)

    return _ask(shared, request, allocation.hosts[:count], start)


def _ask(
    shared: SharedFolder, request: CheckRequest, hosts: Sequence[str], start: Start, *, is_queued: bool = False
) -> NodesReport:
    began = time.monotonic()
    try:
        # Without a working shared folder no node could prove that it sees the same one.
        shared.prepare()
        nodes, errors, took_s = ask_nodes(request, hosts, start, is_queued=is_queued)
        shared.read_answers(nodes)
        return judge(nodes, took_s, errors)
    except OSError as error:  # the folder cannot be written to, or there is no srun
        return failed_report(hosts, str(error), time.monotonic() - began)
    finally:
        shared.remove()


def read_site_here() -> tuple[SiteProfile | None, str]:
    """Read the cluster. Return it and ""; None and the reason without Slurm."""
    slurm = Slurm(timeout_s=SITE_TIMEOUT_S)
    if not slurm.available():
        missing = [name for name in USED if not slurm.has(name)]
        if len(missing) == len(USED):
            return None, "no Slurm here: sbatch and scontrol are not on PATH"
        if missing:
            return None, f"Slurm is only half installed here: not on PATH: {', '.join(missing)}"
        return None, f"Slurm's controller does not answer within {PROBE_TIMEOUT_S:g} s: `scontrol ping`"
    try:
        return read_site(slurm), ""
    except SlurmError as error:
        return None, f"the site cannot be read: {error}"


def prove_gpus(config: JobConfig, nodes: int | None) -> list[Proof]:
    """Show what the GPUs do by short runs, here or by Slurm, and write a page and a record of it."""
    from toolkit.plugins.report import page
    from toolkit.plugins.site import evidence

    if "SLURM_JOB_ID" in os.environ:
        raise RequestError("toolkit doctor --prove submits jobs of its own: call it on a login node")
    config.cluster.nodes = nodes or config.cluster.nodes
    began = time.monotonic()
    facts, proofs = evidence.collect(config, executors.choose_executor("auto"))
    facts |= versions() | {"took_s": round(time.monotonic() - began)}
    cells = [
        (p.name, MARKS[p.is_proven], "" if p.figure is None else f"{p.figure:.3g}", p.unit, p.text) for p in proofs
    ]
    record = {"facts": facts, "proofs": [asdict(proof) for proof in proofs]}
    fsio.write_json(Path(f"{EVIDENCE}.json"), record)
    fsio.write_atomic(Path(f"{EVIDENCE}.html"), page.evidence_page(facts, cells))
    log.info("%s.json and %s.html name no host, no user and no path", EVIDENCE, EVIDENCE)
    return proofs


def prove_site(config: JobConfig, nodes: int | None, profile: SiteProfile | None, why_none: str) -> list[Proof]:
    """Try the site out by a short run. Raises RequestError without Slurm, or inside of a job."""
    if profile is None:
        raise RequestError(f"toolkit doctor --prove needs Slurm: {why_none}")
    if "SLURM_JOB_ID" in os.environ:
        raise RequestError("toolkit doctor --prove submits a job of its own: call it on a login node")
    part = profile.partition(config.cluster.partition)
    count = nodes or min(2, max(1, part.nodes if part else 2))
    return prove(config, count, profile.requeue_delay_s)


def _folder() -> Path:
    """Return the folder of runs, or the nearest that exists above. A check must not create it."""
    root = rundir.runs_root()
    return next(folder for folder in (root, *root.parents) if folder.is_dir())


# --------------------------------------------------------------------------------------------------------------- pages


def rows(report: NodesReport) -> list[tuple[str, ...]]:
    """Return a table: a head, and a row for each node."""
    figures = {host: {f.check: f.figure for f in findings} for host, findings in report.findings.items()}
    known = {check for by_check in figures.values() for check in by_check}
    columns = {head: check for head, check in COLUMNS.items() if check in known}
    table: list[tuple[str, ...]] = [("NODE", "VERDICT", *columns)]
    for host, by_check in figures.items():
        table.append((host, _verdict(report, host), *(by_check.get(check, "-") for check in columns.values())))
    return table


def as_dict(report: NodesReport) -> dict[str, Any]:
    """Return the report as one value for JSON."""
    nodes = {
        host: {
            "verdict": _verdict(report, host),
            "bad": report.bad.get(host),
            "warning": report.warnings.get(host),
            "findings": [asdict(finding) for finding in report.findings.get(host, ())],
        }
        for host in report.hosts
    }
    return {"fine": report.is_fine, "common": list(report.common), "nodes": nodes, "took_s": report.took_s}


def _verdict(report: NodesReport, host: str) -> str:
    if host in report.bad:
        return "bad"
    return "warning" if host in report.warnings else "ok"


#: Proofs, as they are marked in front of their lines.
MARKS = {True: "proven", False: "FAILED", None: "not tried"}


def partition_rows(profile: SiteProfile) -> list[tuple[str, ...]]:
    """Return a table of the partitions: a head, and a row for each. The default one has a star."""
    rows: list[tuple[str, ...]] = [("PARTITION", "NODES", "CPUS", "GPUS", "MEMORY", "TIME LIMIT", "PREEMPTION")]
    for part in profile.partitions:
        name = f"{part.name}*" if part.is_default else part.name  # as sinfo marks it
        nodes = str(part.nodes) if part.is_up else f"{part.nodes} (down)"
        gpus = f"{part.gpus} {part.gpu_type or ''}".strip() if part.gpus else "-"
        memory = f"{part.memory_mb / 1024:.0f} GiB" if part.memory_mb else "-"
        limit = "none" if part.time_limit_s is None else in_units(part.time_limit_s)
        grace = f"{part.grace_s:.0f} s grace" if part.grace_s else "no grace"
        mode = profile.preemption(part)
        preemption = "none" if mode is None else f"{mode.lower()}, {grace}"
        if profile.preempt_type == "preempt/qos":
            preemption = "by qos"
        rows.append((name, nodes, str(part.cpus or "-"), gpus, memory, limit, preemption))
    return rows


def lines(profile: SiteProfile) -> Iterator[str]:
    """Yield the settings in words."""
    restarts = "at once, with --requeue=expedite" if profile.expedites else f"after {profile.requeue_delay_s:.0f} s"
    requeue = f"allowed; a requeued job may start again {restarts}"
    if not profile.can_requeue:
        requeue = "forbidden by default (JobRequeue=0); follow-up jobs continue a run"
    yield f"requeue: {requeue}"
    yield f"preemption: {profile.preempt_type.removeprefix('preempt/')}; {profile.kill_wait_s:.0f} s from TERM to KILL"
    arrays = f"indices below {profile.max_array_size}" if profile.max_array_size else "switched off"
    yield f"arrays: {arrays}; {profile.max_jobs} jobs of all users at once"
    # Without the limits enforced, a wrong request waits for ever.
    refusal = "refused" if profile.enforces_limits else "held in the queue for ever"
    yield f"a job over its partition's limits is {refusal}"
    cgroup = f"; {profile.cgroup}" if profile.cgroup else ""
    yield f"processes: {profile.proctrack}, {profile.task_plugins}{cgroup}"
    yield f"srun --mpi: {', '.join(profile.mpi_plugins) or 'no plugins'}; default {profile.mpi_default}"
    yield f"accounting: {profile.accounting}"
    for account in profile.associations:
        limits: dict[str, str | int | float | None] = {
            "on partition": account.partition,
            "qos": ", ".join(account.qos),
            "default qos": account.default_qos,
            "jobs at once": account.max_jobs,
            "jobs in the queue": account.max_submit,
            "time": account.time_limit_s and in_units(account.time_limit_s),
        }
        yield f"account {account.account}: {_listed(limits)}"
    for qos in profile.qos:
        limits = {
            "time": qos.time_limit_s and in_units(qos.time_limit_s),
            "preemption": qos.preempt_mode,
            "a user's resources": qos.max_resources,
            "a user's jobs": qos.max_submit,
        }
        yield f"qos {qos.name}: {_listed(limits)}"
    yield from (f"note: {note}" for note in profile.notes)


def proof_lines(proofs: Sequence[Proof]) -> Iterator[str]:
    """Yield a line for each proof."""
    width = max(len(proof.name) for proof in proofs)
    for proof in proofs:
        figure = "" if proof.figure is None else f"{proof.figure:.3g} {proof.unit}"
        words = "; ".join(filter(None, (figure, proof.text)))
        yield f"{MARKS[proof.is_proven]:<9}  {proof.name:<{width}}  {words}".rstrip()


def _listed(limits: dict[str, str | int | float | None]) -> str:
    return "; ".join(f"{name} {value}" for name, value in limits.items() if value) or "no limits"


_PACKAGES = ("torch", "torchvision", "submitit", "numpy", "mpi4py", "tensorboard")


def versions() -> dict[str, str]:
    """Return the version of each program and package that is installed here."""
    found = {
        "toolkit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | kinds.versions()


#: srun starts all tasks within this many seconds of each other.
LAUNCH_SPREAD_S = 5.0
#: What srun prints about tasks that it ends itself. It ends all tasks if one could not be started.
_CONSEQUENCE = re.compile(r"Killed|Terminated|CANCELLED AT")
_UNREACHED = re.compile(r"launch .*failed on node (\S+?):")
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class StepLine:
    """A line of the step. ``task`` has printed it, or srun itself. ``received``: by this process's clock."""

    task: int | None
    text: str
    received: float


class CheckStep:
    """The step of srun that makes the checks, or without Slurm the checks of this machine. It reads their lines."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        self.lines: SimpleQueue[StepLine | None] = SimpleQueue()  #: None: no more will come
        self.began = time.time()
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = start_child(
            argv, environ, end_by=signal.SIGTERM, pass_fds=descriptors, text=True, errors="replace", **pipes
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.put(step_line(line.rstrip("\n"), time.time()))
        self.lines.put(None)

    def end(self) -> None:
        """End the step, without waiting for a task that hangs."""
        self._process.terminate()


def step_line(line: str, received: float) -> StepLine:
    """Return what a line is, by the label of ``srun --label``. Without srun only an answer has a task."""
    label, colon, text = line.partition(": ")
    if colon and label.strip().isdigit():
        return StepLine(int(label), text, received)
    return StepLine(0 if line.startswith(ANSWER_HEAD) else None, line.strip(), received)


#: Starts the checks on these hosts, or on as many as Slurm chooses.
Start = Callable[[CheckRequest, Sequence[str]], CheckStep]


def ask_nodes(
    request: CheckRequest, hosts: Sequence[str], start: Start, *, is_queued: bool = False
) -> tuple[list[NodeCheck], list[str], float]:
    """Return what is heard of each host, srun's errors, and the seconds it took.

    With ``is_queued`` the step may wait for its nodes, so time begins with the first answer. Where srun does not reach
    a host, it ends the whole step. The other hosts are then asked again, without that one.
    """
    answers = _Answers(hosts, start(request, hosts), is_queued)
    took_s = answers.listen()
    failed = {match[1] for line in answers.errors if (match := _UNREACHED.search(line))}
    unreached = failed & set(hosts)
    rest = [host for host in hosts if host not in unreached]
    if not unreached or not rest or all(node.findings is not None for node in answers.nodes):
        return answers.nodes, answers.errors, took_s
    # Ask the rest again: only these hosts' CPUs, which are counted by task.
    cpus = [request.cpus_of(task) for task, host in enumerate(hosts) if host not in unreached]
    nodes, errors, more_s = ask_nodes(replace(request, cpus=cpus), rest, start)
    lost = [node for node in answers.nodes if node.name in unreached]
    return [*nodes, *lost], [*answers.errors, *errors], took_s + more_s


class _Answers:
    """What the tasks of one step print, and what srun prints about them."""

    def __init__(self, hosts: Sequence[str], step: CheckStep, is_queued: bool) -> None:
        self.nodes = [NodeCheck(host) for host in hosts]
        self._names = list(hosts)
        self.errors: list[str] = []
        self._step, self._asked = step, step.began
        self._deadline = None if is_queued else time.monotonic() + limits().check_nodes_s
        self._has_begun = False
        self._awaited = set(range(len(hosts)))
        self._last_words: dict[int, str] = {}  #: by task, text that is no answer, or the first part of one

    def listen(self) -> float:
        """Read until all have answered or ended, or time is up. Return the seconds since the step began to run."""
        try:
            while self._awaited:
                left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                if (line := self._step.lines.get(timeout=left_s)) is None:
                    break
                if line.task is not None:
                    self._take(line, line.task)
                    continue
                self.errors.append(line.text)
                # Tasks that failed according to srun are not waited for.
                failed = parse_srun_line(line.text, self._names)
                if isinstance(failed, (RanksExited, LaunchFailed)):
                    self._awaited -= {*failed.ranks}
        except Empty:
            pass
        finally:
            self._step.end()
        # Note why a node has not answered. Each of srun's lines is read once: there may be thousands.
        complaints: dict[str, str] = {}
        for text in self.errors:
            if not _CONSEQUENCE.search(text):
                complaints |= {name: text for name in _NAME.findall(text) if name not in complaints}
        for task, node in enumerate(self.nodes):
            if node.findings is None:
                last_words = self._last_words.get(task, "").strip()
                node.failure = "; ".join(filter(None, [complaints.get(node.name), last_words]))
        return time.time() - self._asked

    def _take(self, line: StepLine, task: int) -> None:
        if task >= len(self.nodes):
            return
        # The rest of an answer that srun has cut belongs behind its first part.
        text = line.text
        if not text.startswith(ANSWER_HEAD):
            text = self._last_words.get(task, "") + text
        try:
            answer = CheckAnswer.parse(text)
        except (ValueError, TypeError, KeyError):  # srun cuts a labeled line after 1,024 bytes
            self._last_words[task] = text if text.startswith(ANSWER_HEAD) else line.text
            return
        if not self._has_begun:
            self._has_begun, self._deadline = True, self._deadline or time.monotonic() + limits().check_nodes_s
            # A job that waited for its nodes was asked long before they began.
            self._asked = max(self._asked, line.received - (answer.ended - answer.began) - LAUNCH_SPREAD_S)
            # Also name the nodes that stay silent: without chosen nodes their names are unknown.
            names = hostlist.expand(answer.nodes) if answer.nodes else []
            for each, name in enumerate(names[: len(self.nodes)]):
                self.nodes[each].name = self._names[each] = name
        node = self.nodes[task]
        node.name = self._names[task] = answer.node
        node.take(answer, self._asked, line.received, answer.began, answer.ended)
        self._awaited.discard(task)
