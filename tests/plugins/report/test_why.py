"""`toolkit why`: one page from a run's own files, whatever became of it."""

import io
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command
from tests.unit.attempts import attempt
from tests.unit.checkpoint.ranks import alone, weights
from tests.unit.cli.test_listing import NOW, RECOVERED, SLOW, run, stands, told  # noqa: F401
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.cli import columns
from toolkit.files.run_files import RunResult, RunStatus
from toolkit.files.rundir import RunDir


def saved(run: RunDir, step: int) -> None:
    alone(CheckpointFolder(run.checkpoints), step, weights(1.0))


def told_by_rank(run: RunDir, number: int, rank: int, words: str, at: float) -> None:
    """Write the error file of a rank that raised ValueError(words)."""
    path = run.error_file(number, rank)
    fsio.make_dir(path.parent)
    try:
        raise ValueError(words)
    except ValueError as error:
        said = {"type": "ValueError", "message": words, "traceback": "".join(traceback.format_exception(error))}
    fsio.write_json(path, {"rank": rank, "host": f"node{rank}", "time": at, **said})


def why(command: Command, *arguments: str) -> str:
    printed = command.ends(EXIT_DONE, "why", *arguments)
    assert printed.err == ""
    return printed.out


def page(run: RunDir, command: Command, *options: str) -> list[str]:
    return why(command, run.id, *options).splitlines()


def document(run: RunDir, command: Command) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    told: dict[str, Any] = json.loads(why(command, run.id, "--json"), parse_constant=refuse)
    return told


def crashed(run: RunDir) -> None:
    """Make a run whose rank 2 raised at step 170.

    Step 100 is saved. Ranks 0 and 3 failed because of rank 2. The clock of rank 0's node is behind.
    """
    saved(run, 100)
    run.add_attempt(attempt(1, "preempted", "requeue", step_end=120))
    failure = {"rank": 2, "host": "node2", "how": "ValueError: boom 2"}
    more = {"step_start": 100, "step_end": 170, "first_failure": failure, "line": "rank 2 on node2: ValueError: boom 2"}
    run.add_attempt(attempt(2, "crashed", "give_up", **more))
    for rank, at in ((0, 10.0), (2, 11.0), (3, 13.0)):
        told_by_rank(run, 2, rank, f"boom {rank}", at)
    run.write_result(
        RunResult.from_json(
            {"state": "failed", "attempts": 2, "metrics": {}, "why": "rank 2 on node2: ValueError: boom 2"}
        )
    )


def test_a_crash_is_told_with_its_first_rank_its_traceback_and_what_it_cost(run: RunDir, command: Command) -> None:
    crashed(run)
    lines = page(run, command, "--all")
    assert lines[:2] == [f"digits/{run.id}: failed", "  rank 2 on node2: ValueError: boom 2"]
    assert "first failure: rank 2 on node2, attempt 2: ValueError: boom 2" in lines
    begun = lines.index("  Traceback (most recent call last):")
    assert "  ValueError: boom 2" in lines[begun:]
    assert not [line for line in lines if "boom 0" in line or "boom 3" in line]  # the consequences, not the cause
    assert "  2 other ranks failed after it, most likely because of it" in lines
    assert f"  log: {run.path}/logs/attempt-002/rank-2.log" in lines
    assert "last checkpoint: step 100" in lines
    assert "steps lost: 70 (reached step 170)" in lines
    assert lines[-1] == f"next: fix the cause, then `toolkit resume {run.id}` continues from the last checkpoint"


def test_a_crash_fits_in_ten_lines_with_the_users_own_line(run: RunDir, command: Command) -> None:
    crashed(run)
    lines = page(run, command)
    assert len(lines) == 9
    assert lines[:2] == [f"digits/{run.id}: failed", "first failure: rank 2 on node2, attempt 2: ValueError: boom 2"]
    assert re.fullmatch(r"  at test_why\.py:\d+ in told_by_rank: raise ValueError\(words\)", lines[2])
    assert "attempts: 2 (preempted, crashed)" in lines


