"""Where a run's time went. First the pure functions, then the supervisor and the commands that use them."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.run.test_supervisor import Ranks, ended, supervise
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.files.run_files import AttemptRecord, AttemptStart, RunProgress, RunResult, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.metrics.goodput import MEASURED, PARTS, Ledger, of_attempt, of_run, sentence
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import AllRanksEnded
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.journal import Journal
from toolkit.run.job.nodes import Nodes
from toolkit.slurm.jobs import JobRow

pytestmark = pytest.mark.usefixtures("quick")

SUBMITTED = 1_700_000_000.0


SECONDS = st.floats(0.0, 1e6)
STEPS = st.integers(0, 200)
#: What rank 0 says it has spent, and its first and last step.
REPORTS = st.builds(
    RunProgress, spent=st.fixed_dictionaries(dict.fromkeys(MEASURED, SECONDS)), step_start=STEPS, step=STEPS
)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[AttemptStart, float | None, RunProgress, float]:
    """Draw arguments of ``of_attempt``.

    The times are in order unless a clock was set back. Rank 0's seconds need not fit them.
    """
    queue_s, idle_s, start_up_s, loop_s = (draw(SECONDS) for _ in range(4))
    set_back_s = draw(st.sampled_from([0.0, 3600.0]))
    ready = SUBMITTED + queue_s + idle_s
    first_step = draw(st.sampled_from([None, ready + start_up_s - set_back_s]))
    start = AttemptStart(SUBMITTED, None, queue_s, ready, draw(STEPS))
    return start, first_step, draw(st.sampled_from([RunProgress(), draw(REPORTS)])), ready + start_up_s + loop_s


@settings(max_examples=100, deadline=None)
@given(attempts())
def test_the_parts_of_an_attempt_sum_to_its_time_and_none_is_negative(attempt: Any) -> None:
    start, _, _, until = attempt
    ledger = of_attempt(*attempt)
    assert tuple(ledger) == PARTS
    assert min(ledger.values()) >= 0.0
    assert sum(ledger.values()) == pytest.approx(until - start.since, abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(attempts(), max_size=6), st.lists(st.booleans(), min_size=6, max_size=6), st.floats(-1e5, 1e5))
def test_the_parts_of_a_run_sum_to_its_time_whatever_of_it_was_written_down(
    chain: list[Any], is_written: list[bool], gap_s: float
) -> None:
    """Some attempts have no ledger. After the last one ``gap_s`` pass, or a clock was set."""
    ledgers: list[dict[str, float]] = []
    now = SUBMITTED
    for written, attempt in zip(is_written, chain, strict=False):
        ledgers.append(goodput.as_json(of_attempt(*attempt)) if written else {})
        now += attempt[3] - attempt[0].since
    now = max(SUBMITTED, now + gap_s)
    ledger = of_run(ledgers, SUBMITTED, now)
    assert min(ledger.values()) >= 0.0
    assert sum(ledger.values()) == pytest.approx(now - SUBMITTED, abs=0.1)
    known = sum(each[part] for each in ledgers for part in PARTS[:-1] if each)
    assert ledger["idle"] == pytest.approx(max(0.0, now - SUBMITTED - known), abs=0.1)


def test_the_time_before_a_user_resumed_an_ended_run_is_not_the_runs() -> None:
    def line(number: int, submitted: float, ended: float, decision: str) -> AttemptRecord:
        return AttemptRecord(number, ("node1",), submitted + 1, ended, "crashed", decision, submitted=submitted)

    lines = [line(1, 5, 10, "requeue"), line(2, 15, 20, "give_up"), line(3, 3620, 3650, "finish")]
    assert goodput.ended_gap_s(lines) == 3600
    assert goodput.ended_gap_s(lines[:2], 50) == 30
    assert goodput.ended_gap_s(lines[:2]) == 0
    assert goodput.ended_gap_s([]) == 0


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 60), STEPS, st.floats(0.01, 9.0), st.floats(0.0, 9.0))
def test_replay_is_the_time_of_the_steps_that_were_made_again(
    first: int, count: int, best: int, step_s: float, wait_s: float
) -> None:
    again = len(set(range(first, first + count)) & set(range(best)))
    seconds = {"training": count * step_s, "data_wait": count * wait_s}
    report = RunProgress(spent=seconds, step_start=first, step=first + count)
    start = AttemptStart(SUBMITTED, None, 0.0, SUBMITTED, best)
    ledger = of_attempt(start, SUBMITTED, report, SUBMITTED + 1e4)
    assert ledger["replay"] == pytest.approx(again * (step_s + wait_s))
    assert ledger["training"] == pytest.approx((count - again) * step_s)
    assert ledger["data_wait"] == pytest.approx((count - again) * wait_s, abs=1e-9)


@pytest.mark.parametrize(
    ("first", "last", "saved", "saved_before", "gained_s"),
    [
        (None, None, 0, 0, 0.0),  # no step
        (0, 100, 0, 0, 0.0),  # nothing saved
        (0, 100, 80, 0, 80.0),
        (0, 90, 100, 0, 100.0),  # the last report is older than the checkpoint
        (50, 150, 120, 50, 70.0),
        (50, 150, 120, 90, 30.0),  # went on from an older one, as the newest was damaged
        (50, 150, 50, 90, 0.0),
        (120, 220, 120, 0, 0.0),  # the first attempt after a resume
        (100, 100, 100, 100, 0.0),
        (100, None, 110, 100, 100.0),
    ],
)
def test_an_attempts_gain_is_the_time_of_the_steps_that_it_was_first_to_save(
    first: int | None, last: int | None, saved: int, saved_before: int, gained_s: float
) -> None:
    seconds = spent(training=60.0, data_wait=30.0, checkpoint=10.0)
    report = RunProgress(step_start=first, step=last, spent=seconds)
    assert goodput.gained_s(report, saved, saved_before) == pytest.approx(gained_s)
    assert goodput.gained_s(report.replace(spent={}), saved, saved_before) == 0.0


def test_an_attempt_that_never_made_a_step_was_start_up_to_its_end() -> None:
    ledger = of_attempt(AttemptStart(100.0, 100.0, 5.0, 107.0, 0), None, RunProgress(), 110.0)
    assert {part: seconds for part, seconds in ledger.items() if seconds} == {
        "queue": 5.0,
        "start_up": 3.0,
        "idle": 2.0,
    }


HOUR = dict.fromkeys(PARTS, 0.0) | {"training": 3758.4, "start_up": 259.2, "replay": 172.8, "idle": 129.0, "queue": 0.6}


def test_the_time_is_told_in_one_sentence_with_the_largest_loss_first() -> None:
    told = sentence(HOUR)
    assert told == "87 % of 1 h 12 min was training; 6 % start-up, 4 % repeated steps, 3 % idle"


def test_of_a_run_that_measured_nothing_no_time_is_told() -> None:
    assert sentence(None) == ""
    assert sentence(dict.fromkeys(PARTS, 0.0) | {"start_up": 9.0}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (9.4, "9 s"), (59.6, "1 min"), (3600.0, "1 h"), (3725.0, "1 h 2 min"), (1e5, "1 d 3 h")],
)
def test_a_time_is_told_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert sentence(dict.fromkeys(PARTS, 0.0) | {"training": seconds}) == f"100 % of {text} was training"


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(MEASURED, 0.0) | seconds


def dies(ranks: Ranks) -> None:
    """Die after 100 steps in 0.2 s."""
    time.sleep(0.25)
    ranks.report(step=100, step_start=0, spent=spent(training=0.1, data_wait=0.1))
    ranks.events.put(ended(1))


def resumes(ranks: Ranks) -> None:
    """Continue from step 60, so that 40 of the 80 steps are repeated."""
    time.sleep(0.25)
    ranks.report(step=140, step_start=60, spent=spent(training=0.16, checkpoint=0.04))
    ranks.tell_result(140)
    ranks.events.put(AllRanksEnded(0))


def parts_of(goodput: Mapping[str, float]) -> Ledger:
    return {part: goodput[part] for part in PARTS}


def test_each_attempt_has_its_ledger_and_the_result_that_of_the_run(run: RunDir) -> None:
    submitted = time.time() - 3.0
    run.write_status(RunStatus.from_json({"state": "queued", "updated": submitted, "progress": {}}))
    assert supervise(run, Ranks(dies, resumes)) == 0
    first, second = run.attempts()
    assert first.submitted == pytest.approx(submitted, abs=1e-3)
    assert first.goodput["queue"] >= 3.0
    assert (first.goodput["training"], first.goodput["data_wait"], first.goodput["replay"]) == (0.1, 0.1, 0.0)
    assert first.goodput["start_up"] > 0.0
    assert (second.submitted, second.goodput["queue"]) == (None, 0.0)
    assert (second.goodput["training"], second.goodput["replay"]) == (0.08, 0.08)
    assert sum(parts_of(first.goodput).values()) == pytest.approx(first.ended - submitted, abs=0.01)
    # an attempt's ledger begins where the one before has ended
    since = first.ended
    assert sum(parts_of(second.goodput).values()) == pytest.approx(second.ended - since, abs=0.01)
    result = run.result()
    whole_s = sum(parts_of(result.goodput).values())
    assert second.ended - submitted - 0.01 <= whole_s <= time.time() - submitted + 0.01
    assert result.goodput["training"] == pytest.approx(0.18)
    assert result.goodput["ratio"] == pytest.approx(0.18 / sum(parts_of(result.goodput).values()), abs=1e-3)


def test_the_time_in_which_no_supervisor_was_there_is_idle(run: RunDir) -> None:
    """The supervisor was killed 100 s ago, in the middle of attempt 1.

    That was 20 s after the submission, and it could write nothing.
    """
    died = time.time() - 100.0
    told = goodput.as_json(
        of_attempt(AttemptStart(died - 20, died - 20, 2.0, died - 18, 0), died - 10, GOOD_REPORT, died)
    )
    left = {"state": "running", "attempt": 1, "nodes": ["here"], "tasks": [4], "started": died - 18, "updated": died}
    run.write_status(
        RunStatus.from_json(
            {**left, "progress": GOOD_REPORT.to_json(), "submitted": died - 20, "goodput": told, "stop": None}
        )
    )
    assert supervise(run, Ranks(resumes)) == 0
    first, second = run.attempts()
    assert first.goodput == told
    assert 100.0 <= second.goodput["idle"] <= time.time() - died
    assert second.goodput["queue"] == 0.0
    result = run.result()
    whole_s = sum(parts_of(result.goodput).values())
    assert second.ended - (died - 20) - 0.01 <= whole_s <= time.time() - (died - 20) + 0.01
    assert (first.goodput["queue"], first.goodput["start_up"]) == pytest.approx((2.0, 8.0))
    both = [first.goodput[part] + second.goodput[part] for part in ("queue", "start_up")]
    assert [result.goodput["queue"], result.goodput["start_up"]] == pytest.approx(both, abs=0.01)


GOOD_REPORT = RunProgress(step=50, step_start=0, spent=spent(training=9.0, evaluation=1.0))


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@pytest.mark.parametrize(
    ("submit_s", "start_s", "queue_s", "ready_s"),
    [(-50.0, 10.0, 10.0, 10.0), (5.0, 20.0, 15.0, 20.0), (-90.0, -80.0, 0.0, None)],
    ids=["requeued", "submitted again by a person", "same job, another supervisor"],
)
def test_slurm_says_how_long_a_job_has_waited(
    run: RunDir, submit_s: float, start_s: float, queue_s: float, ready_s: float | None
) -> None:
    """All times are in seconds after the end of the attempt before.

    ``None``: the supervisor's own start, and no earlier time.
    """
    end = round(time.time() - 30.0, 3)
    why = {"cause": "preempted", "decision": "requeue", "nodes": "here"}
    run.add_attempt(
        AttemptRecord.from_json({"attempt": 1, "started": iso(end - 60), "ended": iso(end), "step_end": 7, **why})
    )
    allocation = Allocation(("here",), (1,), 1)
    journal = Journal(run, allocation, Nodes(run, allocation, spare=0, allow_fewer=False))
    start = journal.start_times(JobRow("1", "RUNNING", submit_time=end + submit_s, start_time=end + start_s))
    assert start.since == pytest.approx(end)
    assert start.best_step == 7
    assert start.queue_s == pytest.approx(queue_s, abs=1e-3)
    assert start.ready == pytest.approx(time.time() if ready_s is None else end + ready_s, abs=1.0)
    again = journal.start_times(None)
    assert (again.submitted, again.queue_s) == (None, 0.0)
    assert again.ready == pytest.approx(time.time(), abs=1.0)


def test_the_first_step_is_dated_by_the_report_that_came_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(1, 1000.0, Allocation(("here",), (1,), 1))
    for now, seconds in ((1013.0, 2.0), (1015.1, 5.0), (1030.0, 6.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        attempt.on_progress(RunProgress(spent=spent(training=seconds)))
    assert attempt.first_step == pytest.approx(1010.1)


def test_the_list_of_all_runs_tells_no_times(tmp_path: Path, run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_result(RunResult.from_json({"state": "completed", "attempts": 1, "metrics": {}, "goodput": HOUR}))
    assert cli.main(["status", str(run.path), str(run.path)]) == EXIT_DONE
    assert "training" not in capsys.readouterr().out
