"""The first defaults of a site: a commented site.yaml. `toolkit init` makes it from the site profile."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.durations import in_units
from toolkit.base.errors import RequestError, listing, nearest
from toolkit.config import ClusterConfig
from toolkit.config.yaml_core import dump
from toolkit.plugins.site.site_profile import AssociationRecord, PartitionRecord, SiteProfile, date

#: Left for the checkpoint and the requeue beside the time that a preemption gives.
SIGNAL_DELAY_S = ClusterConfig().signal_delay_s


def site_path() -> Path:
    """Return the file of the site's defaults."""
    named = os.environ.get("TOOLKIT_SITE")
    return Path(named).absolute() if named else fsio.expand("~/.config/toolkit/site.yaml")


def write(text: str, *, force: bool) -> Path:
    """Write the site's file and return its path. Raises RequestError if there is one, without ``force``."""
    path = site_path()
    if os.path.lexists(path) and not force:
        raise RequestError(f"{path} is there already, and is kept; --force replaces it, --print only shows the new one")
    fsio.make_dir(path.parent, parents=2)
    fsio.write_atomic(path, text)
    return path


def text_of(profile: SiteProfile, partition: str | None) -> str:
    """Return the site's file for jobs on ``partition``, the default one if None. Raises RequestError."""
    known = [part.name for part in profile.partitions]
    part = profile.partition(partition)
    if part is None and partition is not None:
        hint = nearest(partition, known)
        raise RequestError(f"--partition: there is no {partition!r}; {hint}there are: {listing(known)}")
    if part is None and not known:
        raise RequestError(f"no partition could be read of the cluster {profile.cluster}: see `toolkit doctor --site`")
    if part is None:
        raise RequestError(f"--partition: this cluster has no default partition; name one of: {listing(known)}")
    account = _association(profile, part)
    return "\n".join([*_head(profile), "cluster:", *_cluster(profile, part, account), "", *_example(part), ""])


def _association(profile: SiteProfile, part: PartitionRecord) -> AssociationRecord | None:
    """Return the user's account for this partition: the default one, if the partition takes it."""
    usable = [
        record
        for record in profile.associations
        if record.partition in (None, part.name) and (not part.accounts or record.account in part.accounts)
    ]
    usable.sort(key=lambda record: record.account != profile.default_account)
    return usable[0] if usable else None


def _head(profile: SiteProfile) -> Iterator[str]:
    yield f"# Defaults of the cluster {profile.cluster}, for every job of yours: a job's own config and arguments win."
    yield f"# Made by `toolkit init` from what Slurm {profile.slurm} said on {date(profile.made)}. Edit it as you like."


def _cluster(profile: SiteProfile, part: PartitionRecord, account: AssociationRecord | None) -> Iterator[str]:
    others = [other.name for other in profile.partitions if other is not part]
    yield from _line("partition", part.name, f"others: {listing(others)}" if others else "the only one")
    # Accounts and QOS are named only where Slurm knows them.
    if account is not None:
        yours = [each for each in dict.fromkeys(r.account for r in profile.associations) if each != account.account]
        yield from _line("account", account.account, f"others: {listing(yours)}" if yours else "your only one")
        qos = account.default_qos or (account.qos[0] if len(account.qos) == 1 else None)
        if qos is not None and (not part.qos or qos in part.qos):
            more = [name for name in account.qos if name != qos]
            yield from _line("qos", qos, f"others: {listing(more)}" if more else "your only one")
    else:
        reason = "Slurm lists none for you" if profile.accounting == "on" else f"accounting is {profile.accounting}"
        yield f"  # account, qos: {reason}"
    # The time: the partition's limit, or that of the account.
    limits = [part.time_limit_s, account.time_limit_s if account else None]
    limit_s = min((limit for limit in limits if limit is not None), default=None)
    if limit_s is None:
        yield f"  # time_min: no limit on {part.name}; a job without the key asks for {ClusterConfig().time_min} min"
    else:
        usual_min = math.floor(min(part.default_time_s or limit_s, limit_s) / 60)
        yield from _line("time_min", max(1, usual_min), f"the limit is {in_units(limit_s)}; runs go on after it")
    after = f"a requeued job may start {profile.requeue_delay_s:.0f} s later"
    yield from _line("signal_delay_s", SIGNAL_DELAY_S, f"a checkpoint is saved so long before the limit; {after}")


def _example(part: PartitionRecord) -> Iterator[str]:
    """Yield, as a comment, a config of a job that takes whole nodes. Sizes belong into the config of each job."""
    memory = f", {part.memory_mb / 1024:.0f} GiB" if part.memory_mb else ""
    gpus = f", {part.gpus} GPUs {part.gpu_type or ''}".rstrip() if part.gpus else ""
    yield f"# A job on whole nodes of {part.name} ({part.cpus} CPUs{memory}{gpus}) has in its own config:"
    ranks = part.gpus or 1
    sizes = {"nodes": 1, "tasks_per_node": ranks, "cpus_per_task": max(1, part.cpus // ranks)}
    if part.gpus:
        sizes["gpus_per_node"] = part.gpus
    yield "#"
    yield "# cluster:"
    yield from (f"#   {key}: {value}" for key, value in sizes.items())
    if part.gpu_type:
        yield f"#   gpu_type: {_text(part.gpu_type)}"


def _line(key: str, value: object, comment: str) -> Iterator[str]:
    yield f"  # {comment}"
    yield f"  {key}: {_text(value)}"


def _text(value: object) -> str:
    """Return a value as YAML writes it: an account 0755 needs quotes."""
    return dump(value).split("\n")[0]
