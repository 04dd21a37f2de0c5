"""What the site profile says of a config: Slurm would refuse the job, or hold it in the queue for ever.

Reservations that would hold a new job back, such as one for maintenance.

Slurm starts no job that could still run when its nodes are reserved. It says so only in the reason of a job that waits.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from toolkit.base import hostlist, logs
from toolkit.base.durations import in_units
from toolkit.base.errors import ConfigError, RequestError, SlurmError, listing, nearest
from toolkit.config import ClusterConfig, JobConfig
from toolkit.plugins.site import site_profile
from toolkit.plugins.site.site_profile import PartitionRecord, SiteProfile
from toolkit.slurm.commands import Slurm

log = logs.get(__name__)


def check_site(config: JobConfig) -> None:
    """Warn of reservations. Refuse what the site profile says cannot run; without one, nothing is refused.

    Raises ConfigError with the key. An old profile only warns: the site may have changed since. So do the limits of the
    default partition.
    """
    for part in config.cluster.parts:
        if text := holding_back(part):
            log.warning("%s", text)
    profile = site_profile.profile_here()
    if profile is None:
        return
    # A job without a partition need not run on the default one: a plugin of the site (job_submit) may choose another.
    for number, part in enumerate(config.cluster.parts):
        own = replace(config, cluster=part)
        checks = [(_partition_problems(own, profile), bool(part.partition)), (_account_problems(own, profile), True)]
        for problem, is_certain in [(problem, certain) for problems, certain in checks for problem in problems]:
            _report(_of_component(config, number, problem), profile, is_certain=is_certain)


def _of_component(config: JobConfig, number: int, problem: str) -> str:
    """Return the problem with the name of the component's own key, where it has one."""
    key = problem.partition(":")[0].removeprefix("cluster.")
    has_own = config.cluster.components and key in config.cluster.components[number]
    return problem.replace("cluster.", f"cluster.components[{number}].", 1) if has_own else problem


def _report(problem: str, profile: SiteProfile, *, is_certain: bool) -> None:
    text = (
        f"{problem} (by the site profile of {site_profile.date(profile.made)}; `toolkit doctor --site` reads it anew)"
    )
    if is_certain and not profile.is_old:
        raise ConfigError(text)
    log.warning("%s", text)


def _partition_problems(config: JobConfig, profile: SiteProfile) -> Iterator[str]:
    cluster = config.cluster
    # A job may name several partitions: it must fit one of them.
    names = cluster.partition.split(",") if cluster.partition else [None]
    parts = [profile.partition(name) for name in names]
    known = [part.name for part in profile.partitions]
    for name, part in zip(names, parts, strict=True):
        if part is None and name is not None and known:
            yield f"cluster.partition: there is no {name!r}; {nearest(name, known)}there are: {listing(known)}"
    # Some flags of a QOS lift limits of the partition. Without a QOS in the config all count that Slurm may give.
    qos = set(_qos_names(config))
    if not qos:
        for account in profile.associations:
            qos |= {account.default_qos} if account.default_qos else {*account.qos}
    flags = {flag for record in profile.qos if not _is_missing(record.name, qos) for flag in record.flags}
    reasons = [list(_misfits(config, part, flags)) for part in parts if part is not None]
    if reasons and all(reasons):
        yield reasons[0][0]


def _misfits(config: JobConfig, part: PartitionRecord, flags: set[str]) -> Iterator[str]:
    """Yield why the job could never run on this partition. ``flags`` are of its QOS (sacctmgr(1))."""
    cluster, on = config.cluster, f"partition {part.name}"
    nodes = cluster.nodes + cluster.spare_nodes
    has_most, has_limit = "PartitionMaxNodes" not in flags, "PartitionTimeLimit" not in flags
    most = min(part.nodes, part.max_nodes or part.nodes) if has_most else part.nodes
    if has_limit and part.time_limit_s is not None and cluster.time_min * 60 > part.time_limit_s:
        allowed = math.floor(part.time_limit_s / 60)
        limit = in_units(part.time_limit_s)
        yield f"cluster.time_min: {cluster.time_min} is over the limit of {on}, {limit}; use {allowed} or less"
    if nodes > most > 0:
        yield f"cluster.nodes: {nodes} with spare ones, and a job on {on} may have {most}"
    if part.accounts and cluster.account and _is_missing(cluster.account, part.accounts):
        yield f"cluster.account: {on} does not take {cluster.account!r}; it takes {listing(part.accounts)}"
    names = _qos_names(config)
    if part.qos and names and all(_is_missing(name, part.qos) for name in names):
        yield f"cluster.qos: {on} does not take {cluster.qos!r}; it takes {listing(part.qos)}"


