"""The preflight: each agent checks its node once, their answers are compared, and bad nodes are marked.

The checks run during the import of torch on each node, so they do not delay a start where they end before it. The
supervisor uses no node that they find bad, and one that they find slow only if there is no other. Where a spare node
can take the place of another, the GPUs are measured and compared as well.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from toolkit.base import fsio, logs
from toolkit.base.process_limits import limits
from toolkit.base.this_node import bare_python
from toolkit.nodes.agent.messages import CheckAnswered, CheckOrder
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents, Events, NodeAnswered, NodeSilent
from toolkit.plugins.site.checks import CheckAnswer, CheckRequest, Finding
from toolkit.plugins.site.checks.host import TOKEN, wait_for_text
from toolkit.plugins.site.checks.verdict import NodeCheck, NodesReport, failed_report, judge
from toolkit.run.attempt import verdict
from toolkit.run.supervise.rank_stop import is_to_stop
from toolkit.run.supervise.supervisor_components import Context

#: For the measurement of the GPUs: the import of torch and five seconds of work.
WAIT_S = 60.0
LOOK_EVERY_S = 0.2
#: A GPU is slow below this share of the median of the job's GPUs. Healthy ones of a kind differ by some percent.
SLOW_SHARE = 0.9
#: Fewer GPUs are not compared: their median would not tell which of them is slow.
LEAST_GPUS = 4
#: The measurement ends itself this long before. The ranks start then, and a CUDA context next to them would take their
#: memory.
MARGIN_S = 5
COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.site.gpu_measure", f"{WAIT_S - MARGIN_S:.0f}")
_WORDS = {"gemm": "multiplies matrices at", "copy": "copies from the host at"}

log = logs.get(__name__)
T = TypeVar("T")


def report_on_nodes(
    folder: Path, job: Allocation, agents: Agents, events: Events, spares: Collection[str] = ()
) -> NodesReport:
    """Have every node of ``job`` checked by its agent.

    ``folder`` is the run's, on the file system that all nodes share. ``spares`` are those of the nodes that need not
    answer. ``events`` is the queue of the agents' events. Any other event, such as a signal, ends the wait, and is in
    the queue again on return.
    """
    hosts = job.hosts
    began = time.monotonic()
    shared = SharedFolder(folder)
    try:
        shared.prepare()
        needs = [(tasks * cpus, gpus) for tasks, cpus, gpus in job.shapes.values()]
        command_of = {
            (cpus, gpus): tuple(command(CheckRequest(str(shared.path), shared.token, [cpus], gpus, may_load=True)))
            for cpus, gpus in set(needs)
        }
        orders = {host: CheckOrder(command_of[need]) for host, need in zip(hosts, needs, strict=True)}
        number = agents.request(orders, events)
        nodes, errors = _listen(hosts, {*spares}, events, began + limits().check_nodes_s)
        agents.withdraw(number)
        shared.read_answers(nodes)
        return judge(nodes, time.monotonic() - began, errors, job.by_component)
    except OSError as error:
        return failed_report(hosts, str(error), time.monotonic() - began)
    # Removed in a thread: the folder's file system may hang.
    finally:
        threading.Thread(target=shared.remove, daemon=True).start()


def command(request: CheckRequest) -> list[str]:
    """Return the command that makes the checks of ``request`` on its own node."""
    return bare_python("toolkit.plugins.site.checks.__main__", json.dumps(asdict(request)))


def _listen(
    hosts: Sequence[str], spares: set[str], events: Events, deadline: float
) -> tuple[list[NodeCheck], list[str]]:
    """Return each host's answer by ``deadline`` (monotonic), and the errors of no single node."""
    nodes = {host: NodeCheck(host) for host in hosts}
    awaited, errors = set(hosts), list[str]()
    while awaited:
        # Only spares are missing: ranks can start without them.
        if awaited <= spares < nodes.keys():
            deadline = min(deadline, time.monotonic() + limits().spares_checked_s)
            spares = set(nodes)  # the deadline is set once
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        match event:
            case NodeAnswered(host, CheckAnswered() as answer):
                try:
                    found = CheckAnswer.parse(last_line(answer.text))
                    nodes[host].take(found, event.asked, event.received, answer.began, answer.ended)
                except (ValueError, TypeError, KeyError):
                    nodes[host].failure = answer.text.strip() or "its checks printed nothing; see its agent's log"
            case NodeAnswered():  # an answer to an earlier request
                continue
            case NodeSilent(host, why, is_certain):
                nodes[host].failure = why if is_certain else ""
                errors += [] if is_certain else [f"{host}: {why}"]
            case _:  # it belongs to the caller, also an error of the agents' thread
                events.put(event)
                break
        awaited.discard(event.host)
    return list(nodes.values()), errors


