"""What the checks of all nodes mean together: which nodes to do without, and what is wrong with none of them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.cluster import hostlist
from toolkit.cluster.checks import LIMIT_S, Finding, ok, pairs

#: Off from the other nodes; logs and time stamps of files are then wrong, and soon credentials are refused.
BAD_CLOCK_S, WARNING_CLOCK_S = 5.0, 1.0
#: Of a single node these say nothing about the node: they are the same on the next.
NOT_THE_NODES = frozenset({"run folder space"})


@dataclass(frozen=True)
class Report:
    """What is known of the nodes.

    ``bad`` has the reason for each node to do without. ``common`` is wrong on every node alike, or was in the way of
    the checks: no other node mends that.
    """

    hosts: tuple[str, ...]
    findings: Mapping[str, tuple[Finding, ...]]
    bad: Mapping[str, str]
    warnings: Mapping[str, str]
    common: tuple[str, ...]
    took_s: float

    @property
    def is_fine(self) -> bool:
        """Whether nothing is bad; there may be warnings."""
        return not self.bad and not self.common

    def summary(self) -> list[str]:
        """For a log: one line for each thing that is wrong, or one that says that nothing is."""
        counts = f"{len(self.bad)} bad, {len(self.warnings)} with warnings" if self.findings else "none could be made"
        plural = "s" if len(self.hosts) > 1 else ""
        head = f"checks of {len(self.hosts)} node{plural}: {counts} ({self.took_s:.1f} s)"
        return [head, *self.problems()]

    def problems(self) -> list[str]:
        """A line for each thing that is wrong, with all nodes of which it is."""
        return [
            *(f"every node: bad: {text}" for text in self.common),
            *(f"{hosts}: bad: {text}" for text, hosts in _grouped(self.bad)),
            *(f"{hosts}: warning: {text}" for text, hosts in _grouped(self.warnings)),
        ]


def _grouped(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each text with the hosts of which it is said, in Slurm's notation."""
    for text in dict.fromkeys(texts.values()):
        yield text, hostlist.compress(host for host, said in texts.items() if said == text)


@dataclass
class Heard:
    """What one node has said so far."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    listening: tuple[str, int] | None = None
    clock: tuple[float, float] | None = None  #: its clock's lead on ours lies between these two
    is_here: bool = False
    is_done: bool = False
    is_gone: bool = False  #: srun has seen it end
    noise: str = ""  #: its last line that is none of ours, or on stderr

    @property
    def is_placed(self) -> bool:
        """Whether it has said where it listens, or that it cannot."""
        return self.listening is not None or any(f.check == "network" and f.severity == "bad" for f in self.findings)

    def set_clock(self, theirs: float, asked: float, received: float) -> None:
        """It read its clock after we ``asked`` and before we ``received`` the answer: the closest two count."""
        bounds = (theirs - received, theirs - asked)
        if self.clock is None or bounds[1] - bounds[0] < self.clock[1] - self.clock[0]:
            self.clock = bounds


@dataclass(frozen=True)
class Outcome:
    """All that was heard: of each node, of the pairs that were to meet, and srun's own errors."""

    nodes: Sequence[Heard]
    exchanges: Mapping[pairs.Pair, pairs.Exchange]
    errors: Sequence[str] = ()


def judge(outcome: Outcome, trusted: str | None, took_s: float) -> Report:
    """What was heard, compared between the nodes. ``trusted`` is the node on which the caller stands, if any."""
    nodes = outcome.nodes
    if not any(node.is_here for node in nodes) and outcome.errors:
        return prevented([node.name for node in nodes], "; ".join(outcome.errors[-3:]), took_s)
    found = {node.name: list(node.findings) for node in nodes}
    for host, finding in (*_answers(outcome), *_clocks(nodes), *_fabric(nodes), *_exchanges(outcome, trusted)):
        found[host].append(finding)
    common = {check: texts[0] for check, texts in _by_check(found).items() if _is_common(check, len(texts), len(nodes))}
    return Report(
        hosts=tuple(found),
        findings={host: tuple(findings) for host, findings in found.items()},
        bad=_texts(found, "bad", common),
        warnings=_texts(found, "warning", common),
        common=tuple(common.values()),
        took_s=took_s,
    )


def prevented(hosts: Sequence[str], why: str, took_s: float) -> Report:
    """Nothing is known of any node."""
    return Report(tuple(hosts), {}, {}, {}, (f"the checks could not be made: {why}",), took_s)


