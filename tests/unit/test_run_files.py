"""The records of a run folder: each key is read by its type. A damaged, newer or unknown key costs no other one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import fsio
from toolkit.files import rundir
from toolkit.files.json_record import VERSION, shape_of
from toolkit.files.records import Misfit
from toolkit.files.run_files import (
    AfterRecord,
    AttemptRecord,
    OwnerRecord,
    RunProgress,
    RunResult,
    RunState,
    RunStatus,
    Straggler,
    Submission,
    SweepPoint,
)
from toolkit.files.rundir import RunDir
from toolkit.run.job import nodes
from toolkit.run.records import stop_request


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("name", tmp_path)


STRAGGLER = {"host": "node1", "ranks": [1], "ratio": 1.5, "since": 1.0, "until": None}
START: dict[str, Any] = {"since": 1.0, "submitted": None, "queue_s": 0.0, "ready": 2.0, "best_step": 0}
START |= {"marks": {"prepared": 2.5, "imported": 4.0}}
USAGE = {"job_id": "7", "since": 1.0, "cpu_s": 2.0, "memory_bytes": None, "unused_gpus": ["GPU 1 of node2"]}
#: Every key, as it stands in the file.
STATUS: dict[str, Any] = {
    "version": 1,
    "state": "running",
    "run": "name/1",
    "job_id": "7",
    "cluster": "alpha",
    "restart_count": 0,
    "host": "node1",
    "pid": 77,
    "birth": "0f0e-boot:4026531836:123",
    "attempt": 1,
    "nodes": ["node1"],
    "tasks": [2],
    "world_size": 2,
    "bad_nodes": {"node2": "sick"},
    "ailing_nodes": {"node3": "hot"},
    "started": 1.0,
    "start": START,
    "updated": 2.0,
    "stop": "user",
    "progress": {"step": 5, "loss": 0.5, "stragglers": [STRAGGLER], "metrics": {"eval/loss": None}},
    "submitted": 1.0,
    "goodput": {"training": 1.0},
    "start_up": {"queue": 1.0},
    "why": "rank 1: killed",
    "staging": ["/venv (1 GiB): nodes with a copy: 2 of 2, all from an earlier start"],
    "ended": 3.0,
    "supervised": True,
    "usage": USAGE,
    "left_over": {"attempt": 3},
}


def test_what_is_read_is_written_again_key_for_key(run: RunDir) -> None:
    assert STATUS.keys() == shape_of(RunStatus).keys.keys(), "a key has no example here"
    fsio.write_json(run.path / "status.json", STATUS)
    damage: list[str] = []
    run.write_status(run.status(damage))
    assert json.loads((run.path / "status.json").read_text()) == STATUS
    assert damage == []


@pytest.mark.parametrize("key", sorted(STATUS))
def test_a_damaged_key_of_a_status_is_named_and_the_others_are_read(run: RunDir, key: str) -> None:
    fsio.write_json(run.path / "status.json", {**STATUS, key: [[]]})
    damage: list[str] = []
    status = run.status(damage)
    (line,) = damage
    assert line.startswith(f"{run.path / 'status.json'}: {key}")
    assert line.endswith("; left out")
    kept = {name: value for name, value in STATUS.items() if name != key}
    assert status.to_json() == kept
    assert getattr(status, key) == getattr(RunStatus(), key)


def test_a_damaged_part_is_named_by_its_whole_key(run: RunDir) -> None:
    stragglers = [STRAGGLER, {**STRAGGLER, "ratio": "x"}]
    fsio.write_json(run.path / "status.json", {"progress": {"step": 5, "stragglers": stragglers}})
    damage: list[str] = []
    assert run.status(damage).progress == RunProgress(step=5)
    assert damage == [f'{run.path / "status.json"}: progress.stragglers[1].ratio: "x" is not a number; left out']


#: Every key of a line of attempts.jsonl.
ATTEMPT: dict[str, Any] = {
    "version": 1,
    "attempt": 2,
    "nodes": "node[1-2]",
    "started": "2026-01-01T00:00:00.000+00:00",
    "ended": "2026-01-01T00:01:00.500+00:00",
    "cause": "crashed",
    "decision": "restart",
    "job_id": "7",
    "restart_count": 0,
    "world_size": 4,
    "stop_asked": "2026-01-01T00:00:30.000+00:00",
    "step_start": 0,
    "step_end": 30,
    "step_saved": 20,
    "gained_s": 12.5,
    "lost_nodes": ["node2"],
    "suspect": "node2",
    "vacated_nodes": ["node1"],
    "first_failure": {"rank": 3, "host": "node2", "how": "killed"},
    "line": "rank 3: killed",
    "slow_nodes": [STRAGGLER],
    "submitted": "2026-01-01T00:00:00.000+00:00",
    "goodput": {"training": 1.0},
    "start_up": {"queue": 1.0},
    "code": 2,
}


def test_a_line_of_attempts_is_written_again_key_for_key(run: RunDir) -> None:
    assert ATTEMPT.keys() == shape_of(AttemptRecord).keys.keys(), "a key has no example here"
    (run.path / "attempts.jsonl").write_text(json.dumps(ATTEMPT) + "\n")
    damage: list[str] = []
    (line,) = run.attempts(damage)
    assert (line.nodes, line.ended - line.started) == (("node1", "node2"), 60.5)
    run.add_attempt(line)
    assert [json.loads(text) for text in (run.path / "attempts.jsonl").read_text().splitlines()] == [ATTEMPT] * 2
    assert damage == []


@pytest.mark.parametrize("key", sorted(ATTEMPT))
def test_a_damaged_key_of_an_attempt_is_named_with_its_line(run: RunDir, key: str) -> None:
    """A line needs the keys that tell its attempt, its times and its end."""
    with (run.path / "attempts.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in (ATTEMPT, {**ATTEMPT, "attempt": 3, key: [[]]}))
    damage: list[str] = []
    lines = run.attempts(damage)
    (named,) = damage
    assert named.startswith(f"{run.path / 'attempts.jsonl'}, line 2")
    assert f": {key}" in named
    is_needed = key in ("attempt", "nodes", "started", "ended", "cause", "decision")
    assert len(lines) == (1 if is_needed else 2)


def test_keys_that_an_older_line_lacks_are_null(run: RunDir) -> None:
    needed = {key: ATTEMPT[key] for key in ("attempt", "nodes", "started", "ended", "cause", "decision")}
    (run.path / "attempts.jsonl").write_text(json.dumps(needed) + "\n")
    (line,) = run.attempts([])
    assert (line.suspect, line.gained_s, line.begun) == (None, 0.0, line.started)
    assert line.to_json().items() >= {**needed, "suspect": None, "step_end": None, "first_failure": None}.items()


#: Every key of result.json.
RESULT: dict[str, Any] = {
    "version": 1,
    "state": "completed",
    "attempts": 2,
    "step": 30,
    "epoch": 3,
    "samples": 900,
    "metrics": {"eval/accuracy": 0.5, "eval/loss": None},
    "wall_s": 60.5,
    "goodput": {"training": 1.0},
    "efficiency": {"jobs": 1, "usage": USAGE, "sbatch": "sbatch --nodes=1", "cost": 1.5, "currency": "EUR"},
    "why": "completed",
}


def test_a_result_is_written_again_key_for_key(run: RunDir) -> None:
    assert RESULT.keys() == shape_of(RunResult).keys.keys(), "a key has no example here"
    fsio.write_json(run.path / "result.json", RESULT)
    damage: list[str] = []
    result = run.result(damage)
    assert result is not None
    run.write_result(result)
    assert json.loads((run.path / "result.json").read_text()) == RESULT
    assert damage == []


@pytest.mark.parametrize("key", sorted(RESULT))
def test_a_damaged_key_of_a_result_is_named(run: RunDir, key: str) -> None:
    """Without its state the file is no result, but shows that the run has ended."""
    fsio.write_json(run.path / "result.json", {**RESULT, key: [[]]})
    damage: list[str] = []
    result = run.result(damage)
    assert result is not None
    assert str(run.path / "result.json") in damage[0]
    assert f": {key}" in damage[0]
    assert result.state is (RunState.UNREADABLE if key == "state" else RunState.COMPLETED)


#: Every key of point.json.
POINT: dict[str, Any] = {
    "version": 1,
    "sweep": "widths",
    "id": "0123456789abcdef",
    "values": {"optim.lr": 0.1, "train.betas": [0.9, 0.99], "model.name": None},
    "metric": "-eval/loss",
}


@pytest.mark.parametrize("key", sorted(POINT))
def test_a_damaged_key_of_a_point_is_named(run: RunDir, key: str) -> None:
    assert POINT.keys() == shape_of(SweepPoint).keys.keys(), "a key has no example here"
    fsio.write_json(run.path / "point.json", {**POINT, key: [[]]})
    damage: list[str] = []
    point = run.point(damage)
    assert f": {key}" in damage[0]
    assert (point is None) == (key in ("sweep", "id"))
    fsio.write_json(run.path / "point.json", POINT)
    assert SweepPoint(**POINT) == run.point()


#: Every key of after.json.
AFTER: dict[str, Any] = {"version": 1, "runs": ["/runs/gpt/20260131-120000-1a2b3c4d"], "sweeps": ["/runs/.sweeps/lr"]}


@pytest.mark.parametrize("key", sorted(AFTER))
def test_a_damaged_key_of_what_a_run_waits_for_is_named(run: RunDir, key: str) -> None:
    assert AFTER.keys() == shape_of(AfterRecord).keys.keys(), "a key has no example here"
    fsio.write_json(run.path / "after.json", {**AFTER, key: [[]]})
    damage: list[str] = []
    record = run.after(damage)
    assert key in damage[0]
    assert (record is None) == (key != "version"), "a part of it would let the run start early"
    fsio.write_json(run.path / "after.json", AFTER)
    assert AfterRecord.load(AFTER) == run.after()


#: Every key of owner.json and of submission.json.
OWNER: dict[str, Any] = {
    "version": 1,
    "number": 3,
    "token": "0123",
    "executor": "slurm",
    "host": "login1",
    "pid": 7,
    "time": 1.8e9,
    "jobs": ["1", "2"],
    "follow_ups": ["3"],
    "birth": "0f0e-boot:4026531836:123",
    "serves": True,
    "cluster": "alpha",
    "path": "/runs/name/1",
    "command": "/home/u/train.sh a.yaml",
}
SUBMISSION: dict[str, Any] = {
    "version": 1,
    "executor": "slurm",
    "job_id": "1",
    "follow_ups": ["3"],
    "host": "login1",
    "time": 1.8e9,
    "token": "0123",
    "took_s": 1.5,
    "cluster": "alpha",
    "birth": "0f0e-boot:4026531836:123",
}


def test_an_owner_is_written_again_key_for_key(run: RunDir) -> None:
    assert OWNER.keys() == shape_of(OwnerRecord).keys.keys(), "a key has no example here"
    fsio.write_json(run.path / "owner.json", OWNER)
    damage: list[str] = []
    owner = run.owner(damage)
    assert owner is not None
    assert (owner.is_whole, owner.job_id) == (True, "2")
    run.write_owner(owner)
    assert json.loads((run.path / "owner.json").read_text()) == OWNER
    assert damage == []


@pytest.mark.parametrize("key", sorted(OWNER))
def test_a_damaged_key_of_an_owner_is_named_and_its_number_is_read(run: RunDir, key: str) -> None:
    fsio.write_json(run.path / "owner.json", {**OWNER, key: [[]]})
    damage: list[str] = []
    owner = run.owner(damage)
    assert owner is not None
    needed = ("number", "token", "executor", "host", "pid", "time")
    assert owner.is_whole == (key not in needed)
    assert run.owner_number() == (None if key == "number" else 3)
    assert damage[0].startswith(f"{run.path / 'owner.json'}: {key}")


@pytest.mark.parametrize("key", sorted(SUBMISSION))
def test_a_damaged_key_of_a_submission_is_named(run: RunDir, key: str) -> None:
    """Without its executor or its job the file is useless."""
    assert SUBMISSION.keys() == shape_of(Submission).keys.keys(), "a key has no example here"
    fsio.write_json(run.submitit / "submission.json", {**SUBMISSION, key: [[]]})
    damage: list[str] = []
    submission = run.submission(damage)
    assert (submission is None) == (key in ("executor", "job_id"))
    assert str(run.submitit / "submission.json") in damage[0]
    assert f": {key}" in damage[0]


def test_keys_of_a_newer_version_are_kept_when_the_file_is_written_again(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    progress = {"step": 5, "speed": 7.0, "stragglers": [{**STRAGGLER, "gpu": 3}]}
    newer = {"version": VERSION + 1, "state": "running", "progress": progress, "shares": [1, 2]}
    fsio.write_json(run.path / "status.json", newer)
    for _ in range(2):
        run.write_status(run.status([]).replace(state=RunState.STOPPING))
    assert json.loads((run.path / "status.json").read_text()) == {**newer, "state": "stopping"}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{run.path / 'status.json'} has version {VERSION + 1}, and this toolkit knows {VERSION}")


def test_a_file_without_a_version_has_the_first_and_gets_it_when_it_is_written(run: RunDir) -> None:
    fsio.write_json(run.path / "status.json", {"state": "queued"})
    assert run.status().version == 1
    run.write_status(run.status())
    assert json.loads((run.path / "status.json").read_text()) == {"version": VERSION, "state": "queued"}


def test_only_the_keys_that_a_record_was_made_with_are_written() -> None:
    status = RunStatus(state=RunState.QUEUED, job_id=None)
    assert status.to_json() == {"state": "queued", "job_id": None}
    assert status.replace(pid=7).to_json() == {"state": "queued", "job_id": None, "pid": 7}
    straggler = Straggler("node1", (1,), 1.5, 1.0, None)
    assert straggler.to_json() == STRAGGLER


def test_of_a_value_that_is_not_from_a_file_all_must_fit() -> None:
    assert RunProgress.from_json({"step": 5, "loss": float("nan"), "time": 1.0}).loss is None
    with pytest.raises(Misfit, match="epoch: -1 is not a count"):
        RunProgress.from_json({"step": 5, "epoch": -1})


def test_a_run_is_over_in_a_state_that_only_a_user_ends() -> None:
    over = {"completed", "stopped", "failed", "cancelled", "unreadable"}
    assert {state for state in RunState if state.is_over} == over
    assert {state for state in RunState if state.is_waiting} == {"queued", "requeued"}


def test_a_request_and_a_bad_node_are_records_too(run: RunDir) -> None:
    stop_request.ask(run, stop_request.Intent.CANCEL)
    written = json.loads((run.path / "intent.json").read_text())
    assert (written["version"], written["intent"], sorted(written)) == (1, "cancel", ["intent", "time", "version"])
    fsio.write_json(run.path / "nodes.json", {"node1": {"why": "sick", "since": 1.0, "rack": 7}})
    nodes.remember(run, "node2", "dead")
    kept = json.loads((run.path / "nodes.json").read_text())
    assert kept["node1"] == {"why": "sick", "since": 1.0, "rack": 7}
    assert kept["node2"].keys() == {"why", "since", "is_drained"}
