"""The records of a run folder: each is written as it was read. What does not fit is refused, with its path and key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import DamagedFileError
from toolkit.files import records, rundir
from toolkit.files.records import VERSION, FileRecord, Misfit
from toolkit.files.run_files import (
    AfterRecord,
    AttemptRecord,
    OwnerRecord,
    RunProgress,
    RunResult,
    RunState,
    RunStatus,
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


#: Every key of point.json.
POINT: dict[str, Any] = {
    "version": 1,
    "sweep": "widths",
    "id": "0123456789abcdef",
    "values": {"optim.lr": 0.1, "train.betas": [0.9, 0.99], "model.name": None},
    "metric": "-eval/loss",
}


#: Every key of after.json.
AFTER: dict[str, Any] = {"version": 1, "runs": ["/runs/gpt/20260131-120000-1a2b3c4d"], "sweeps": ["/runs/.sweeps/lr"]}


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


FILES: dict[str, tuple[type[FileRecord], dict[str, Any], Callable[[RunDir], Any]]] = {
    "status.json": (RunStatus, STATUS, RunDir.status),
    "attempts.jsonl": (AttemptRecord, ATTEMPT, RunDir.attempts),
    "result.json": (RunResult, RESULT, RunDir.result),
    "point.json": (SweepPoint, POINT, RunDir.point),
    "after.json": (AfterRecord, AFTER, RunDir.after),
    "owner.json": (OwnerRecord, OWNER, RunDir.owner),
    "submitit/submission.json": (Submission, SUBMISSION, RunDir.submission),
}
KEYS = [(name, key) for name, (_, example, _) in FILES.items() for key in sorted(example)]


def put(run: RunDir, name: str, value: Any) -> None:
    (run.path / name).write_text(json.dumps(value) + "\n")


@pytest.mark.parametrize("name", FILES)
def test_what_is_read_is_written_again_key_for_key(run: RunDir, name: str) -> None:
    kind, example, read = FILES[name]
    assert example.keys() == {each.name for each in fields(kind)}, "a key has no example here"
    put(run, name, example)
    found = read(run)
    (record,) = found if isinstance(found, list) else (found,)
    written = json.loads(json.dumps(record.to_json()))
    assert {key: _as_far_as(written[key], value) for key, value in example.items()} == example
    assert kind.from_json(written) == record


def _as_far_as(written: Any, example: Any) -> Any:
    """Return what is written of the keys that an example has: parts that it leaves out are written, too."""
    if isinstance(example, dict):
        return {key: _as_far_as(written[key], value) for key, value in example.items()}
    return written


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_key_that_does_not_fit_is_named_with_its_file(run: RunDir, name: str, key: str) -> None:
    _, example, read = FILES[name]
    put(run, name, {**example, key: [[[]]]})
    if (name, key) == ("point.json", "values"):
        put(run, name, {**example, key: {"a": json.loads("[" * 99 + "]" * 99)}})
    line = ", line 1," if name.endswith("l") else ""
    with pytest.raises(
        DamagedFileError, match=f"^{run.path / name}{line} cannot be read: {key}.*; mend it, or move it away$"
    ):
        read(run)


@pytest.mark.parametrize(("name", "key"), KEYS)
def test_a_missing_key_has_its_default_or_is_named(run: RunDir, name: str, key: str) -> None:
    kind, example, read = FILES[name]
    needed = [each.name for each in fields(kind) if each.default is each.default_factory]  # both are MISSING
    put(run, name, {other: value for other, value in example.items() if other != key})
    if key in needed:
        with pytest.raises(DamagedFileError, match=f"cannot be read: {key}: this key is missing"):
            read(run)
    else:
        assert read(run) is not None


def test_a_part_is_named_by_its_whole_key(run: RunDir) -> None:
    stragglers = [STRAGGLER, {**STRAGGLER, "ratio": "x"}]
    put(run, "status.json", {"progress": {"step": 5, "stragglers": stragglers}})
    with pytest.raises(DamagedFileError, match=r': progress\.stragglers\[1\]\.ratio: "x" is not a number; '):
        run.status()


def test_lines_are_read_as_what_they_hold(run: RunDir) -> None:
    put(run, "attempts.jsonl", ATTEMPT)
    (line,) = run.attempts()
    assert (line.nodes, line.ended - line.started) == (("node1", "node2"), 60.5)
    run.add_attempt(line)
    assert len(run.attempts()) == 2
    needed = {key: ATTEMPT[key] for key in ("attempt", "nodes", "started", "ended", "cause", "decision")}
    put(run, "attempts.jsonl", needed)
    (line,) = run.attempts()
    assert (line.suspect, line.gained_s, line.begun) == (None, 0.0, line.started)


def test_keys_of_a_newer_toolkit_are_ignored_and_its_versions_are_refused(run: RunDir) -> None:
    progress = {"step": 5, "speed": 7.0, "stragglers": [{**STRAGGLER, "gpu": 3}]}
    newer = {"version": VERSION, "state": "running", "progress": progress, "shares": [1, 2]}
    put(run, "status.json", newer)
    assert run.status() == RunStatus.from_json({"state": "running", "progress": {"step": 5, "stragglers": [STRAGGLER]}})
    put(run, "status.json", {**newer, "version": VERSION + 1})
    with pytest.raises(DamagedFileError, match=f"version: {VERSION + 1} is of a newer toolkit"):
        run.status()


def test_a_file_without_a_version_has_the_first(run: RunDir) -> None:
    put(run, "status.json", {"state": "queued"})
    assert run.status().version == 1
    run.write_status(run.status())
    assert json.loads((run.path / "status.json").read_text())["version"] == VERSION


def test_a_text_that_no_file_can_hold_is_read_without_what_is_odd(run: RunDir) -> None:
    """What a rank has printed may be quoted in a file of the toolkit's own, which must not be unreadable by that."""
    put(run, "result.json", {"state": "failed", "why": "a\0b\udcffc", "metrics": {"caf\udce9": 1.0}})
    result = run.result()
    assert result is not None
    assert (result.why, result.metrics) == ("a?b?c", {"caf?": 1.0})


