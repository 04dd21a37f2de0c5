"""Reads a cluster as one user sees it: its settings, partitions, accounts and QOS, as far as a normal user may.

It takes a handful of calls, none of them per job or node. What cannot be read is a note, and never an error: accounting
may be off, sacctmgr missing or denied.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from toolkit.base.durations import parse_slurms
from toolkit.base.errors import SlurmError
from toolkit.slurm.commands import Slurm, settings_in


@dataclass(frozen=True)
class PartitionRecord:
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
class AssociationRecord:
    """An account that this user may use, perhaps on one partition only."""

    account: str
    partition: str | None = None
    qos: tuple[str, ...] = ()
    default_qos: str | None = None
    max_jobs: int | None = None
    max_submit: int | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class QosRecord:
    """A quality of service, with its limits for one user."""

    name: str
    time_limit_s: float | None = None
    preempt_mode: str | None = None  #: None: the cluster's
    grace_s: float = 0.0
    max_resources: str | None = None  #: such as ``gres/gpu=8``
    max_submit: int | None = None


@dataclass(frozen=True)
class SiteProfile:
    """A cluster as one user sees it."""

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
    notes: tuple[str, ...] = ()  #: what could not be read, and why

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


#: What the toolkit calls.
USED = ("scontrol", "sbatch", "srun", "squeue", "scancel", "sinfo")
#: Slurm's own default of ``cred_expire``. A requeued job may start one second after it.
CRED_EXPIRE_S = 120.0

Answer = TypeVar("Answer")


def read_site(slurm: Slurm) -> SiteProfile:
    """Return the cluster as this user sees it. Raises SlurmError where the controller does not answer.

    What else cannot be read is left out, with a note.
    """
    notes = [f"{name} is not on PATH" for name in USED if not slurm.has(name)]

    def attempt(what: str, read: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return read()
        except SlurmError as error:
            notes.append(f"{what} cannot be read: {str(error).splitlines()[0]}")
            return otherwise

    profile = _of_config(slurm.ask(["scontrol", "show", "config"]))
    no_parts: tuple[PartitionRecord, ...] = ()
    no_plugins: tuple[str, ...] = ()
    shapes = attempt("the nodes' sizes", lambda: _shapes(slurm.ask(_SINFO)), dict[str, dict[str, Any]]())
    parts = attempt("the partitions", lambda: _partitions(slurm.ask(_SCONTROL)), no_parts)
    plugins = attempt("srun's MPI plugins", lambda: _mpi_plugins(slurm.ask(["srun", "--mpi=list"])), no_plugins)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    profile = replace(
        profile,
        user=user,
        expedites=profile.expedites and attempt("sbatch's options", slurm.expedites, False),
        mpi_plugins=plugins,
        partitions=tuple(replace(part, **shapes.get(part.name, {})) for part in parts),
    )
    if profile.accounting != "off":
        # The first failure is enough: each call would wait for the same database.
        try:
            profile = replace(profile, **_of_accounting(slurm, user))
        except SlurmError as error:
            first = str(error).splitlines()
            reason = first[1].strip() if len(first) > 1 else first[0]
            notes.append(f"accounts and QOS cannot be read: {reason}")
            profile = replace(profile, accounting=f"no answer: {reason}")
    return replace(profile, notes=tuple(notes))


# ------------------------------------------------------------------------------------------------------- slurm.conf


def _of_config(text: str) -> SiteProfile:
    """Return what `scontrol show config` says."""
    pairs: dict[str, str] = {}
    for name, value in re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE):
        pairs.setdefault(name, "" if value == "(null)" else value)
    settings = settings_in(text)
    expire = re.search(r"cred_expire=(\d+)", pairs.get("AuthInfo", ""))
    delay = re.search(r"requeue_delay=(\d+)", pairs.get("SchedulerParameters", ""))  # since 25.11
    plugin = pairs.get("CgroupPlugin")
    if plugin in (None, "", "disabled"):
        cgroup = None
    else:
        kinds = ("Cores", "Devices", "RAMSpace", "SwapSpace")
        limits = [kind for kind in kinds if pairs.get(f"Constrain{kind}", "").lower() == "yes"]
        cgroup = f"{plugin}, constrains {', '.join(limits)}" if limits else plugin
    return SiteProfile(
        cluster=settings.cluster,
        slurm=pairs.get("SLURM_VERSION", ""),
        can_requeue=pairs.get("JobRequeue", "1") != "0",
        requeue_delay_s=float(delay[1]) if delay else (float(expire[1]) if expire else CRED_EXPIRE_S) + 1,
        expedites=settings.expedites,
        preempt_type=settings.preempt_type,
        preempt_mode=settings.preempt_mode,
        kill_wait_s=settings.kill_wait_s,
        max_array_size=settings.max_array_size,
        max_jobs=_number(pairs.get("MaxJobCount")) or 10_000,
        enforces_limits=pairs.get("EnforcePartLimits", "NO").upper() not in ("NO", ""),
        proctrack=pairs.get("ProctrackType", ""),
        task_plugins=settings.task_plugins,
        cgroup=cgroup,
        mpi_default=settings.mpi_default,
        accounting="on" if pairs.get("AccountingStorageType", "").endswith("slurmdbd") else "off",
    )


def _number(text: str | None) -> int | None:
    """Return the number that a text begins with; None for UNLIMITED, N/A and the like."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