def test_what_was_decided_stays_where_the_failure_has_its_own_line(run: RunDir, command: Command) -> None:
    crashed(run)
    why = "rank 2 on node2: ValueError: boom 2; given up after 2 failures"
    run.write_result(RunResult.from_json({"state": "failed", "attempts": 2, "metrics": {}, "why": why}))
    assert page(run, command)[1] == "  given up after 2 failures"


def test_a_lost_connection_is_not_the_cause_of_what_failed_before_it(run: RunDir, command: Command) -> None:
    crashed(run)
    run.error_file(2, 2).unlink()  # it ended by an exit code
    told_by_rank(run, 2, 0, "Connection closed by peer [127.0.0.1]:28849", 12.0)
    run.rank_log(2, 2).write_text("step 1 loss 2.0\nbye\n")
    run.error_file(2, 3).unlink()
    lines = page(run, command)
    assert f"cause: not known; the last lines of {run.rank_log(2, 2)}:" in lines
    assert not [line for line in lines if "lost its connection" in line]


def test_every_attempt_has_its_line_in_the_table(run: RunDir, command: Command) -> None:
    crashed(run)
    table = [line.split() for line in page(run, command, "--all")]
    assert ["ATTEMPT", "JOB", "NODES", "RANKS", "STEPS", "CAUSE", "DECISION"] in table
    assert ["1", "41", "2", "4", "0", "to", "120", "preempted", "requeue"] in table
    assert ["2", "41", "2", "4", "100", "to", "170", "crashed", "give_up"] in table


def test_of_a_long_traceback_the_end_is_shown(run: RunDir, command: Command) -> None:
    failure = {"rank": 0, "host": "node1", "how": "ValueError: deep"}
    run.add_attempt(attempt(1, "crashed", "give_up", first_failure=failure))
    fsio.make_dir(run.attempt_logs(1))
    frames = "".join(f"frame {i}\n" for i in range(100))
    fsio.write_json(run.error_file(1, 0), {"message": "deep", "traceback": f"{frames}ValueError: deep\n"})
    lines = page(run, command, "--all")
    assert "  ValueError: deep" in lines
    assert "  frame 99" in lines
    assert "  frame 0" not in lines


def test_a_completed_run_needs_nothing_and_lost_nothing(run: RunDir, command: Command) -> None:
    saved(run, 400)
    (run.tensorboard / "events").touch()
    run.add_attempt(attempt(1, "completed", "finish", step_end=450))
    run.write_result(RunResult.from_json({"state": "completed", "attempts": 1, "metrics": {}, "why": "completed"}))
    lines = page(run, command)
    assert lines[0] == f"digits/{run.id}: completed"
    assert not [line for line in lines if line.startswith("first failure")]
    assert "reached step: 450" in lines
    assert lines[-1] == f"next: nothing to do; `toolkit tensorboard {run.id}` shows the curves"


def test_a_run_that_was_killed_without_a_checkpoint_lost_every_step(run: RunDir, command: Command) -> None:
    run.add_attempt(attempt(1, "cancelled", "give_up", step_end=33))
    run.write_result(
        RunResult.from_json({"state": "cancelled", "attempts": 1, "metrics": {}, "why": "cancelled at step 33"})
    )
    lines = page(run, command)
    assert "last checkpoint: none" in lines
    assert "steps lost: 33 (reached step 33)" in lines


def test_an_earlier_crash_is_still_told_when_the_last_attempt_was_taken_away(run: RunDir, command: Command) -> None:
    failure = {"rank": 1, "host": "node1", "how": "killed by SIGKILL"}
    run.add_attempt(attempt(1, "crashed", "restart", first_failure=failure))
    run.add_attempt(attempt(2, "preempted", "requeue", step_end=5))
    run.write_status(RunStatus.from_json({"state": "requeued", "attempt": 2, "updated": time.time()}))
    lines = page(run, command)
    assert lines[0] == f"digits/{run.id}: requeued"
    assert lines[1] == "  preempted, so requeue"
    assert "first failure: rank 1 on node1, attempt 1: killed by SIGKILL" in lines
    assert lines[-1].startswith("next: nothing to do; it continues when Slurm starts the job again")


