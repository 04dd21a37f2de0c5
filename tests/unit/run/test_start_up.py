"""Where the time of a start went.

First hand-written marks on an axis, then the same through the journal and the commands.
"""

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.files.run_files import AttemptStart, RunProgress
from toolkit.metrics.goodput import of_attempt as ledger_of
from toolkit.metrics.start_up import PARTS, of_attempt, sentence

IN_RANK = {"program": 0.5, "group": 0.25, "data": 1.0, "resume": 0.75, "first_step": 0.125}


def started(**marks: float) -> AttemptStart:
    return AttemptStart(100.0, 100.0, 7.0, 107.0, 0, marks=marks)


@pytest.mark.parametrize(
    ("marks", "began", "expected"),
    [
        # One after the other: each part is the distance of two marks.
        (
            {"prepared": 108.0, "connected": 108.5, "imported": 111.5},
            110.0,
            {"supervisor": 1.0, "agents": 0.5, "checks": 1.5, "imports": 1.5, "ranks": 1.0},
        ),
        # Imports that end beside the checks cost nothing.
        (
            {"prepared": 108.0, "connected": 108.5, "imported": 109.0},
            110.0,
            {"supervisor": 1.0, "agents": 0.5, "checks": 1.5, "imports": 0.0, "ranks": 2.5},
        ),
        # Without checks the attempt begins before its agents are there.
        (
            {"prepared": 108.0, "connected": 109.5, "imported": 112.0},
            108.25,
            {"supervisor": 1.0, "agents": 1.5, "checks": 0.0, "imports": 2.5, "ranks": 0.5},
        ),
        # A restart within the job has what it needs.
        (
            {"prepared": 50.0, "connected": 51.0, "imported": 53.0},
            107.0,
            {"supervisor": 0.0, "agents": 0.0, "checks": 0.0, "imports": 0.0, "ranks": 5.5},
        ),
        ({}, 107.5, {"supervisor": 0.0, "agents": 0.0, "checks": 0.5, "imports": 0.0, "ranks": 5.0}),
    ],
)
def test_each_part_is_the_time_between_its_marks(
    marks: dict[str, float], began: float, expected: dict[str, float]
) -> None:
    parts = of_attempt(started(**marks), began, 115.0, RunProgress(start_up=IN_RANK), 2.0)
    assert parts == {"submit": 2.0, "queue": 7.0, **IN_RANK, **expected}
    assert sum(parts.values()) == 2.0 + 15.0 + 0.125


MOMENTS = st.none() | st.floats(90.0, 130.0)


@given(MOMENTS, MOMENTS, MOMENTS, st.floats(90.0, 130.0), st.floats(90.0, 130.0), st.floats(0.0, 50.0))
def test_the_parts_sum_to_the_whole_and_to_the_start_up_of_the_time_spent(
    prepared: float | None,
    connected: float | None,
    imported: float | None,
    began: float,
    first_step: float,
    group_s: float,
) -> None:
    marks = {"prepared": prepared, "connected": connected, "imported": imported}
    start = started(**{name: moment for name, moment in marks.items() if moment is not None})
    progress = RunProgress(start_up={"group": group_s})
    parts = of_attempt(start, began, first_step, progress)
    assert tuple(parts) == PARTS
    assert min(parts.values()) >= 0.0
    start_up_s = sum(parts.values()) - parts["queue"]
    assert start_up_s == pytest.approx(max(0.0, first_step - 107.0))
    until = max(first_step, 107.0)
    assert start_up_s == pytest.approx(ledger_of(start, first_step, progress, until)["start_up"])


def test_nothing_is_told_before_the_first_step() -> None:
    assert of_attempt(started(), 108.0, None, RunProgress()) == {}
    assert sentence({}) == ""


CHILD = """
import json, time
time.sleep(0.3)
from toolkit.ranks.session import StartUp
parts = StartUp()
time.sleep(0.2)
parts.end("group")
time.sleep(0.1)
parts.end("data")
print(json.dumps(parts.parts))
"""


def test_a_rank_counts_its_parts_from_the_start_of_its_process() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    lived_s = time.monotonic() - began
    parts = json.loads(done.stdout)
    assert list(parts) == ["program", "group", "data"]
    assert 0.3 <= parts["program"] <= lived_s
    assert parts["group"] >= 0.2
    assert parts["data"] >= 0.1
    assert sum(parts.values()) <= lived_s + 0.02