# ------------------------------------------------------------------------------------------- partitions and plugins


def _partitions(text: str) -> tuple[PartitionRecord, ...]:
    """Return what `scontrol show partition` says."""
    records = []
    for block in re.split(r"\n\s*\n", text):
        # A value ends at a space, and may contain further ``=``: ``TRES=cpu=64,node=2``.
        pairs = dict(re.findall(r"([A-Za-z]\w*)=(\S*)", block))
        if not pairs.get("PartitionName"):
            continue
        records.append(
            PartitionRecord(
                name=pairs["PartitionName"],
                is_default=pairs.get("Default") == "YES",
                is_up=pairs.get("State", "UP") == "UP",
                nodes=_number(pairs.get("TotalNodes")) or 0,
                max_nodes=_number(pairs.get("MaxNodes")),
                time_limit_s=parse_slurms(pairs.get("MaxTime")),
                default_time_s=parse_slurms(pairs.get("DefaultTime")),
                tier=_number(pairs.get("PriorityTier")) or 1,
                preempt_mode=pairs.get("PreemptMode", "OFF"),
                grace_s=float(_number(pairs.get("GraceTime")) or 0),
                accounts=_names(pairs.get("AllowAccounts")),
                qos=_names(pairs.get("AllowQos")),
            )
        )
    return tuple(records)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text in (None, "", "ALL", "N/A", "(null)") else tuple(str(text).split(","))


#: With hidden partitions: jobs may be submitted to them, too.
_SCONTROL = ("scontrol", "--all", "show", "partition")
_SINFO = ("sinfo", "--all", "--noheader", "--format=%R|%D|%c|%m|%G")
_GPU = re.compile(r"gpu(?::([^:,()]+))?:(\d+)")


def _shapes(text: str) -> dict[str, dict[str, Any]]:
    """Return by partition the fields of its record about its nodes' size. The kind with the most nodes counts."""
    most: dict[str, int] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) != 5:
            continue
        name, count = columns[0], _number(columns[1]) or 0
        # A partition with different kinds of nodes has a line for each kind.
        if count > most.get(name, 0):
            most[name] = count
            gpu = _GPU.search(columns[4])
            shapes[name] = {
                "cpus": _number(columns[2]) or 0,
                "memory_mb": _number(columns[3]) or 0,
                "gpus": int(gpu[2]) if gpu else 0,
                "gpu_type": gpu[1] if gpu else None,
            }
    return shapes


def _mpi_plugins(text: str) -> tuple[str, ...]:
    names = re.findall(r"^\s+([a-z]\w*)\s*$", text, re.MULTILINE)
    versions = re.findall(r"\bpmix_v\d+\b", text)
    return tuple(dict.fromkeys([*sorted(set(names) - {"none"}), *versions]))


# ---------------------------------------------------------------------------------------------------------- sacctmgr

_ASSOCIATION = ("Account", "Partition", "QOS", "DefaultQOS", "MaxJobs", "MaxSubmitJobs", "MaxWall")
_QOS = ("Name", "MaxWall", "PreemptMode", "GraceTime", "MaxTRESPU", "MaxSubmitJobsPerUser")


def _of_accounting(slurm: Slurm, user: str) -> dict[str, Any]:
    """Return the fields of the profile that accounting knows."""

    def table(what: str, columns: Sequence[str], *where: str) -> list[list[str]]:
        wide = f"format={','.join(columns)}"
        text = slurm.ask(["sacctmgr", "--noheader", "--parsable2", "show", what, *where, wide])
        rows = [line.split("|") for line in text.splitlines()]
        return [row for row in rows if len(row) == len(columns)]

    associations = [
        AssociationRecord(
            account=account,
            partition=partition or None,
            qos=tuple(filter(None, qos.split(","))),
            default_qos=default_qos or None,
            max_jobs=_number(jobs),
            max_submit=_number(submit),
            time_limit_s=parse_slurms(wall),
        )
        for account, partition, qos, default_qos, jobs, submit, wall in table(
            "associations", _ASSOCIATION, f"user={user}"
        )
    ]
    default = next((row[0] for row in table("user", ("DefaultAccount",), f"user={user}") if row[0]), None)
    qos_records = [
        QosRecord(
            name=name,
            time_limit_s=parse_slurms(wall),
            preempt_mode=None if mode in ("", "cluster") else mode,
            grace_s=parse_slurms(grace) or 0.0,
            max_resources=resources or None,
            max_submit=_number(submit),
        )
        for name, wall, mode, grace, resources, submit in table("qos", _QOS)
    ]
    return {"associations": tuple(associations), "default_account": default, "qos": tuple(qos_records)}
