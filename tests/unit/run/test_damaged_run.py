"""A run whose node died while it wrote is brought back. A file of another shape is refused, and nothing is lost."""

import time
from dataclasses import replace

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import Ranks, completes
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_STOPPED, DamagedFileError
from toolkit.config import JobConfig
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.records import user_requests
from toolkit.run.supervise import entry
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick")

HERE = Allocation(("here",), (2,), 1)


def supervise(run: RunDir, *acts: object, restarts: int = 0) -> int:
    return Supervisor(run, JobConfig(), replace(HERE, restart_count=restarts), Ranks(*acts), None).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [b"\0" * 200, b'{"attempt": 2'])
def test_a_run_whose_last_line_of_attempts_is_cut_off_gets_a_new_number(run: RunDir, line: bytes) -> None:
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
    assert [(line.attempt, line.cause) for line in run.attempts()] == [(1, "crashed"), (3, "completed")]


@pytest.mark.parametrize("content", [b"", b"\0" * 20, b"[]", b'{"intent": "go"}'])
def test_a_run_that_somebody_has_ended_does_not_train_though_the_note_cannot_be_read(
    run: RunDir, content: bytes
) -> None:
    run.make_requests()
    (run.path / "requests/intent.json").write_bytes(content)
    assert supervise(run) == EXIT_STOPPED
    assert run.result().state == "stopped"


@pytest.mark.parametrize("content", [b"", b"\0" * 20, b'{"state": "runn'])
def test_a_run_whose_status_is_torn_is_resumed(run: RunDir, content: bytes) -> None:
    (run.path / "status.json").write_bytes(content)
    (run.path / "usage.json").write_bytes(content)
    assert supervise(run, completes) == EXIT_DONE
    assert run.result().state == run.status().state == "completed"


@pytest.mark.parametrize("name", ["status.json", "attempts.jsonl", "nodes.json", "owner.json", "result.json"])
def test_a_run_with_a_file_of_another_shape_does_not_start_and_says_which(run: RunDir, name: str) -> None:
    (run.path / name).write_text('{"attempt": "x"}\n')
    with pytest.raises(DamagedFileError, match=f"{name}.* cannot be read: .*; fix it, or move it away"):
        supervise(run, completes, restarts=1)
    assert (run.path / name).read_text() == '{"attempt": "x"}\n'
    (run.path / name).unlink()
    assert supervise(run, completes, restarts=1) == EXIT_DONE


def test_a_supervisor_that_cannot_read_a_file_leaves_a_result_that_names_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsio, "set_private_umask", lambda: None)
    (run.path / "attempts.jsonl").write_text("[]\n")
    with pytest.raises(SystemExit, match="1"):
        entry.supervise(str(run.path), "local")
    assert "attempts.jsonl, line 1, cannot be read" in (run.result().why or "")


def test_an_intent_that_cannot_be_read_is_named_where_it_is_asked_for(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run.make_requests()
    (run.path / "requests/intent.json").write_bytes(b"\0")
    assert user_requests.read_intent(run) is user_requests.Intent.STOP
    assert f"{run.path / 'requests/intent.json'} cannot be read: it holds NUL bytes only" in caplog.text
    assert "taken for a stop" in caplog.text


def test_a_run_whose_folder_is_hidden_for_a_moment_is_supervised(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """A file server is away when its job starts: the config, the owner and all else seem to be missing."""
    change_limits(give_up_after_s=30)
    hidden = run.path.with_name("hidden")
    run.path.rename(hidden)
    monkeypatch.setattr(time, "sleep", lambda _: hidden.rename(run.path))
    assert entry.build(run, "local", None).run is not None
    run.path.rename(hidden)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    change_limits(give_up_after_s=0)
    with pytest.raises(FileNotFoundError):
        entry.build(run, "local", None)
