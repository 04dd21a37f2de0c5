"""What the checks of all nodes mean together: the nodes to do without, and the faults that lie with no single node."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolkit.base import hostlist
from toolkit.plugins.site.checks import CheckAnswer, Finding, Severity, ok
from toolkit.plugins.site.checks.host import SPEEDS

#: Seconds of difference from the other nodes: logs and time stamps of files are then wrong, and soon credentials are
#: refused.
BAD_CLOCK_S, WARNING_CLOCK_S = 5.0, 1.0
#: A node whose core or memory is slower than this share of the median is slow. Nodes of one kind differ by some
#: percent, and other jobs on them make a difference of a quarter.
SLOW_SHARE = 0.6
#: Checks that say nothing about a single node: the result is the same on the next. More ranks than CPUs is a request's
#: fault; another node would be as bad.
NOT_THE_NODES = frozenset({"cpus", "run folder space"})


@dataclass(frozen=True)
class NodesReport:
    """What is known of the nodes.

    ``bad`` has the reason for each node to do without. ``common`` has what is wrong on every node alike, or prevented
    the checks: no other node fixes that. Nothing was heard of the nodes in ``unknown``, which is a warning.
    """

    hosts: tuple[str, ...]
    findings: Mapping[str, tuple[Finding, ...]]
    bad: Mapping[str, str]
    warnings: Mapping[str, str]
    common: tuple[str, ...]
    took_s: float
    unknown: tuple[str, ...] = ()

    @property
    def slow(self) -> dict[str, str]:
        """Return the nodes that are slower than the others, each with what is slow."""
        texts = {
            host: "; ".join(each.text for each in findings if each.check in SPEEDS and each.text)
            for host, findings in self.findings.items()
        }
        return {host: text for host, text in texts.items() if text}

    @property
    def is_fine(self) -> bool:
        """True if nothing is bad; there may be warnings."""
        return not self.bad and not self.common

    def summary(self) -> list[str]:
        """Return lines for a log: a head, and one for each thing that is wrong."""
        bad = "all" if self.common else len(self.bad)
        counts = f"{bad} bad, {len(self.warnings)} with warnings" if self.findings else "none could be run"
        plural = "s" if len(self.hosts) > 1 else ""
        head = f"checks of {len(self.hosts)} node{plural}: {counts} ({self.took_s:.1f} s)"
        every = [finding for findings in self.findings.values() for finding in findings]
        known = dict.fromkeys(each.text for each in every if each.severity == "ok" and each.check not in SPEEDS)
        return [head, *self.problems(), *(f"note: {text}" for text in known if text)]

    def problems(self) -> list[str]:
        """Return a line for each thing that is wrong, with all nodes that it concerns."""
        lines = [f"every node: bad: {text}" if self.findings else text for text in self.common]
        lines += [f"{hosts}: bad: {text}" for text, hosts in _grouped(self.bad)]
        lines += [f"{hosts}: warning: {text}" for text, hosts in _grouped(self.warnings)]
        return lines


def _grouped(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each text with its hosts, in Slurm's notation."""
    hosts: dict[str, list[str]] = {}
    for host, text in texts.items():
        hosts.setdefault(text, []).append(host)
    for text, names in hosts.items():
        yield text, hostlist.compress(names)


@dataclass
class NodeCheck:
    """What has been heard of one node."""

    name: str
    findings: list[Finding] | None = None  #: None: it has not answered
    clock: tuple[float, float] | None = None  #: its clock's lead on ours lies between these two, in seconds
    failure: str = ""  #: why it has not answered, if an error names the reason

    def take(self, answer: CheckAnswer, asked: float, received: float, began: float, ended: float) -> None:
        """Take the node's answer.

        By our clock the node was asked after ``asked`` and heard at ``received``; by its own clock these were ``began``
        and ``ended``.
        """
        self.findings = list(answer.findings)
        self.clock = (ended - received, began - asked)


def judge(
    nodes: Sequence[NodeCheck], took_s: float, errors: Sequence[str] = (), alike: Sequence[Sequence[str]] = ()
) -> NodesReport:
    """Compare what was heard of the nodes within ``took_s``.

    ``alike`` are the names of those that may be expected to be equal, in groups: all of them if it is empty. A node of
    which nothing was heard is unknown, which is a warning: the network, the launch or our own node may be slow.
    ``errors`` are those that name no node; they are the reason if no node was heard at all.
    """
    if errors and not any(node.findings or node.failure for node in nodes):
        return failed_report([node.name for node in nodes], "; ".join(errors[-3:]), took_s)
    # Add the findings that need a comparison of the nodes.
    by_host = {node.name: list(node.findings or ()) for node in nodes}
    groups = [[node for node in nodes if node.name in names] for names in map(set, alike)] or [[*nodes]]
    compared = [found for group in groups for found in (*_fabric(group), *_speeds(group))]
    for host, finding in (*_unanswered(nodes, took_s), *_clocks(nodes), *compared):
        by_host[host].append(finding)
    # A node may have several bad findings of one check: of each check that it did not get through, for example.
    bad_texts: dict[str, dict[str, str]] = {}
    for host, findings in by_host.items():
        for finding in findings:
            if finding.severity == "bad":
                bad_texts.setdefault(finding.check, {})[host] = finding.text
    # What is bad on every node, or every one of its kind, is not held against any single one. Where there is only one
    # node, only some checks can say that the node is not the cause.
    bad, warnings, everywhere = dict[str, str](), dict[str, str](), dict[str, None]()
    for group in groups:
        hosts, common = [node.name for node in group], dict[str, str]()
        for check, texts in bad_texts.items():
            of_all = len(texts) == len(nodes) > 1
            of_kind = {*hosts} <= texts.keys() and (len(hosts) > 1 or check in NOT_THE_NODES)
            if hosts and (of_all or of_kind):
                common[check] = texts[hosts[0]]
        of_group = {host: by_host[host] for host in hosts}
        bad |= _texts(of_group, "bad", common)
        warnings |= _texts(of_group, "warning", common)
        everywhere |= dict.fromkeys(common.values())
    return NodesReport(
        hosts=tuple(by_host),
        findings={host: tuple(findings) for host, findings in by_host.items()},
        bad=bad,
        warnings=warnings,
        common=tuple(everywhere),
        took_s=took_s,
        unknown=tuple(node.name for node in nodes if node.findings is None and not node.failure),
    )