class SharedFolder:
    """A folder in the run's. This process writes a token that every node reads, and every node writes one."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f".preflight-{secrets.token_hex(4)}"
        self.token = secrets.token_hex(16)

    def prepare(self) -> None:
        """Write the token. Raises an OSError that says where it cannot be written."""

        def write() -> None:
            fsio.make_dir(self.path, parents=0)
            fsio.write_atomic(self.path / TOKEN, self.token, durable=False)

        try:
            _within(limits().check_folder_s, write)
        except OSError as error:
            place = f"{self.path.parent}: cannot be written to from {socket.gethostname()}"
            raise OSError(f"{place}: {error.strerror or error}") from error

    def read_answers(self, nodes: Sequence[NodeCheck]) -> None:
        """Add a finding to each node whose file is not visible here."""
        try:
            unseen = _within(limits().check_folder_s, lambda: self._unseen(nodes))
        except OSError:  # it hangs here, since the request
            unseen = set()
        text = (
            f"what it writes to {self.path.parent} is not seen on {socket.gethostname()}: it has another folder there, "
            "or a stale one; have its file system remounted"
        )
        for node in nodes:
            if node.name in unseen:
                node.findings = [*(node.findings or ()), Finding("shared folder", "bad", "differs", text)]

    def _unseen(self, nodes: Sequence[NodeCheck]) -> set[str]:
        """Return the nodes that have written a file which is not visible. One listing covers nearly all of them.

        With thousands of nodes a look at each file would take seconds.
        """
        deadline = time.monotonic() + limits().file_seen_within_s
        listed, unseen = {path.name for path in self.path.iterdir()}, set[str]()
        for node in nodes:
            found = [finding.severity for finding in node.findings or () if finding.check == "shared folder"]
            if "ok" in found and node.name not in listed:
                text = wait_for_text(self.path / node.name, self.token, deadline - time.monotonic())
                if text != self.token:
                    unseen.add(node.name)
        return unseen

    def remove(self) -> None:
        """Remove the folder. An error is ignored: it is a few bytes in the run folder."""
        with contextlib.suppress(OSError):
            _within(limits().check_folder_s, lambda: fsio.remove_tree(self.path))


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """Return ``call()``. Raises its OSError, or TimeoutError (which is one) after ``limit_s``: the call may hang on."""
    answers: SimpleQueue[T | OSError] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(call())
        except OSError as error:
            answers.put(error)

    # The thread is left behind if the call hangs.
    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except Empty:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def mark_bad_nodes(context: Context) -> None:
    """Mark the nodes that the preflight finds bad as unusable.

    A job that was requeued for bad nodes twice, in vain, takes what it gets: it may well run.
    """
    agents, nodes = context.agents, context.nodes
    if not context.config.cluster.preflight or context.job.slurm is None or agents is None:
        return
    # Spare nodes are checked too, for what a rank needs there.
    job, spare = context.allocation, context.config.cluster.spare_nodes
    spares = {*job.hosts} - {*job.without_spares(spare).hosts}
    report = report_on_nodes(context.run.path, job, agents, context.events, spares=spares)
    if not report.is_fine and is_to_stop(context):
        return  # what ends the job ended the checks, too: they say nothing about the nodes
    for line in report.summary():
        log.log(logging.INFO if report.is_fine else logging.WARNING, "preflight: %s", line)
    if verdict.bad_node_requeues(context.journal.history()) >= verdict.MAX_FRUITLESS_REQUEUES:
        return
    nodes.doubt(report.slow)
    # Slow GPUs only matter where a spare can take their place.
    if spare:
        nodes.doubt(slow_nodes(agents, job, context.events))
    # A node that did not answer is bad only if its slurmd does not answer either.
    dead = context.job.unreachable(report.unknown) if report.unknown else set()
    bad = {**report.bad, **dict.fromkeys(dead, "no answer from it, and its slurmd does not answer")}
    for host, why in bad.items():
        nodes.condemn(host, why)


def slow_nodes(agents: Agents, job: Allocation, events: Events) -> dict[str, str]:
    """Return the nodes with a GPU that is slower than the job's others, each with a line on what is slow.

    Components may have GPUs of different kinds: each is compared with itself, and one of few GPUs is not measured. A
    node that does not answer in time, or has no torch outside its container, is left out. Anything in ``events``, such
    as a signal, ends the wait, and stays there.
    """
    groups = [hosts for hosts in job.by_component if sum(job.gpus_of[host] for host in hosts) >= LEAST_GPUS]
    if not groups:
        return {}
    heard: Events = SimpleQueue()
    awaited, texts = {host for hosts in groups for host in hosts} - agents.silent_hosts, dict[str, str]()
    number = agents.request(dict.fromkeys(awaited, CheckOrder(COMMAND)), heard)
    deadline = time.monotonic() + WAIT_S
    while awaited and events.empty() and time.monotonic() < deadline:
        try:
            event = heard.get(timeout=LOOK_EVERY_S)
        except Empty:
            continue
        if isinstance(event, NodeAnswered) and isinstance(event.message, CheckAnswered):
            texts[event.host] = event.message.text
        awaited.discard(event.host)
    agents.withdraw(number)
    slow: dict[str, str] = {}
    for hosts in groups:
        slow |= find_slow_gpus({host: texts[host] for host in hosts if host in texts})
    return slow


def last_line(text: str) -> str:
    """Return the last line of what a check has printed. Libraries may print before it."""
    return text.rstrip().rpartition("\n")[2]


def find_slow_gpus(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes with a slow GPU, by the texts that nodes with GPUs of one kind have printed."""
    slow: dict[str, list[str]] = {}
    for kind, words in _WORDS.items():
        speeds: dict[tuple[str, int], float] = {}
        for host, text in texts.items():
            try:
                speeds |= {(host, gpu): float(speed) for gpu, speed in enumerate(json.loads(last_line(text))[kind])}
            except (ValueError, TypeError, LookupError, RecursionError):
                log.warning("the speed of a node's GPUs is not known: %.200s", text.strip())
        if len(speeds) < LEAST_GPUS:
            continue
        usual = statistics.median(speeds.values())
        for (host, gpu), speed in speeds.items():
            if speed < SLOW_SHARE * usual:
                share = f"{speed / usual:.0%}".replace("%", " %")
                slow.setdefault(host, []).append(f"GPU {gpu} {words} {share} of the others' speed")
    return {host: "; ".join(found) for host, found in slow.items()}
