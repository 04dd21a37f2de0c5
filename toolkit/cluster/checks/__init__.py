"""Checks of one node, made on that node: ``python -m toolkit.cluster.checks REQUEST_JSON``, token in the environment.

`toolkit.launch.preflight` starts one such process on every node, at once, and judges what they say across the nodes.
What one says is JSON, a line for each finding as soon as it is known, so that a check that hangs hides no other.
It has to be up within a few hundredths of a second on every node: standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["ok", "warning", "bad"]

#: Where srun runs, which is where ranks find the store of their supervisor; or the first node of the step.
LAUNCHER, FIRST_NODE = "launcher", "first node"
#: Holds the request's token: any user of a node may read what stands in a command line.
TOKEN_VARIABLE = "TOOLKIT_PREFLIGHT_TOKEN"
#: All that a node does ends within this; the process leaves by itself a little later, whoever has forgotten it.
LIMIT_S = 25.0


@dataclass(frozen=True)
class Finding:
    """What one check found. ``text`` says, of what is not ok, what is wrong, the figure, and what to do."""

    check: str
    severity: Severity
    figure: str  #: a few characters for a table
    text: str = ""
    value: float | None = None  #: of checks whose figure is compared between nodes

    @staticmethod
    def parse(content: dict[str, Any]) -> Finding:
        """From a line of JSON. Raises TypeError or ValueError for one that is no finding."""
        found = Finding(**content)
        if found.severity not in ("ok", "warning", "bad") or not isinstance(found.text, str):
            raise ValueError(f"not a finding: {content}")
        return found


def ok(check: str, figure: str, value: float | None = None) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", figure, value=value)


@dataclass(frozen=True)
class Request:
    """What is asked of a node."""

    folder: str  #: inside the run folder, shared by all nodes; holds the file ``token``, and takes one of each node's
    token: str  #: the content of that file, and the word by which nodes know each other
    cpus: Sequence[int]  #: that the ranks of a node need: of the n-th task the n-th, or of all the only one
    gpus: int = 0  #: that a node must have
    peer: str = LAUNCHER  #: a node on the network of the ranks, by name or address, or one of the two words above
    pairs: bool = True  #: whether to exchange sums with other nodes, which the caller names on stdin
    limit_s: float = LIMIT_S

    def cpus_of(self, task: int) -> int:
        return self.cpus[task % len(self.cpus)]
