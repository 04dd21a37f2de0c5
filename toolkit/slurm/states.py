"""Classifies the states of a Slurm job by one question, can the job still run, and says in words why it waits.

Source: the JOB STATE CODES and JOB REASON CODES of squeue(1) and sacct(1), 22.05 to 25.11. Several states look like an
end and are none (COMPLETING, REQUEUED, SPECIAL_EXIT): a job that is taken for finished too early gets resubmitted
beside itself.
"""

from __future__ import annotations

import re
import time
from enum import Enum
from functools import lru_cache


class Phase(Enum):
    """What a state means for a program that waits for the job."""

    PENDING = "pending"  #: not running, will run (or is held)
    RUNNING = "running"  #: holds nodes, in any way
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    UNKNOWN = "unknown"  #: a state newer than this table, or no answer: never taken for an end


_STATES: dict[str, tuple[str, Phase]] = {
    # state: (compact code or "", phase)
    "PENDING": ("PD", Phase.PENDING),
    "CONFIGURING": ("CF", Phase.PENDING),
    "REQUEUED": ("RQ", Phase.PENDING),
    "REQUEUE_FED": ("RF", Phase.PENDING),
    "REQUEUE_HOLD": ("RH", Phase.PENDING),
    "RESV_DEL_HOLD": ("RD", Phase.PENDING),
    "SPECIAL_EXIT": ("SE", Phase.PENDING),
    # Flags of newer releases, not in the manual, on jobs that Slurm requeues or holds (``_launch_job_fail`` in slurmd).
    "EXPEDITING": ("", Phase.PENDING),
    "LAUNCH_FAILED": ("", Phase.PENDING),
    "POWER_UP_NODE": ("", Phase.PENDING),
    "RECONFIG_FAIL": ("", Phase.PENDING),
    "RUNNING": ("R", Phase.RUNNING),
    "COMPLETING": ("CG", Phase.RUNNING),
    "RESIZING": ("RS", Phase.RUNNING),
    "SIGNALING": ("SI", Phase.RUNNING),
    "STAGE_OUT": ("SO", Phase.RUNNING),
    "REVOKED": ("RV", Phase.RUNNING),  #: another cluster of the federation has started it, and here nothing will run
    "STOPPED": ("ST", Phase.RUNNING),
    "SUSPENDED": ("S", Phase.RUNNING),
    "COMPLETED": ("CD", Phase.ENDED_WELL),
    "BOOT_FAIL": ("BF", Phase.ENDED_BADLY),
    "CANCELLED": ("CA", Phase.ENDED_BADLY),
    "DEADLINE": ("DL", Phase.ENDED_BADLY),
    "FAILED": ("F", Phase.ENDED_BADLY),
    "NODE_FAIL": ("NF", Phase.ENDED_BADLY),
    "OUT_OF_MEMORY": ("OOM", Phase.ENDED_BADLY),
    "PREEMPTED": ("PR", Phase.ENDED_BADLY),
    "TIMEOUT": ("TO", Phase.ENDED_BADLY),
}
#: The states of a job whose processes are stopped, with what continues them; it may name the job.
PAUSED = {"SUSPENDED": "when Slurm resumes it", "STOPPED": "after `scancel --signal=CONT {}`"}
_CODES = {code: state for state, (code, _) in _STATES.items() if code}


def canonical(state: str) -> str:
    """Return the long form of ``state``: ``CANCELLED by 1000``, ``CANCELLED+`` and ``CA`` are all ``CANCELLED``."""
    words = state.split()
    word = words[0].rstrip("+").upper() if words else ""
    return _CODES.get(word, word)


@lru_cache(maxsize=128)
def phase(state: str | None) -> Phase:
    """Return the phase of a state as any of Slurm's programs prints it. ``None`` (no answer) is `Phase.UNKNOWN`."""
    known = _STATES.get(canonical(state or ""))
    return known[1] if known else Phase.UNKNOWN


def is_over(state: str | None) -> bool:
    """True if a job in ``state`` has ended for good. An unknown state is never over."""
    return phase(state) in (Phase.ENDED_WELL, Phase.ENDED_BADLY)