def test_a_run_that_works_is_left_alone(run: RunDir, command: Command) -> None:
    live = {"pid": os.getpid(), "host": os.uname().nodename, "updated": time.time()}
    run.write_status(RunStatus.from_json({"state": "running", "attempt": 1, **live}))
    assert page(run, command)[-1] == f"next: nothing to do; `toolkit logs {run.id} --follow` shows what it prints"
    run.write_status(RunStatus.from_json({"state": "stopping", "attempt": 1, **live}))
    assert page(run, command)[-1] == "next: nothing to do: it ends by itself"


@pytest.mark.parametrize("status", [{}, {"state": "queued", "progress": {}}])
def test_a_run_that_never_started_says_so(run: RunDir, status: dict[str, Any], command: Command) -> None:
    if status:
        run.write_status(RunStatus.from_json({**status, "updated": time.time()}))
    assert page(run, command) == [
        f"digits/{run.id}: {status.get('state', 'unknown')}",
        "  not started yet",
        "last checkpoint: none",
        "next: nothing to do; it begins when Slurm starts its job"
        if status
        else f"next: `toolkit status {run.id}` shows its state",
    ]


def test_of_a_queued_run_it_is_said_what_it_waits_for(
    run: RunDir, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_status(RunStatus.from_json({"state": "queued", "progress": {}, "updated": time.time()}))
    monkeypatch.setattr(columns, "notes_of", lambda row: ["waits for higher jobs; Slurm expects it at 12:00"])
    assert page(run, command)[1:3] == ["  not started yet", "  waits for higher jobs; Slurm expects it at 12:00"]


@pytest.mark.parametrize("ended", ["2026-11-20T15:00:05+00:00", "2026-11-20T15:09:00+00:00"])
def test_where_the_time_went_is_shown_of_long_completed_runs_and_if_asked_for(
    run: RunDir, ended: str, command: Command
) -> None:
    parts = {"queue": 3.0, "first_step": 0.5}
    times = {"started": "2026-11-20T15:00:00+00:00", "ended": ended}
    run.add_attempt(attempt(1, "completed", "finish", start_up=parts, **times))
    run.write_result(RunResult.from_json({"state": "completed", "attempts": 1, "metrics": {}, "why": "completed"}))
    assert any(line.startswith("start of attempt 1: ") for line in page(run, command)) is ("09:00" in ended)
    assert "start of attempt 1: " in command("why", run.id, "--all")


def test_a_foreign_script_is_told_by_torchs_own_error_files_and_without_steps(run: RunDir, command: Command) -> None:
    failure = {"rank": 1, "host": "node2", "how": "RuntimeError: theirs"}
    more = {"step_start": None, "job_id": None, "first_failure": failure}
    run.add_attempt(attempt(1, "crashed", "give_up", **more))
    fsio.make_dir(run.attempt_logs(1))
    info = {"py_callstack": "Traceback (most recent call last):\nRuntimeError: theirs\n", "timestamp": "1700000000"}
    fsio.write_json(run.error_file(1, 1), {"message": {"message": "RuntimeError: theirs", "extraInfo": info}})
    (run.error_file(1, 0)).write_text('{"message": {"mess')  # killed while it wrote
    printed = command.ends(EXIT_DONE, "why", run.id, "--all")
    assert f"{run.error_file(1, 0)} cannot be read: it is not JSON" in printed.err
    lines = printed.out.splitlines()
    assert "first failure: rank 1 on node2, attempt 1: RuntimeError: theirs" in lines
    assert "  RuntimeError: theirs" in lines
    assert "  1 other rank failed after it, most likely because of it" in lines
    assert not [line for line in lines if line.startswith("steps lost")]
    assert ["1", "local", "2", "4", "crashed", "give_up"] in [line.split() for line in lines]


def test_a_store_host_that_failed_is_named_as_such(run: RunDir, command: Command) -> None:
    failure = {"rank": None, "host": "node1", "how": "the store host ended with exit code 1; see store.log"}
    run.add_attempt(attempt(1, "crashed", "give_up", first_failure=failure))
    lines = page(run, command)
    assert f"first failure: node1, attempt 1: {failure['how']}" in lines
    assert f"  log: {run.path}/logs/attempt-001/store.log" in lines


def test_as_json_it_is_one_document_with_the_same_facts(run: RunDir, command: Command) -> None:
    crashed(run)
    told = document(run, command)
    assert (told["run"], told["state"], told["cause"]) == (f"digits/{run.id}", "failed", "crashed")
    assert (told["last_checkpoint"], told["step_reached"], told["steps_lost"]) == (100, 170, 70)
    failure = told["first_failure"]
    assert (failure["rank"], failure["host"], failure["attempt"], failure["others"]) == (2, "node2", 2, 2)
    assert failure["traceback"].endswith("ValueError: boom 2\n")
    assert [line["attempt"] for line in told["attempts"]] == [1, 2]


def test_as_json_a_run_that_never_started_is_a_document_too(run: RunDir, command: Command) -> None:
    told = document(run, command)
    assert (told["state"], told["attempts"], told["first_failure"], told["steps_lost"]) == ("unknown", [], None, 0)


def test_a_line_with_a_number_that_is_none_is_refused_by_its_key(run: RunDir, command: Command) -> None:
    keys = attempt(1, "crashed", "give_up").to_json()
    line = json.dumps({**keys, "goodput": {"training": float("nan")}})  # NaN, as Python writes it
    (run.path / "attempts.jsonl").write_text(line + "\n")
    assert "goodput.training: NaN is not a number" in command.refuses("why", run.id, "--json")


def test_a_plain_error_is_its_own_cause_with_the_users_line(run: RunDir, command: Command) -> None:
    crashed(run)
    lines = page(run, command, "--all")
    assert "cause: ValueError: boom 2 (py.exception)" in lines
    assert "  from: rank 2 on node2, test_why.py:" in "\n".join(lines)
    assert not [line for line in lines if line.startswith("  seen:")]
    # A script whose ranks leave no report is known by its log.
    text = (run.error_file(2, 2)).read_text()
    for path in run.attempt_logs(2).glob("error-*.json"):
        path.unlink()
    run.rank_log(2, 2).write_text(f"step 1\n{json.loads(text)['traceback']}")
    lines = page(run, command, "--all")
    assert "cause: ValueError: boom 2 (py.exception)" in lines
    assert "  from: rank 2 on node2, test_why.py:" in "\n".join(lines)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def failed(run: RunDir, how: str) -> None:
    """Add an attempt that rank 1 ended."""
    run.add_attempt(
        attempt(1, "crashed", "give_up", first_failure={"rank": 1, "host": "node1", "how": how}, step_start=None)
    )


def test_the_page_names_the_cause_and_what_to_do(run: RunDir, command: Command) -> None:
    failed(run, "exit code 1")
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 1).write_text(f"step 1 loss 2.0\n{OOM}\n")
    lines = page(run, command)
    assert any(line.startswith("cause: The GPU has too little memory") for line in lines)
    assert f"  seen: {OOM}" in lines
    assert any("strategy.name=fsdp" in line for line in lines)
    told = document(run, command)["diagnosis"]
    assert (told["rule"], told["line"], told["log"]) == ("cuda.oom", OOM, str(run.rank_log(1, 1)))


