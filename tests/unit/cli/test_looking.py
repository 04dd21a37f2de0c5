"""`compare`, `logs --merged`, `logs --errors`, `rm` and `gc`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.bench.listing import make_runs
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST
from toolkit.cli import main as cli
from toolkit.cli.commands.logs import LOOK_EVERY
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, FirstFailure, OwnerRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.records import submitted_run
from toolkit.run.submission import handle
from toolkit.slurm import commands
from toolkit.slurm.fake import FakeSlurm

AT = 1_795_519_584.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    return new_run("digits", "0.1")


def new_run(name: str, lr: str) -> RunDir:
    run = rundir.create(name)
    run.config.write_text(f"name: {name}\noptim: {{lr: {lr}}}\n")
    run.write_status(RunStatus(RunState.COMPLETED, attempt=1, started=AT, updated=AT))
    run.write_result(RunResult(RunState.COMPLETED, attempts=1, metrics={"eval/accuracy": float(lr)}))
    return run


def clock(seconds: float, form: str = "%H:%M:%S") -> str:
    return time.strftime(form, time.localtime(AT + seconds))


def test_a_character_that_is_half_written_is_shown_when_it_is_whole(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run.logs / "supervisor.log"
    log.parent.mkdir(exist_ok=True)
    first, second = "é".encode()[:1], "é".encode()[1:]
    log.write_bytes(b"caf" + first)
    (run.path / "result.json").unlink()

    def go_on(seconds: float) -> None:
        """Write the rest while the reader waits for it, and end the run."""
        log.write_bytes(b"caf" + first + second + b"\r\nend " + first)
        run.write_result(RunResult(RunState.COMPLETED))

    monkeypatch.setattr(time, "sleep", go_on)
    assert cli.main(["logs", run.id, "--follow"]) == EXIT_DONE
    assert capsys.readouterr().out == "café\nend \ufffd"


@pytest.mark.parametrize("prints", [True, False])
def test_following_a_script_that_has_not_started_waits_for_what_it_prints(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prints: bool
) -> None:
    run.config.write_text(f"job: {configs.FOREIGN_JOB}\nargv: [python, x.py]\n")
    (run.path / "result.json").unlink()

    def supervisor_starts(seconds: float) -> None:
        fsio.make_dir(run.logs)
        (run.logs / "supervisor.log").write_text("attempt 1: 2 ranks\n")
        monkeypatch.setattr(time, "sleep", script_runs)

    def script_runs(seconds: float) -> None:
        if prints:
            fsio.make_dir(run.attempt_logs(1))
            run.rank_log(1, 0).write_text("epoch 1\n")
        run.write_result(RunResult(RunState.COMPLETED))

    monkeypatch.setattr(time, "sleep", supervisor_starts)
    assert cli.main(["logs", run.id, "--follow"]) == EXIT_DONE
    out, err = capsys.readouterr()
    assert out == ("epoch 1\n" if prints else "attempt 1: 2 ranks\n")
    assert err == f"run {run.id} is completed: waiting for rank-0.log\n"  # as its status says


def test_following_the_log_of_a_run_without_a_process_ends(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.logs / "supervisor.log").parent.mkdir(exist_ok=True)
    (run.logs / "supervisor.log").write_text("the last line\n")
    (run.path / "result.json").unlink()
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    fsio.write_json(run.path / "owner.json", OwnerRecord(1, "", "local", socket.gethostname(), 2**22 + 1, AT).to_file())
    assert cli.main(["logs", run.id, "--follow"]) == EXIT_DONE
    assert capsys.readouterr().out == "the last line\n"
    assert 0 < len(naps) <= 2 * LOOK_EVERY


# ------------------------------------------------------------------------------------------------------------- compare


# ---------------------------------------------------------------------------------------------------------------- logs


def attempt_with_logs(run: RunDir) -> None:
    logs = run.attempt_logs(1)
    logs.mkdir(parents=True)
    full = "%Y-%m-%d %H:%M:%S"
    told = ((-99, "of an earlier attempt"), (1, "starts"), (9, "ends"))
    text = "".join(f"{clock(at, full)},500 INFO {what}\n" for at, what in told)
    (run.logs / "supervisor.log").write_text(text)
    (logs / "rank-0.log").write_text(
        f"before any time\n{clock(2)} rank 0/2 n1 INFO step 1\nprinted\n{clock(8)} INFO last\n"
    )
    (logs / "rank-1.log").write_text(f"{clock(3)} rank 1/2 n2 INFO step 1\nTraceback\n")
    (logs / "rank-10.log").write_text(f"{clock(4)} ten\n")


def test_merged_logs_are_in_the_order_of_time_with_their_writers(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt_with_logs(run)
    assert cli.main(["logs", run.id, "--merged"]) == EXIT_DONE
    lines = [line.split(" | ", 1) for line in capsys.readouterr().out.splitlines()]
    told = [(who.strip(), text.split()[-1]) for who, text in lines]
    assert told == [
        ("rank 0", "time"),
        ("supervisor", "starts"),
        ("rank 0", "1"),
        ("rank 0", "printed"),
        ("rank 1", "1"),
        ("rank 1", "Traceback"),
        ("rank 10", "ten"),
        ("rank 0", "last"),
        ("supervisor", "ends"),
    ]


def test_merged_logs_go_on_after_midnight(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run.attempt_logs(1)
    logs.mkdir(parents=True)
    midnight = time.mktime((2026, 11, 25, 0, 0, 0, 0, 0, -1))
    run.write_status(RunStatus(RunState.COMPLETED, attempt=1, started=midnight - 60, updated=midnight))
    (logs / "rank-0.log").write_text("23:59:30 a\n00:00:30 d\n")
    (logs / "rank-1.log").write_text("23:59:40 b\n00:00:20 c\n")
    assert cli.main(["logs", run.id, "--merged"]) == EXIT_DONE
    assert [line[-1] for line in capsys.readouterr().out.splitlines()] == ["a", "b", "c", "d"]


def error(run: RunDir, rank: int, at: float, text: str) -> None:
    said = {
        "rank": rank,
        "host": f"n{rank}",
        "time": at,
        "type": "ValueError",
        "message": text,
        "traceback": f"at {text}",
    }
    run.error_file(1, rank).write_text(json.dumps({**said, "exit_code": 1}))


def test_errors_begin_with_the_rank_that_failed_first(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    attempt_with_logs(run)
    error(run, 0, AT + 5, "late")
    error(run, 10, AT + 4, "early")
    assert cli.main(["logs", run.id, "--errors"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 10 on n10 failed first: ")
    assert lines[1] == "  at early"
    assert lines[2].startswith("rank 0 on n0 failed later: ")


def test_a_rank_that_was_killed_shows_its_last_lines_before_the_others_errors(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt_with_logs(run)
    error(run, 0, AT + 5, "connection reset")
    failure = FirstFailure(1, "n1", "killed by SIGKILL")
    run.add_attempt(AttemptRecord(1, ("n1",), AT, AT + 9, "crashed", "give_up", first_failure=failure))
    assert cli.main(["logs", run.id, "--errors"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 1 on n1 failed first: killed by SIGKILL"
    assert lines[2] == "  Traceback"
    assert lines[3].startswith("rank 0 on n0 failed later: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--merged", "--rank", "1"], "go only with --attempt"),
        (["--merged", "--attempt", "7"], "no log of a rank of attempt 7"),
        (["--attempt", "1"], "--attempt goes with --rank, --merged or --errors"),
    ],
)
def test_logs_refuses_what_has_no_meaning(
    run: RunDir, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["logs", run.id, *words]) == EXIT_REQUEST
    assert says in capsys.readouterr().err


def test_a_run_without_failures_says_so(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", run.id, "--errors"]) == EXIT_DONE
    assert capsys.readouterr().out == "no rank of attempt 1 has failed\n"


# ----------------------------------------------------------------------------------------------------------- rm and gc


def test_a_live_run_is_not_removed_and_neither_are_those_beside_it(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = new_run("lives", "0.1")
    lives.clear_result()
    lives.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
    assert cli.main(["rm", run.id, lives.id]) == EXIT_REQUEST
    assert f"run {lives.id} is running; when it has ended it can be removed" in capsys.readouterr().err
    assert run.path.exists()
    assert cli.main(["rm", run.id]) == EXIT_DONE
    assert not run.path.exists()
    assert lives.path.exists()
    assert [each.id for each in rundir.all_runs()] == [lives.id]


@pytest.mark.parametrize("words", [["rm"], ["gc", "--older-than", "30d", "--remove"]])
def test_the_next_removal_completes_one_that_was_interrupted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    other, path = new_run("digits", "0.1"), run.path
    with monkeypatch.context() as patch:
        patch.setattr(fsio, "remove_tree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli.main(["rm", run.id]) != EXIT_DONE
    (grave,) = path.parent.glob(".removed-*")
    assert cli.main([*words, *([other.id] if words == ["rm"] else [])]) == EXIT_DONE
    assert not grave.exists()


@pytest.mark.parametrize("kind", ["project", "link"])
def test_a_folder_that_is_no_runs_own_is_not_removed(
    run: RunDir, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "project":
        odd = tmp_path / "runs/digits/project"
        odd.mkdir()
        for name in ("config.yaml", "result.json", "status.json"):
            (odd / name).write_bytes((run.path / name).read_bytes())
        says = "is not named as the folder of a run is"
    else:
        odd = run.path.with_name("20260101-000000-0000aaaa")
        real = tmp_path / run.id
        run.path.rename(real)
        odd.symlink_to(real)
        run, says = new_run("digits", "0.1"), "is a symbolic link"
    # old enough for gc, which must leave it alone too
    for path in (odd.resolve(), *odd.resolve().rglob("*")):
        os.utime(path, (1e9, 1e9))
    assert cli.main(["rm", run.id, str(odd)]) == EXIT_REQUEST
    err = capsys.readouterr().err
    assert says in err
    assert "it is not removed" in err
    assert cli.main(["gc", "--older-than", "30d", "--remove"]) == EXIT_DONE
    assert run.config.exists()
    assert (odd / "config.yaml").exists()


def test_a_run_that_writes_is_not_removed_where_slurm_does_not_know_its_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job belongs to another cluster on the same file system."""
    for module in (handle, submitted_run):
        monkeypatch.setattr(module, "Slurm", FakeSlurm)
    monkeypatch.setattr(commands, "Slurm", FakeSlurm)
    run.clear_result()
    now = time.time()
    run.write_owner(OwnerRecord(1, "token", "slurm", "node1", 1, now - 900, jobs=("777",), follow_ups=()))
    run.write_status(RunStatus(RunState.RUNNING, job_id="777", updated=now - 200))
    assert cli.main(["rm", run.id]) == EXIT_REQUEST
    assert f"run {run.id} is running? (silent); when it has ended" in capsys.readouterr().err
    run.write_status(RunStatus(RunState.RUNNING, job_id="777", updated=now - 400))
    assert cli.main(["rm", run.id]) == EXIT_DONE
    assert not run.path.exists()


