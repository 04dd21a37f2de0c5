"""A run whose files are damaged is brought back, and its user's requests still hold."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.run.test_supervisor import Ranks, completes, quick
from toolkit import config as configs
from toolkit.base import fsio, outages
from toolkit.base.errors import EXIT_DONE, EXIT_STOPPED
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.job import nodes
from toolkit.run.records import stop_request
from toolkit.run.supervise import entry
from toolkit.run.supervise.supervisor import Supervisor

__all__ = ["quick"]

HERE = Allocation(("here",), (2,), 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create("test", tmp_path)
    fsio.write_atomic(run.config, configs.dump_config(JobConfig()))
    return run


def supervise(run: RunDir, *acts: object, restarts: int = 0) -> int:
    return Supervisor(run, JobConfig(), replace(HERE, restart_count=restarts), Ranks(*acts), None).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [b"\0" * 200 + b"\n", b"garbage\n", b'{"attempt": 2'])
def test_a_run_with_a_damaged_line_of_attempts_is_resumed_under_a_new_number(run: RunDir, line: bytes) -> None:
    """The lost line's attempt left an error file. The new attempt must not read it as its own."""
    times = {"started": "2026-01-01T00:00:00.000+00:00", "ended": "2026-01-01T00:01:00.000+00:00"}
    run.add_attempt(
        AttemptRecord.from_json({"attempt": 1, **times, "cause": "crashed", "decision": "restart", "nodes": "here"})
    )
    with (run.path / "attempts.jsonl").open("ab") as file:
        file.write(line)
    fsio.make_dir(run.attempt_logs(2))
    fsio.write_json(run.error_file(2, 0), {"type": "ValueError", "message": "of attempt 2"})
    assert supervise(run, completes) == EXIT_DONE
    assert [(line.attempt, line.cause) for line in run.attempts([])] == [(1, "crashed"), (3, "completed")]
    assert line.rstrip(b"\n") in (run.path / "attempts.jsonl").read_bytes()


@pytest.mark.parametrize("content", [b"", b"\0" * 20, b"[]", b'{"intent": "go"}'])
def test_a_run_that_somebody_has_ended_does_not_train_though_the_note_is_damaged(run: RunDir, content: bytes) -> None:
    (run.path / "intent.json").write_bytes(content)
    assert supervise(run) == EXIT_STOPPED
    assert run.result().state == "stopped"


def test_a_restarted_job_leaves_a_run_alone_whose_result_cannot_be_read(run: RunDir) -> None:
    """A user may have cancelled that run. `toolkit resume` goes on with it."""
    (run.path / "result.json").write_text("{")
    assert supervise(run, restarts=1) == EXIT_DONE
    assert (run.path / "result.json").read_text() == "{"
    assert supervise(run, completes) == EXIT_DONE
    assert run.result().state == "completed"
    assert [path.read_text() for path in run.path.glob("result.json.damaged-*")] == ["{"]


def test_a_damaged_list_of_bad_nodes_is_kept_beside_the_new_one(run: RunDir) -> None:
    (run.path / "nodes.json").write_text('{"node1": {"why": "sick", "since": 1.0}, "node2": 5}')
    nodes.remember(run, "node3", "dead")
    assert nodes.remembered(run).keys() == {"node1", "node3"}
    (kept,) = run.path.glob("nodes.json.damaged-*")
    assert "node2" in kept.read_text()


def test_a_damaged_intent_is_named_where_it_is_asked_for(run: RunDir) -> None:
    (run.path / "intent.json").write_bytes(b"\0")
    damage: list[str] = []
    assert stop_request.asked(run, damage) is stop_request.Intent.STOP
    assert f"{run.path / 'intent.json'} is damaged: it holds NUL bytes only; taken for a stop" in damage[0]


def test_a_run_whose_folder_is_hidden_for_a_moment_is_supervised(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server is away when its job starts: the config, the owner and all else seem to be missing."""
    monkeypatch.setattr(outages, "GIVE_UP_AFTER_S", 30)
    hidden = run.path.with_name("hidden")
    run.path.rename(hidden)
    monkeypatch.setattr(time, "sleep", lambda _: hidden.rename(run.path))
    assert entry.build(run, "local", None).run is not None
    run.path.rename(hidden)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(outages, "GIVE_UP_AFTER_S", 0)
    with pytest.raises(FileNotFoundError):
        entry.build(run, "local", None)
