"""Checks of one node, made on that node: ``python -m toolkit.plugins.site.checks REQUEST_JSON``.

Each node of a job is checked once, by its agent; `toolkit doctor` has srun do the same. A node prints one line of JSON,
a :class:`CheckAnswer`, and ends. Nodes do not talk to each other: :mod:`.verdict` compares their answers. The checks
must start within a few hundredths of a second, so they use the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warning", "bad"]

#: The peer of a request: the host where srun runs, where ranks find their supervisor's store; or the step's first node.
LAUNCHER, FIRST_NODE = "launcher", "first node"
#: Seconds to wait for a program or server of the node, and for a file system. All checks run at once.
ASKING_LIMIT_S, DISK_LIMIT_S = 15.0, 8.0


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Unless it is ok, ``text`` says what is wrong, the figure, and what to do; else what there is to know.
    """

    check: str
    severity: Severity
    figure: str  #: a few characters for a table
    text: str = ""
    value: float | None = None  #: for checks whose figure is compared between nodes


def ok(check: str, figure: str, value: float | None = None) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, "ok", figure, value=value)


@dataclass(frozen=True)
class CheckRequest:
    """What is asked of a node."""

    folder: str  #: in the run folder, shared by all nodes: holds the file ``token``, and one file that each node writes
    token: str  #: the content of these files
    cpus: Sequence[int]  #: CPUs that a node's ranks need: the n-th entry for the n-th task, or one entry for all tasks
    gpus: int = 0  #: that a node must have
    peer: str = LAUNCHER  #: a node on the network of the ranks, by name or address, or one of the two words above
    disk_limit_s: float = DISK_LIMIT_S
    may_load: bool = False  #: no ranks work on the node: its speed may be measured

    def cpus_of(self, task: int) -> int:
        """Return the number of CPUs that the ranks of srun's task ``task`` need."""
        return self.cpus[task % len(self.cpus)]


#: How the JSON of an answer begins.
ANSWER_HEAD = '{"node": '


@dataclass(frozen=True)
class CheckAnswer:
    """What a node prints: its name, its findings, and its clock before and after.

    ``nodes`` are all nodes of the step in Slurm's notation; empty where enough other nodes print them.
    """

    node: str
    began: float
    ended: float
    findings: tuple[Finding, ...]
    nodes: str = ""

    @staticmethod
    def parse(text: str) -> CheckAnswer:
        """Return the answer in one line of JSON. Raises ValueError, TypeError or KeyError for any other line."""
        try:
            content = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        findings = tuple(Finding(**finding) for finding in content["findings"])
        times = float(content["began"]), float(content["ended"])
        return CheckAnswer(str(content["node"]), *times, findings, str(content["nodes"]))
