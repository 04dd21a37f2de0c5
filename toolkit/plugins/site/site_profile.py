"""The site profile: what `toolkit doctor` has read and proven of a cluster.

It is a dated file of the user, and lies beside the site's defaults (``$TOOLKIT_SITE``, else ``~/.config/toolkit``). A
profile that is damaged, old or of another cluster is named in the log, and never the reason that something fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from toolkit.base import fsio, logs
from toolkit.base.errors import SlurmError
from toolkit.files.json_record import FileRecord, JsonRecord
from toolkit.files.run_files import Time
from toolkit.slurm.commands import Slurm

#: After this time a profile only warns: sites change their limits.
OLD_S = 30 * 86_400.0
FILE_NAME = "site-profile.json"

log = logs.get(__name__)


@dataclass(frozen=True)
class PartitionRecord(JsonRecord):
    """A partition. None: no limit. Sizes are of one node, of the kind that most of its nodes are."""

    name: str
    is_default: bool = False
    is_up: bool = True
    nodes: int = 0
    max_nodes: int | None = None
    time_limit_s: float | None = None
    default_time_s: float | None = None
    cpus: int = 0
    memory_mb: int = 0
    gpus: int = 0
    gpu_type: str | None = None
    tier: int = 1  #: with preempt/partition_prio, jobs of a higher tier preempt those of lower ones
    preempt_mode: str = "OFF"
    grace_s: float = 0.0
    accounts: tuple[str, ...] = ()  #: that may use it; empty: all
    qos: tuple[str, ...] = ()  #: that may be used with it; empty: all


@dataclass(frozen=True)
class AssociationRecord(JsonRecord):
    """An account that this user may use, perhaps on one partition only."""

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    max_jobs: int | None = None
    max_submit: int | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class QosRecord(JsonRecord):
    """A quality of service, with its limits for one user."""

    name: str
    time_limit_s: float | None = None
    preempt_mode: str | None = None  #: None: the cluster's
    grace_s: float = 0.0
    max_resources: str | None = None  #: such as ``gres/gpu=8``
    max_submit: int | None = None
    flags: tuple[str, ...] = ()  #: such as ``PartitionTimeLimit``: the partition's time limit does not hold


@dataclass(frozen=True)
class Proof(JsonRecord):
    """Something that a job has tried out. ``is_proven`` is None where it could not be tried."""

    name: str
    is_proven: bool | None = None
    text: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteProfile(FileRecord):
    """A cluster as one user sees it."""

    made: Time
    cluster: str
    user: str = ""
    slurm: str = ""  #: version
    can_requeue: bool = True  #: by default: ``JobRequeue``
    requeue_delay_s: float = 121.0  #: before a requeued job may start again
    expedites: bool = False  #: whether jobs may ask for ``--requeue=expedite``
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"
    kill_wait_s: float = 30.0
    max_array_size: int = 1001  #: an array's indices are below it; 0 where the site has no arrays
    max_jobs: int = 10_000  #: of all users together
    enforces_limits: bool = False  #: refuses a job that is over its partition's limits, instead of holding it for ever
    proctrack: str = ""
    task_plugins: str = ""
    cgroup: str | None = None  #: cgroup plugin, with what it constrains
    mpi_plugins: tuple[str, ...] = ()
    mpi_default: str = "none"
    accounting: str = "off"  #: on, off, or why it could not be asked
    default_account: str | None = None
    partitions: tuple[PartitionRecord, ...] = ()
    associations: tuple[AssociationRecord, ...] = ()
    qos: tuple[QosRecord, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  #: of the user's environment, by program
    proofs: tuple[Proof, ...] = ()
    proven: Time | None = None  #: when the proofs were made
    notes: tuple[str, ...] = ()  #: what could not be read, and why

    @property
    def age_s(self) -> float:
        """Return the seconds since it was made."""
        return max(0.0, time.time() - self.made)

    @property
    def is_old(self) -> bool:
        """True if the site may have changed since."""
        return self.age_s > OLD_S

    def partition(self, name: str | None) -> PartitionRecord | None:
        """Return the partition of this name. Without a name return the default one, None where there is none."""
        return next((p for p in self.partitions if (p.name == name if name else p.is_default)), None)

    def preemption(self, partition: PartitionRecord) -> str | None:
        """Return what a preemption does to a job of ``partition``, in Slurm's word. None where there is none."""
        if self.preempt_type == "preempt/none":
            return None
        if self.preempt_type == "preempt/partition_prio" and partition.tier == max(p.tier for p in self.partitions):
            return None
        mode = partition.preempt_mode if self.preempt_type == "preempt/partition_prio" else self.preempt_mode
        return None if mode == "OFF" else mode


def date(moment: float) -> str:
    """Return a profile's time as text, in local time."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M")


def folders() -> list[Path]:
    """Return the folders that may hold the profile, the site file's own first."""
    named = os.environ.get("TOOLKIT_SITE")
    own = fsio.expand("~/.config/toolkit")
    return [Path(named).absolute().parent, own] if named else [own]


def write(profile: SiteProfile) -> Path:
    """Write the profile and return its path. Raises OSError where no folder takes it."""
    *others, own = folders()
    for folder in others:
        try:
            return _write(folder, profile)
        except OSError as error:  # such as a site file that all users share
            log.info("%s cannot be written (%s): the profile goes to %s", folder, error.strerror, own)
    return _write(own, profile)


def _write(folder: Path, profile: SiteProfile) -> Path:
    fsio.make_dir(folder, parents=2)
    fsio.write_json(folder / FILE_NAME, profile.to_file())
    return folder / FILE_NAME


def read() -> tuple[SiteProfile, Path] | None:
    """Return the newest profile and its path; None without one. A damaged one is named in the log."""
    found = []
    for folder in folders():
        path = folder / FILE_NAME
        try:
            profile = SiteProfile.read_or_none(path)
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror)
            continue
        if profile is not None:
            found.append((profile, path))
    return max(found, key=lambda pair: pair[0].made, default=None)


def of_cluster(cluster: str) -> SiteProfile | None:
    """Return the profile of this cluster; None without one. Old ones, and those of other clusters, are named."""
    found = read()
    if found is None:
        return None
    profile, path = found
    if profile.cluster != cluster:
        log.warning("%s is of the cluster %s, and this is %s: not used; %s", path, profile.cluster, cluster, _ANEW)
        return None
    if profile.is_old:
        log.warning("%s is %d days old; %s", path, profile.age_s // 86_400, _ANEW)
    return profile


_ANEW = "`toolkit doctor --site` reads the site anew"


def profile_here() -> SiteProfile | None:
    """Return the profile of the cluster that jobs are submitted to, if there is one."""
    # Slurm is asked only if there is a profile to compare its answer with.
    if read() is None:
        return None
    try:
        return of_cluster(cluster_name())
    except SlurmError as error:
        log.debug("the site profile is not used: %s", error)
        return None


@lru_cache(maxsize=1)
def cluster_name() -> str:
    """Return the cluster's name. Cached: a process may submit many jobs. Raises SlurmError."""
    return Slurm().settings().cluster


def expedites() -> bool | None:
    """True if jobs may ask for ``--requeue=expedite`` here. None where no profile tells, or an old one."""
    profile = profile_here()
    return None if profile is None or profile.is_old else profile.expedites


def preempt_modes(cluster: str, names: Sequence[str]) -> list[str]:
    """Return the preemption modes of these QOS: ``cluster`` for one without its own. Empty without a profile."""
    profile = of_cluster(cluster)
    return [qos.preempt_mode or "cluster" for qos in profile.qos if qos.name in names] if profile else []
