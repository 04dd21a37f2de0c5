"""Checks nodes by an srun step. Every task makes the checks once, and its labeled output is the answer.

So only what srun reaches must be reachable, and no disk is asked: it may be the faulty part.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty

from toolkit.base import hostlist
from toolkit.nodes.start.launcher import LaunchFailed, RanksExited
from toolkit.nodes.start.line_channel import ChannelEnded, ErrorLine, LineChannel, NodeLine, without_label
from toolkit.nodes.start.srun import parse_srun_line
from toolkit.plugins.site.checks import ANSWER_HEAD, CheckAnswer, CheckRequest
from toolkit.plugins.site.checks.preflight import LIMIT_S
from toolkit.plugins.site.checks.verdict import Heard

#: srun starts all tasks within this many seconds of each other.
LAUNCH_SPREAD_S = 5.0
#: What srun prints about tasks that it ends itself. It ends all tasks if one could not be started.
_CONSEQUENCE = re.compile(r"Killed|Terminated|CANCELLED AT")
_UNREACHED = re.compile(r"launch .*failed on node (\S+?):")
_NAME = re.compile(r"[\w.-]+")

#: Starts the checks on these hosts, or on as many as Slurm chooses.
Start = Callable[[CheckRequest, Sequence[str]], LineChannel]


def ask_nodes(
    request: CheckRequest, hosts: Sequence[str], start: Start, *, is_queued: bool = False
) -> tuple[list[Heard], list[str], float]:
    """Return what is heard of each host, srun's errors, and the seconds it took.

    With ``is_queued`` the step may wait for its nodes, so time begins with the first answer. Where srun does not reach
    a host, it ends the whole step. The other hosts are then asked again, without that one.
    """
    answers = _Answers(hosts, start(request, hosts), is_queued)
    answers.listen()
    failed = {match[1] for line in answers.errors if (match := _UNREACHED.search(line))}
    unreached = failed & set(hosts)
    rest = [host for host in hosts if host not in unreached]
    if not unreached or not rest or all(node.findings is not None for node in answers.nodes):
        return answers.nodes, answers.errors, answers.took_s
    # Ask the rest again: only these hosts' CPUs, which are counted by task.
    cpus = [request.cpus_of(task) for task, host in enumerate(hosts) if host not in unreached]
    nodes, errors, took_s = ask_nodes(replace(request, cpus=cpus), rest, start)
    lost = [node for node in answers.nodes if node.name in unreached]
    return [*nodes, *lost], [*answers.errors, *errors], answers.took_s + took_s


class _Answers:
    """What the tasks of one step print, and what srun prints about them."""

    def __init__(self, hosts: Sequence[str], channel: LineChannel, is_queued: bool) -> None:
        self.nodes = [Heard(host) for host in hosts]
        self._names = list(hosts)
        self.errors: list[str] = []
        self._channel = channel
        self._asked = channel.began
        self._deadline = None if is_queued else time.monotonic() + LIMIT_S
        self._has_begun = False
        self._awaited = set(range(len(hosts)))
        self._last_words: dict[int, str] = {}  #: by task, text that is no answer, or the first part of one

    @property
    def took_s(self) -> float:
        """Return the seconds since the step began to run."""
        return time.time() - self._asked

    def listen(self) -> None:
        """Read until all have answered or ended, or time is up."""
        try:
            while self._awaited and not isinstance(event := self._next(), ChannelEnded):
                if isinstance(event, NodeLine):
                    self._take(event)
                    continue
                # A line that is no answer: a node's own, which is labeled, or srun's.
                task, words = without_label(event.text)
                if task is not None and task < len(self.nodes):
                    self._last_words[task] = words.strip()
                    continue
                self.errors.append(event.text)
                # Tasks that failed according to srun are not waited for.
                failed = parse_srun_line(event.text, self._names)
                if isinstance(failed, (RanksExited, LaunchFailed)):
                    self._awaited -= {*failed.ranks}
        except Empty:
            pass
        finally:
            self._channel.end()
        # Note why a node has not answered. Each of srun's lines is read once: there may be thousands.
        complaints: dict[str, str] = {}
        for line in self.errors:
            if not _CONSEQUENCE.search(line):
                complaints |= {name: line for name in _NAME.findall(line) if name not in complaints}
        for task, node in enumerate(self.nodes):
            if node.findings is None:
                node.failure = "; ".join(filter(None, [complaints.get(node.name), self._last_words.get(task)]))

    def _next(self) -> NodeLine | ErrorLine | ChannelEnded:
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return self._channel.events.get(timeout=left_s)

    def _take(self, line: NodeLine) -> None:
        if line.task >= len(self.nodes):
            return
        # The rest of an answer that srun has cut belongs behind its first part.
        text = line.text
        if not text.startswith(ANSWER_HEAD):
            text = self._last_words.get(line.task, "") + text
        try:
            answer = CheckAnswer.parse(text)
        except (ValueError, TypeError, KeyError):  # srun cuts a labeled line after 1,024 bytes
            self._last_words[line.task] = text if text.startswith(ANSWER_HEAD) else line.text
            return
        if not self._has_begun:
            self._has_begun, self._deadline = True, self._deadline or time.monotonic() + LIMIT_S
            # A job that waited for its nodes was asked long before they began.
            self._asked = max(self._asked, line.received - (answer.ended - answer.began) - LAUNCH_SPREAD_S)
            # Also name the nodes that stay silent: without chosen nodes their names are unknown.
            names = hostlist.expand(answer.nodes) if answer.nodes else []
            for task, name in enumerate(names[: len(self.nodes)]):
                self._name(task, name)
        self._name(line.task, answer.node)
        node = self.nodes[line.task]
        node.take(answer, self._asked, line.received, answer.began, answer.ended)
        self._awaited.discard(line.task)

    def _name(self, task: int, name: str) -> None:
        self.nodes[task].name = self._names[task] = name