def failed_report(hosts: Sequence[str], why: str, took_s: float) -> NodesReport:
    """Return a report in which nothing is known of any node."""
    return NodesReport(tuple(hosts), {}, {}, {}, (f"the checks could not be run: {why}",), took_s)


def _texts(by_host: Mapping[str, Sequence[Finding]], severity: str, common: Mapping[str, str]) -> dict[str, str]:
    """Return each host's texts of this severity, without the checks that are common to its kind."""
    texts = {
        host: "; ".join(each.text for each in findings if each.severity == severity and each.check not in common)
        for host, findings in by_host.items()
    }
    return {host: text for host, text in texts.items() if text}


def _unanswered(nodes: Sequence[NodeCheck], took_s: float) -> Iterator[tuple[str, Finding]]:
    for node in nodes:
        if node.failure:
            text = f"could not be checked ({node.failure}); have the node looked at"
            yield node.name, Finding("answer", "bad", "none", text)
        elif node.findings is None:
            text = f"no answer from it within {took_s:.0f} s: its state is unknown"
            yield node.name, Finding("answer", "warning", "none", text)


def _clocks(nodes: Sequence[NodeCheck]) -> Iterator[tuple[str, Finding]]:
    """Compare each clock with that of most nodes; with two or fewer with ours, which may be the wrong one."""
    clocks = {node.name: node.clock for node in nodes if node.clock is not None}
    usual = _usual_lead(clocks.values()) if len(clocks) > 2 else 0.0
    for host, (low, high) in clocks.items():
        # 0 if the usual lead lies within the bounds, else the distance to them.
        lead_s = max(low - usual, 0.0) + min(high - usual, 0.0)
        if abs(lead_s) < WARNING_CLOCK_S:
            yield host, ok("clock", f"{lead_s:+.1f} s", lead_s)
            continue
        direction = "ahead of" if lead_s > 0 else "behind"
        text = (
            f"its clock is {abs(lead_s):.1f} s {direction} the others': have its time service (chrony, ntpd) looked at"
        )
        severity: Severity = "bad" if abs(lead_s) > BAD_CLOCK_S else "warning"
        yield host, Finding("clock", severity, f"{lead_s:+.1f} s", text, lead_s)


def _usual_lead(bounds: Iterable[tuple[float, float]]) -> float:
    """Return the lead on our clock that lies within the bounds of most nodes.

    Of several, the one nearest to 0. This is Marzullo's algorithm. A mean of the bounds would not do: they are wide for
    nodes that answer late, and nodes that answer at once would seem to be behind them.
    """
    # Sweep over the edges: ``within`` is the number of nodes whose bounds hold the stretch between two.
    edges = [edge for low, high in bounds for edge in ((low, 1), (high, -1))]
    edges.sort(key=lambda edge: (edge[0], -edge[1]))
    within = most = 0
    lead_s = 0.0
    for (at, change), (until, _) in itertools.pairwise(edges):
        within += change
        nearest = min(max(0.0, at), until)
        if (within, -abs(nearest)) > (most, -abs(lead_s)):
            most, lead_s = within, nearest
    return lead_s


def _fabric(nodes: Sequence[NodeCheck]) -> Iterator[tuple[str, Finding]]:
    """Find nodes with fewer active InfiniBand ports than most: their ranks would use a wrong network, or not meet."""
    ports: dict[str, float] = {}
    for node in nodes:
        if node.findings is not None:
            ports[node.name] = sum(each.value or 0 for each in node.findings if each.check == "infiniband")
    usual = statistics.mode(ports.values()) if ports else 0
    for host, count in ports.items():
        if count < usual:
            text = (
                f"{count:g} InfiniBand ports are active where other nodes have {usual:g}: `ibstat` on the node tells "
                "which is down; have it drained"
            )
            yield host, Finding("infiniband", "warning" if count else "bad", f"{count:g} of {usual:g}", text)


def _speeds(nodes: Sequence[NodeCheck]) -> Iterator[tuple[str, Finding]]:
    """Find nodes with a slow core or memory. All ranks would wait for theirs."""
    for check in SPEEDS:
        values: dict[str, Finding] = {}
        for node in nodes:
            for each in node.findings or ():
                if each.check == check and each.value:
                    values[node.name] = each
        if len(values) < 3:  # of two nodes either may be the odd one
            continue
        usual = statistics.median(each.value or 0.0 for each in values.values())
        for host, each in values.items():
            share = (each.value or 0.0) / usual
            if share < SLOW_SHARE:
                text = f"its {check} is {each.figure}, {share:.0%} of the others': all ranks would wait for its own"
                yield host, Finding(check, "warning", each.figure, text.replace("%", " %"), each.value)
