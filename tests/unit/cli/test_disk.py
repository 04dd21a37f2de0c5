"""`toolkit rm` and `toolkit gc`: what may be removed, and what takes the disk."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.bench.listing import make_runs
from tests.command import Command
from tests.file_operations import file_operations, killed_at
from tests.unit.cli.test_logs_command import new_run
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.submission import handle
from toolkit.slurm import commands


@pytest.fixture
def run() -> RunDir:
    return new_run("digits", "0.1")


def test_a_live_run_is_not_removed_and_neither_are_those_beside_it(run: RunDir, command: Command) -> None:
    lives = new_run("lives", "0.1")
    lives.clear_result()
    lives.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
    assert f"run {lives.id} is running; when it has ended it can be removed" in command.refuses("rm", run.id, lives.id)
    assert run.path.exists()
    command("rm", run.id)
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


@pytest.mark.parametrize("words", [["rm"], ["gc", "--older-than", "30d", "--remove"]])
def test_a_run_whose_removal_is_killed_anywhere_is_whole_or_gone(command: Command, words: list[str]) -> None:
    def files_of(run: RunDir) -> dict[str, bytes]:
        return {str(path.relative_to(run.path)): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}

    def old_run() -> RunDir:
        run = new_run("digits", "0.1")
        (run.checkpoints / "step-00000001").mkdir()
        (run.checkpoints / "step-00000001/manifest.json").write_text("{}")
        for path in (run.path, *run.path.rglob("*")):
            os.utime(path, (1e9, 1e9))
        return run

    seen, states = list[str](), list[bool]()
    with file_operations(lambda name, path: seen.append(name)):
        old = old_run()
        seen.clear()
        command(*words, *([old.id] if words == ["rm"] else []))
    assert seen.count("unlink") > 3
    for k in range(len(seen)):
        old = old_run()
        before = files_of(old)
        with killed_at(k):
            cli.main([*words, *([old.id] if words == ["rm"] else [])])
        is_there = old.id in {run.id for run in rundir.all_runs()}
        assert files_of(old) == (before if is_there else {})
        states.append(is_there)
        other = old if is_there else old_run()
        command(*words, *([other.id] if words == ["rm"] else []))
        assert not any(old.path.parent.iterdir())
    assert states == sorted(states, reverse=True)
    assert {*states} == {True, False}


@pytest.mark.parametrize("kind", ["project", "link"])
def test_a_folder_that_is_no_runs_own_is_not_removed(run: RunDir, tmp_path: Path, kind: str, command: Command) -> None:
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
    err = command.refuses("rm", run.id, str(odd))
    assert says in err
    assert "it is not removed" in err
    command("gc", "--older-than", "30d", "--remove")
    assert run.config.exists()
    assert (odd / "config.yaml").exists()


def test_a_run_that_writes_is_not_removed_where_slurm_does_not_know_its_job(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Its job belongs to another cluster on the same file system."""
    for module in (handle, commands):
        monkeypatch.setattr(module, "Slurm", FakeSlurm)
    run.clear_result()
    now = time.time()
    run.write_owner(OwnerRecord(1, "token", "slurm", "node1", 1, now - 900, jobs=("777",), follow_ups=()))
    run.write_status(RunStatus(RunState.RUNNING, job_id="777", updated=now - 200))
    assert f"run {run.id} is running? (silent); when it has ended" in command.refuses("rm", run.id)
    run.write_status(RunStatus(RunState.RUNNING, job_id="777", updated=now - 400))
    command("rm", run.id)
    assert not run.path.exists()


def test_a_run_whose_weights_a_waiting_run_begins_with_is_not_removed(run: RunDir, command: Command) -> None:
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "step-1/manifest.json").write_text("{}")
    user = new_run("user", "0.1")
    result = user.result()
    assert result is not None
    for source in (run.id, "digits", str(run.checkpoints / "step-1")):
        user.config.write_text(f"name: user\nmodel: {{init_from: {source}}}\n")
        user.clear_result()
        user.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
        err = command.refuses("rm", run.id)
        assert f"run {user.id}, which has not ended, needs run {run.id} (model.init_from" in err
    # old enough for gc, which must leave it alone too
    for path in run.path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    command("gc", "--older-than", "30d", "--remove")
    assert run.config.exists()
    # Whether a run has ended that cannot be read is not known. It keeps no other run.
    user.after_path.write_text("[]")
    assert f"run {user.id}, which cannot be read, needs run {run.id}" in command.refuses("rm", run.id)
    command("rm", new_run("other", "0.1").id)
    user.after_path.unlink()
    user.write_result(result)
    command("rm", run.id)


def test_gc_sums_the_disk_as_du_does_and_changes_nothing(tmp_path: Path, command: Command) -> None:
    make_runs(tmp_path / "runs", 5)
    big = rundir.all_runs()[2]
    (big.checkpoints / "step-1").mkdir()
    (big.checkpoints / "step-1/data").write_bytes(b"x" * 300_000)
    os.link(big.checkpoints / "step-1/data", big.path / "linked")
    rows = json.loads(command("gc", "--json"))
    assert rows[0]["run"] == big.id
    files = "find \"$0\" -type f -printf '%D %i %b\\n' | sort -u | awk '{sum += $3} END {print 512 * sum}'"
    done = subprocess.run(["sh", "-c", files, str(big.path)], capture_output=True, text=True, check=True)
    assert rows[0]["bytes"] == float(done.stdout)
    assert len(rundir.all_runs()) == 6


def test_gc_tells_what_a_purge_takes_and_removes_only_what_is_over_and_old(command: Command) -> None:
    old, live, new = (new_run(name, "0.1") for name in ("old", "live", "new"))
    live.clear_result()
    live.write_status(RunStatus(RunState.RUNNING, pid=os.getpid(), host=os.uname().nodename, updated=time.time()))
    month = time.time() - 40 * 86400
    for run in (old, live):
        for path in run.path.rglob("*"):
            os.utime(path, (month, month))
    os.utime(old.config, (time.time(), month))  # as if it were read just now
    rows = {row["name"]: row for row in json.loads(command("gc", "--older-than", "30d", "--json"))}
    files = sum(path.is_file() for path in old.path.rglob("*"))
    assert rows["old"]["purged_files"] == files - 1
    assert {name: row["removed"] for name, row in rows.items()} == {"old": True, "live": False, "new": False}
    assert old.path.exists()
    assert "1 runs that are over have not changed for 30d" in command("gc", "--older-than", "30d", "--remove")
    assert {run.id for run in rundir.all_runs()} == {live.id, new.id}


def test_gc_removes_nothing_without_an_age(run: RunDir, command: Command) -> None:
    assert "--remove goes with --older-than" in command.refuses("gc", "--remove")
    assert run.path.exists()