def _qos_names(config: JobConfig) -> list[str]:
    """Return the QOS that the job may have. Since Slurm 24.11 that may be several, of which it gets one."""
    return config.cluster.qos.split(",") if config.cluster.qos else []


def _is_missing(name: str, names: Iterable[str]) -> bool:
    """True if the account or QOS is not listed. Slurm ignores the case of their names."""
    return name.lower() not in [other.lower() for other in names]


def _account_problems(config: JobConfig, profile: SiteProfile) -> Iterator[str]:
    cluster = config.cluster
    accounts = list(dict.fromkeys(record.account for record in profile.associations))
    if cluster.account and accounts and _is_missing(cluster.account, accounts):
        hint = nearest(cluster.account, accounts)
        yield f"cluster.account: you have no account {cluster.account!r}; {hint}yours: {listing(accounts)}"
    names = [record.name for record in profile.qos]
    for name in _qos_names(config) if names else ():
        if _is_missing(name, names):
            yield f"cluster.qos: there is no {name!r}; {nearest(name, names)}there are: {listing(names)}"


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept from other jobs for a time."""

    name: str
    start: float
    end: float
    nodes: frozenset[str]


def holding_back(cluster: ClusterConfig) -> str:
    """Return which reservation leaves too few nodes for a job that starts now, with the time limit that would fit.

    Empty where none does, or Slurm does not answer, and for a job that names its reservation.
    """
    if "reservation" in cluster.extra:
        return ""
    nodes = cluster.nodes + cluster.spare_nodes
    return _holding_back(cluster.partition, nodes, cluster.time_min, cluster.signal_delay_s, int(time.time() // 60))


@lru_cache(maxsize=16)  # a sweep checks its points one by one
def _holding_back(partition: str | None, nodes: int, time_min: int, signal_delay_s: int, minute: int) -> str:
    slurm, now = Slurm(), time.time()
    try:
        near = [each for each in _reservations(slurm) if now < each.end and each.start < now + time_min * 60]
        there = _nodes_of(partition, slurm) if near else frozenset()
    except (SlurmError, RequestError, ValueError):
        return ""
    reserved = there.intersection(chain.from_iterable(each.nodes for each in near))
    if len(there - reserved) >= nodes or nodes > len(there):
        return ""
    first = min(near, key=lambda each: each.start)
    begin, end = (time.strftime("%a %H:%M", time.localtime(at)) for at in (first.start, first.end))
    begins = f"begins in {in_units(first.start - now)}, {begin}," if first.start > now else f"has begun, {begin},"
    fits_min = int((first.start - now) // 60) - 1
    advice = ""
    if fits_min * 60 > signal_delay_s:
        advice = (
            f"; with cluster.time_min={fits_min} it can start before, and a run that is not done then goes on later"
        )
    return (
        f"the reservation {first.name} {begins} on {len(reserved)} of the {len(there)} nodes here: a job of {time_min} "
        f"min waits for its end, {end}{advice}"
    )


def _reservations(slurm: Slurm) -> Iterator[Reservation]:
    for block in re.split(r"\n\s*\n", slurm.ask(["scontrol", "show", "reservation"])):
        pairs = dict(re.findall(r"(\w+)=(\S*)", block))
        if pairs.get("Nodes", "(null)") != "(null)":
            start, end = float(pairs["StartTime"]), float(pairs["EndTime"])  # see plain_environment
            yield Reservation(pairs["ReservationName"], start, end, frozenset(hostlist.expand(pairs["Nodes"])))


def _nodes_of(partition: str | None, slurm: Slurm) -> frozenset[str]:
    """Return the nodes of these partitions, or of the default one, that can be used."""
    rows = slurm.ask(["sinfo", "--all", "--noheader", "--responding", "--format=%P|%N"]).split()
    nodes = set[str]()
    for name, _, names in (row.partition("|") for row in rows):
        if name.rstrip("*") in partition.split(",") if partition else name.endswith("*"):
            nodes |= {*hostlist.expand(names)}
    return frozenset(nodes)