def test_the_page_shows_the_last_lines_of_an_unknown_cause(run: RunDir, command: Command) -> None:
    failed(run, "exit code 3")
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 1).write_text("step 1 loss 2.0\nbye\n")
    lines = page(run, command)
    start = lines.index(f"cause: not known; the last lines of {run.rank_log(1, 1)}:")
    assert lines[start + 1 : start + 3] == ["  step 1 loss 2.0", "  bye"]
    assert document(run, command)["diagnosis"] is None


def test_no_page_calls_the_cause_of_a_kill_in_a_stop_unknown(run: RunDir, command: Command) -> None:
    failure = {"rank": 1, "host": "node1", "how": "killed by SIGKILL"}
    run.add_attempt(attempt(1, "stopped", "stop", first_failure=failure, step_start=None))
    run.write_result(RunResult.from_json({"state": "stopped", "attempts": 1, "metrics": {}, "why": "stopped"}))
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 1).write_text("step 1 loss 2.0\nsaving\n")
    lines = page(run, command)
    assert not any("not known" in line for line in lines)
    assert lines[lines.index("  its last lines:") + 2] == "    saving"


def test_a_page_promises_no_checkpoint_that_there_is_not(run: RunDir, command: Command) -> None:
    crashed(run)
    assert page(run, command)[-1].startswith("next: fix the cause, then")
    fsio.remove_tree(run.checkpoints)
    assert page(run, command)[-1].endswith(" starts over, as there is no checkpoint")


