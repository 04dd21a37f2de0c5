"""What the checks of all nodes mean together: which nodes to do without, and what is wrong with none of them."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        bad = "all" if self.common else len(self.bad)
        counts = f"{bad} bad, {len(self.warnings)} with warnings" if self.findings else "none could be made"
        plural = "s" if len(self.hosts) > 1 else ""
        head = f"checks of {len(self.hosts)} node{plural}: {counts} ({self.took_s:.1f} s)"
        return [head, *self.problems()]

    def problems(self) -> list[str]:
        """A line for each thing that is wrong, with all nodes of which it is."""
        return [
            *(f"every node: bad: {text}" if self.findings else text for text in self.common),
            *(f"{hosts}: bad: {text}" for text, hosts in _grouped(self.bad)),
            *(f"{hosts}: warning: {text}" for text, hosts in _grouped(self.warnings)),
        ]


def _grouped(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each text with the hosts of which it is said, in Slurm's notation."""
    hosts: dict[str, list[str]] = {}
    for host, text in texts.items():
        hosts.setdefault(text, []).append(host)
    yield from ((text, hostlist.compress(names)) for text, names in hosts.items())


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
_NAME = re.compile(r"[\w.-]+")
#: Nodes that stay silent without a word of why are bad while they are no more than this share of all (or one). Where
#: more do, it is the launch, the network or this host that is slow: nothing is known of them, and none is blamed.
MOST_SILENT_SHARE = 0.1


def _answers(outcome: Outcome) -> Iterator[tuple[str, Finding]]:
    """Of the nodes that are not done, why not."""
    said_of: dict[str, str] = {}
    for line in outcome.errors:
        if not _CONSEQUENCE.search(line):
            said_of |= {name: line for name in _NAME.findall(line) if name not in said_of}
    undone = [
        (node, [said_of[node.name]] if node.name in said_of else []) for node in outcome.nodes if not node.is_done
    ]
    silent = sum(not (words or node.noise or node.is_gone) for node, words in undone)
    are_known = silent <= max(1, MOST_SILENT_SHARE * len(outcome.nodes))
    for node, words in undone:
        words += [node.noise] if node.noise else []
        done = "has not got through its checks" if node.is_here else "does not answer"
        if words or node.is_gone or are_known:
            how = f" ({'; '.join(words)})" if words else f" within {LIMIT_S:g} s"
            yield node.name, Finding("answer", "bad", "none", f"{done}{how}; have the node looked at")
        else:
            text = f"{done} within {LIMIT_S:g} s, as {silent} of {len(outcome.nodes)} nodes: nothing is known of it"
            yield node.name, Finding("answer", "warning", "none", text)


def _clocks(nodes: Sequence[Heard]) -> Iterator[tuple[str, Finding]]:
    """Each clock against that of most nodes, or of two nodes against ours: our own may be the one that is wrong."""
    clocks = {node.name: node.clock for node in nodes if node.clock is not None}
    usual = _usual_lead(clocks.values()) if len(clocks) > 2 else 0.0
    for host, (low, high) in clocks.items():
        lead_s = max(low - usual, 0.0) + min(high - usual, 0.0)
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


def _usual_lead(bounds: Iterable[tuple[float, float]]) -> float:
    """Return the lead on our clock that lies within the bounds of most nodes; of several, the one nearest to 0.

    Not a mean of the bounds: they are wide for nodes that answer late, and nodes that answer at once would seem to be
    behind them. (Marzullo's algorithm.)
    """
    edges = sorted((edge for low, high in bounds for edge in ((low, 1), (high, -1))), key=lambda e: (e[0], -e[1]))
    within = most = 0
    lead_s = 0.0
    for (at, change), (until, _) in itertools.pairwise(edges):
        within += change
        nearest = min(max(0.0, at), until)
        if (within, -abs(nearest)) > (most, -abs(lead_s)):
            most, lead_s = within, nearest
    return lead_s


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
    """Of the nodes that took part in pairs. One that came too late for them is in none, which says nothing of it."""
    done = {node.name for node in outcome.nodes if node.is_done}
    met = {pair: exchange for pair, exchange in outcome.exchanges.items() if done.issuperset(pair)}
    in_a_pair = {host for pair in met for host in pair}
    nodes = [node.name for node in outcome.nodes if node.name in in_a_pair]
    failed = {pair: exchange.error for pair, exchange in met.items() if exchange.error is not None}
    bad, unclear = pairs.blame(nodes, met.keys() - failed.keys(), failed, trusted)
    for host in nodes:
        others = [f"{a if b == host else b} ({error})" for (a, b), error in failed.items() if host in (a, b)]
        text = f"cannot exchange data with {', '.join(sorted(others))}: have its network looked at"
        if host in bad:
            yield host, Finding("pairs", "bad", "cut off", text)
        elif any(host in pair for pair in unclear):
            yield host, Finding("pairs", "warning", "fails", text)
        elif times := [exchange.took_s for pair, exchange in met.items() if host in pair and not exchange.error]:
            rate = pairs.EXCHANGED_BYTES / min(times)
            yield host, ok("pairs", f"{rate / 1e6:.0f} MB/s", rate)