_WORDS = {
    "Priority": "jobs with a higher priority come first",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that did not end as required: it will never start",
    "BeginTime": "may not start before its begin time (after a requeue about two minutes)",
    "JobArrayTaskLimit": "as many elements of its array run as it allows",
    "JobHeldUser": "held by you or by a failed start",
    "JobHeldAdmin": "held by an administrator",
    "JobLaunchFailure": "its batch script could not be started",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation was deleted",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "Nodes": "the nodes that it needs are down, drained or reserved",  # required for job are DOWN, DRAINED or ...
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition takes no jobs at present",
    "PartitionInactive": "its partition starts no jobs at present",
    "PartitionConfig": "asks for more than its partition has or allows",
    "PartitionNodeLimit": "asks for more nodes than its partition allows",
    "PartitionTimeLimit": "asks for more time than its partition allows",
    "BadConstraints": "no node has what it asks for",
    "FrontEndDown": "the front-end node is down",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "Prolog": "the prolog runs on its nodes",
    "Cleaning": "its last start is being cleaned up",
    "Reconfig": "its nodes are being reconfigured",
    "NodesResuming": "its nodes are being switched on",
    "SchedDefer": "the scheduler is busy and looks at it later",
    "MaxRequeueExceeded": "was requeued as often as the site allows",
    "AccountingPolicy": "a limit of its account or QOS is reached",
    "QOSNotAllowed": "its QOS may not be used there",
    "QOSUsageThreshold": "your use of the QOS is above its threshold",
    "DeadLine": "cannot end before its deadline",
}
#: Reasons of a job that waits for a change of the site's settings, or of the request.
NEVER = frozenset(
    {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS"}
)
#: Limits, such as QOSMaxGRESPerUser and AssocGrpCPUMinutesLimit: who has it, of what, and counted how.
_LIMIT = re.compile(r"(QOS|Assoc|Association)(Grp|Max)(.*?)(Limit)?")
_OF = {"QOS": "its QOS", "Assoc": "its account", "Association": "its account"}
_WHAT = (
    ("GRES", "GPUs"),
    ("CPU", "CPUs"),
    ("Mem", "memory"),
    ("Node", "nodes"),
    ("Wall", "time"),
    ("Submit", "jobs in the queue"),
    ("Job", "jobs"),
    ("Billing", "billing"),
    ("Energy", "energy"),
    ("BB", "burst buffer"),
    ("License", "licences"),
)
#: What the minutes of a limit count: use over time, not at this moment.
_USE = ("RunMinutes", "Minutes")


@lru_cache(maxsize=128)
def describe_reason(reason: str) -> str:
    """Return what a job waits for, with Slurm's name behind it. An unknown reason is returned unchanged."""
    name = re.split(r"\W", reason)[0]  # details may follow: ReqNodeNotAvail, UnavailableNodes:node1
    if name in _WORDS:
        return f"{_WORDS[name]} ({reason})"
    match = _LIMIT.fullmatch(name)
    if match is None:
        return reason
    # A limit: whose, of what, and counted over which jobs.
    who, counted, what = _OF[match[1]], match[2], match[3]
    thing = next((words for part, words in _WHAT if part.lower() in what.lower()), "use")
    if what.endswith(_USE):
        thing += " over time"
    each = "each user" if "PerUser" in what else "each account" if "PerAccount" in what else ""
    one = "one job" if "PerJob" in what or "PerNode" in what else ""
    scope = each or one or ("everybody in it together" if counted == "Grp" else "")
    limit = f"a limit of {who} is reached: {thing}" + (f", of {scope}" if scope else "")
    return f"{limit} ({reason})"


def expected_start(start: float | None, now: float) -> str:
    """Return the local time at which a pending job is expected to start. Empty if it is unknown or past."""
    if start is None or start <= now:
        return ""
    form = "%H:%M" if start - now < 12 * 3600 else "%a %d %b %H:%M"
    return time.strftime(form, time.localtime(start))
