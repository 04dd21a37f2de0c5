"""Orders a job's nodes by the switches or blocks (NVLink domains) that Slurm's topology plugin tells of.

Neighbouring ranks send each other the most: a ring then crosses each switch once, and the groups of fsdp, tensor and
pipeline are of neighbours. Slurm lists the nodes of a job by their names instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from toolkit.base import hostlist, logs
from toolkit.base.errors import RequestError, SlurmError
from toolkit.slurm.commands import SlurmCommands

log = logs.get(__name__)

_UNIT = re.compile(r"^(?:SwitchName|BlockName|AggregatedBlock)=(\S+).*?\bNodes=(\S+)", re.MULTILINE)


def node_order(hosts: Sequence[str], slurm: SlurmCommands | None) -> Sequence[str]:
    """Return the job's nodes such that near ones follow each other; as they are where Slurm does not tell.

    Slurm is asked once, and not at all without a topology plugin: a node's address then has the pattern ``node``.
    """
    # sbatch(1), SLURM_TOPOLOGY_ADDR_PATTERN: switch.switch.node, or block.node.
    if slurm is None or len(hosts) < 2 or "." not in os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""):
        return hosts
    try:
        ordered = in_order(hosts, units_of(slurm.topology()))
    except (SlurmError, RequestError, ValueError) as error:  # a list of nodes may be cut off: SLURM_TOPO_LEN
        log.warning("ranks are not placed by the network: %s", error)
        return hosts
    if ordered != [*hosts]:
        log.info("ranks are placed by the network: %s", ",".join(ordered))
    return ordered


def units_of(text: str) -> dict[str, list[str]]:
    """Return the nodes of each switch or block, by its name, from the output of ``scontrol show topology``."""
    return {name: hostlist.expand(nodes) for name, nodes in _UNIT.findall(text)}


def in_order(hosts: Sequence[str], units: Mapping[str, Sequence[str]]) -> list[str]:
    """Return ``hosts`` such that those of each unit follow each other. One inside another has fewer nodes.

    A unit comes where the first of its nodes would. So the first node, which is the batch host, stays the first.
    """
    places = {host: place for place, host in enumerate(hosts)}
    keys: dict[str, list[int]] = {host: [] for host in hosts}
    for members in sorted(units.values(), key=len, reverse=True):
        of_job = [host for host in members if host in places]
        first = min((places[host] for host in of_job), default=0)
        for host in of_job:
            keys[host].append(first)
    return sorted(hosts, key=lambda host: [*keys[host], places[host]])