def test_any_log_is_read(tmp_path: Path, command: Command) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text(f"[rank3]: {OOM}\n")
    out = why(command, "--log", str(log))
    assert f"  seen: {OOM}\n  from: rank 3\n" in out
    told = json.loads(why(command, "--log", str(log), "--json"))
    assert (told["diagnosis"]["rule"], told["diagnosis"]["rank"], told["last_lines"]) == ("cuda.oom", 3, [])


def test_a_log_of_unknown_cause_shows_its_end(tmp_path: Path, command: Command) -> None:
    log = tmp_path / "slurm-7.out"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    out = why(command, "--log", str(log))
    assert out.startswith(f"cause: not known; the last lines of {log}:\n  line 88\n")
    assert out.endswith("  line 99\n")
    log.write_text("")
    assert why(command, "--log", str(log)) == f"cause: not known; {log} is empty\n"


def test_the_standard_input_is_a_log(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n" + OOM.encode())))
    assert "(cuda.oom)" in " ".join(why(command, "--log", "-").split())


def test_a_log_that_cannot_be_read_is_refused(tmp_path: Path, command: Command) -> None:
    for path, says in ((tmp_path / "no.log", "No such file"), (tmp_path, "Is a directory")):
        assert f"{path} cannot be read: {says}" in command.refuses("why", "--log", str(path))


@pytest.mark.parametrize("arguments", [[], ["digits", "--log", "x.log"]])
def test_a_run_or_a_log_is_asked_for(arguments: list[str], command: Command) -> None:
    assert "--log" in command.refuses("why", *arguments)


def test_why_names_who_was_slow_and_what_to_do(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    assert told(command, "why", run.id) == [
        "slow: node01 (rank 2) was 3.0 times slower than the others for 90 s",
        "slow: node03 (ranks 12-15) is 1.6 times slower than the others for 12 min",
        "  all ranks wait for the slowest: see what else runs there, and how hot it is; "
        "to leave it out: cluster.exclude=node[01,03]",
    ]


def test_after_the_end_nobody_is_slow_any_more(run: RunDir, command: Command) -> None:
    stands(run, SLOW, state="failed", ended=NOW - 120.0)
    assert told(command, "status") == []
    assert told(command, "why", run.id)[0] == (
        "slow: node03 (ranks 12-15) was 1.6 times slower than the others for 10 min"
    )


def test_the_only_node_of_a_run_cannot_be_left_out(run: RunDir, command: Command) -> None:
    stands(run, SLOW, nodes=["node03"])
    assert not [line for line in told(command, "why", run.id) if "exclude" in line]