def test_messages_are_read_like_files() -> None:
    assert RunProgress.from_json({"step": 5, "loss": float("nan"), "time": 1.0}).loss is None
    with pytest.raises(Misfit, match="epoch: -1 is not a count"):
        RunProgress.from_json({"step": 5, "epoch": -1})
    assert records.decode(list[list[int]], [[1], []]) == [[1], []]
    with pytest.raises(Misfit, match=r"^\[1\]\[0\]: \"x\" is not a count"):
        records.decode(list[list[int]], [[1], ["x"]])


def test_a_run_is_over_in_a_state_that_only_a_user_ends() -> None:
    over = {"completed", "stopped", "failed", "cancelled"}
    assert {state for state in RunState if state.is_over} == over
    assert {state for state in RunState if state.is_waiting} == {"queued", "requeued"}


def test_a_request_and_a_bad_node_are_records_too(run: RunDir) -> None:
    stop_request.ask(run, stop_request.Intent.CANCEL)
    written = json.loads((run.path / "intent.json").read_text())
    assert (written["version"], written["intent"], sorted(written)) == (1, "cancel", ["intent", "time", "version"])
    nodes.remember(run, "node1", "sick")
    nodes.remember(run, "node2", "dead")
    kept = json.loads((run.path / "nodes.json").read_text())
    assert kept["node1"]["why"] == "sick"
    assert kept["node2"].keys() == {"why", "since", "is_drained"}
    put(run, "nodes.json", {"node1": {"why": 5, "since": 1.0}})
    with pytest.raises(DamagedFileError, match=r"nodes\.json cannot be read: node1\.why: 5 is not text"):
        nodes.remembered(run)
