"""The states of squeue(1). As Debian's manual pages of Slurm 22.05 list them, and the newer ones."""

from __future__ import annotations

import pytest

from toolkit.slurm import states
from toolkit.slurm.states import Phase, canonical, is_over, phase

MANUAL = """
BF BOOT_FAIL, CA CANCELLED, CD COMPLETED, CF CONFIGURING, CG COMPLETING, DL DEADLINE, F FAILED, NF NODE_FAIL,
OOM OUT_OF_MEMORY, PD PENDING, PR PREEMPTED, R RUNNING, RD RESV_DEL_HOLD, RF REQUEUE_FED, RH REQUEUE_HOLD, RQ REQUEUED,
RS RESIZING, RV REVOKED, SI SIGNALING, SE SPECIAL_EXIT, SO STAGE_OUT, ST STOPPED, S SUSPENDED, TO TIMEOUT
"""
CODES = dict(entry.split() for entry in MANUAL.split(","))

UNFINISHED = [
    "CONFIGURING",
    "COMPLETING",
    "SUSPENDED",
    "RESIZING",
    "REQUEUED",
    "SIGNALING",
    "STAGE_OUT",
    "SPECIAL_EXIT",
    "STOPPED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESV_DEL_HOLD",
    "PENDING",
    "RUNNING",
    "POWER_UP_NODE",
    "LAUNCH_FAILED",
    "RECONFIG_FAIL",
    "REVOKED",
]


@pytest.mark.parametrize(("code", "state"), CODES.items())
def test_every_state_of_the_manual_is_classed_by_name_and_by_code(code: str, state: str) -> None:
    assert phase(state) is phase(code) is not Phase.UNKNOWN
    assert canonical(code) == state


@pytest.mark.parametrize("state", UNFINISHED)
def test_an_unfinished_state_is_never_taken_for_the_end(state: str) -> None:
    assert not is_over(state)


@pytest.mark.parametrize("state", sorted(set(CODES.values()) - set(UNFINISHED)))
def test_an_end_is_an_end(state: str) -> None:
    assert is_over(state)


@pytest.mark.parametrize("state", ["CANCELLED by 1000", "CANCELLED+", "CANCELLED", "cancelled", "CA"])
def test_the_spellings_of_cancelled_are_one_state(state: str) -> None:
    assert canonical(state) == "CANCELLED"
    assert phase(state) is Phase.ENDED_BADLY


@pytest.mark.parametrize("state", [None, "", "?", "A_STATE_OF_2031"])
def test_an_unknown_state_is_never_over(state: str | None) -> None:
    assert phase(state) is Phase.UNKNOWN
    assert not is_over(state)


def test_codes_are_distinct() -> None:
    codes = [code for code, _ in states._STATES.values() if code]
    assert len(set(codes)) == len(codes) == len(CODES)
