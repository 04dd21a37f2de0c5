"""Classifies the states of a Slurm job by one question: can the job still run?

Source: the JOB STATE CODES of squeue(1) and sacct(1), 22.05 to 24.11. Several states look like an end and are none
(COMPLETING, REQUEUED, SPECIAL_EXIT): a job that is taken for finished too early gets resubmitted beside itself.
"""

from __future__ import annotations

from enum import Enum


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
    "REVOKED": ("RV", Phase.ENDED_BADLY),
    "TIMEOUT": ("TO", Phase.ENDED_BADLY),
}
_CODES = {code: state for state, (code, _) in _STATES.items() if code}


def canonical(state: str) -> str:
    """Return the long form of ``state``: ``CANCELLED by 1000``, ``CANCELLED+`` and ``CA`` are all ``CANCELLED``."""
    words = state.split()
    word = words[0].rstrip("+").upper() if words else ""
    return _CODES.get(word, word)


def phase(state: str | None) -> Phase:
    """Return the phase of a state as any of Slurm's programs prints it. ``None`` (no answer) is `Phase.UNKNOWN`."""
    known = _STATES.get(canonical(state or ""))
    return known[1] if known else Phase.UNKNOWN


def is_over(state: str | None) -> bool:
    """True if a job in ``state`` has ended for good. An unknown state is never over."""
    return phase(state) in (Phase.ENDED_WELL, Phase.ENDED_BADLY)