def test_a_run_whose_weights_a_waiting_run_begins_with_is_not_removed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "step-1/manifest.json").write_text("{}")
    user = new_run("user", "0.1")
    result = user.result()
    assert result is not None
    for source in (run.id, "digits", str(run.checkpoints / "step-1")):
        user.config.write_text(f"name: user\nmodel: {{init_from: {source}}}\n")
        user.clear_result()
        user.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
        assert cli.main(["rm", run.id]) == EXIT_REQUEST
        assert f"run {user.id}, which has not ended, needs run {run.id} (model.init_from" in capsys.readouterr().err
    # old enough for gc, which must leave it alone too
    for path in run.path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert cli.main(["gc", "--older-than", "30d", "--remove"]) == EXIT_DONE
    assert run.config.exists()
    user.write_result(result)
    assert cli.main(["rm", run.id]) == EXIT_DONE


def test_gc_sums_the_disk_as_du_does_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    make_runs(tmp_path / "runs", 5)
    big = rundir.all_runs()[2]
    (big.checkpoints / "step-1").mkdir()
    (big.checkpoints / "step-1/data").write_bytes(b"x" * 300_000)
    os.link(big.checkpoints / "step-1/data", big.path / "linked")
    assert cli.main(["gc", "--json"]) == EXIT_DONE
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["run"] == big.id
    files = "find \"$0\" -type f -printf '%D %i %b\\n' | sort -u | awk '{sum += $3} END {print 512 * sum}'"
    done = subprocess.run(["sh", "-c", files, str(big.path)], capture_output=True, text=True, check=True)
    assert rows[0]["bytes"] == float(done.stdout)
    assert len(rundir.all_runs()) == 6


def test_gc_tells_what_a_purge_takes_and_removes_only_what_is_over_and_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    old, live, new = (new_run(name, "0.1") for name in ("old", "live", "new"))
    live.clear_result()
    live.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
    month = time.time() - 40 * 86400
    for run in (old, live):
        for path in run.path.rglob("*"):
            os.utime(path, (month, month))
    os.utime(old.config, (time.time(), month))  # as if it were read just now
    assert cli.main(["gc", "--older-than", "30d", "--json"]) == EXIT_DONE
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    files = sum(path.is_file() for path in old.path.rglob("*"))
    assert rows["old"]["purged_files"] == files - 1
    assert {name: row["removed"] for name, row in rows.items()} == {"old": True, "live": False, "new": False}
    assert old.path.exists()
    assert cli.main(["gc", "--older-than", "30d", "--remove"]) == EXIT_DONE
    assert "1 runs that are over have not changed for 30d" in capsys.readouterr().out
    assert {run.id for run in rundir.all_runs()} == {live.id, new.id}


def test_gc_removes_nothing_without_an_age(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gc", "--remove"]) == EXIT_REQUEST
    assert "--remove goes with --older-than" in capsys.readouterr().err
    assert run.path.exists()
