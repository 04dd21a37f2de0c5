"""Slurm's reasons for a job to wait, in words. The names are those of squeue(1), JOB REASON CODES, 22.05 to 25.11."""

from __future__ import annotations

import re
import time

_WORDS = {
    "Priority": "jobs with a higher priority come first",
    "Resources": "waits for free nodes",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that did not end as it must: it never starts",
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


def in_words(reason: str) -> str:
    """Return what a job waits for, with Slurm's own name behind it.

    A reason that is not known here, as of a newer Slurm, is returned as it is.
    """
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