def _by_check(found: Mapping[str, Sequence[Finding]]) -> dict[str, list[str]]:
    """The texts of what is bad."""
    texts: dict[str, list[str]] = {}
    for finding in (finding for findings in found.values() for finding in findings if finding.severity == "bad"):
        texts.setdefault(finding.check, []).append(finding.text)
    return texts


def _is_common(check: str, bad: int, nodes: int) -> bool:
    return bad == nodes and (nodes > 1 or check in NOT_THE_NODES)


def _texts(found: Mapping[str, Sequence[Finding]], severity: str, common: Mapping[str, str]) -> dict[str, str]:
    texts = {
        host: "; ".join(f.text for f in findings if f.severity == severity and f.check not in common)
        for host, findings in found.items()
    }
    return {host: text for host, text in texts.items() if text}


#: What srun says of the tasks that it ends itself.
_CONSEQUENCE = re.compile(r"Killed|Terminated|CANCELLED AT")


def _answers(outcome: Outcome) -> Iterator[tuple[str, Finding]]:
    """Of the nodes that are not done, why not."""
    for node in outcome.nodes:
        if node.is_done:
            continue
        words = [line for line in outcome.errors if node.name in line and not _CONSEQUENCE.search(line)][:1]
        words += [node.noise] if node.noise else []
        silent = "has not got through its checks" if node.is_here else "does not answer"
        how = f" ({'; '.join(words)})" if words else f" within {LIMIT_S:g} s"
        text = f"{silent}{how}; have the node looked at"
        yield node.name, Finding("answer", "bad", "none", text)


def _clocks(nodes: Sequence[Heard]) -> Iterator[tuple[str, Finding]]:
    """Each clock against that of most nodes, or of two nodes against ours: our own may be the one that is wrong."""
    clocks = {node.name: node.clock for node in nodes if node.clock is not None}
    middle = statistics.median((low + high) / 2 for low, high in clocks.values()) if len(clocks) > 2 else 0.0
    for host, (low, high) in clocks.items():
        lead_s = max(low - middle, 0.0) + min(high - middle, 0.0)
        if abs(lead_s) < WARNING_CLOCK_S:
            yield host, ok("clock", f"{lead_s:+.1f} s", lead_s)
            continue
        text = (
            f"its clock is {abs(lead_s):.1f} s {'ahead of' if lead_s > 0 else 'behind'} the others': have its time "
            "service (chrony, ntpd) looked at"
        )
        yield (
            host,
            Finding("clock", "bad" if abs(lead_s) > BAD_CLOCK_S else "warning", f"{lead_s:+.1f} s", text, lead_s),
        )


def _fabric(nodes: Sequence[Heard]) -> Iterator[tuple[str, Finding]]:
    """A node with fewer InfiniBand ports up than most: the ranks would meet over the wrong network, or not at all."""
    ports = {node.name: sum(f.value or 0 for f in node.findings if f.check == "infiniband") for node in nodes}
    usual = statistics.mode(ports.values())
    for host, count in ports.items():
        if count < usual:
            text = (
                f"{count:g} InfiniBand ports are active where other nodes have {usual:g}: `ibstat` on the node tells "
                "which is down; have it drained"
            )
            yield host, Finding("infiniband", "warning" if count else "bad", f"{count:g} of {usual:g}", text)


def _exchanges(outcome: Outcome, trusted: str | None) -> Iterator[tuple[str, Finding]]:
    nodes = [node.name for node in outcome.nodes if node.is_done and node.listening is not None]
    met = {pair: exchange for pair, exchange in outcome.exchanges.items() if set(pair) <= set(nodes)}
    failed = {pair: exchange.error for pair, exchange in met.items() if exchange.error is not None}
    bad, unclear = pairs.blame(nodes, met.keys() - failed.keys(), failed, trusted)
    for host in nodes:
        others = [f"{a if b == host else b} ({error})" for (a, b), error in failed.items() if host in (a, b)]
        text = f"cannot exchange data with {', '.join(others)}: have its network looked at"
        if host in bad:
            yield host, Finding("pairs", "bad", "cut off", text)
        elif any(host in pair for pair in unclear):
            yield host, Finding("pairs", "warning", "fails", text)
        elif times := [exchange.took_s for pair, exchange in met.items() if host in pair and not exchange.error]:
            rate = pairs.EXCHANGED_BYTES / min(times)
            yield host, ok("pairs", f"{rate / 1e6:.0f} MB/s", rate)
