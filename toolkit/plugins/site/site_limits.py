"""What the site profile says of a config: Slurm would refuse the job, or hold it in the queue for ever."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from toolkit.base import logs
from toolkit.base.durations import in_units
from toolkit.base.errors import ConfigError, listing, nearest
from toolkit.config import JobConfig
from toolkit.plugins.site import site_profile
from toolkit.plugins.site.reservations import holding_back
from toolkit.plugins.site.site_profile import PartitionRecord, SiteProfile

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
