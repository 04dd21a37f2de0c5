"""Runs are found by id, prefix, name and path. A restarted job finds its run."""

import errno
import itertools
import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError, DamagedFileError, RunNotFoundError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.files import error_file, records, rundir
from toolkit.files.records import VERSION, FileRecord, SchemaError
from toolkit.files.run_files import (
    AttemptRecord,
    DependencyRecord,
    OwnerRecord,
    RunProgress,
    RunResult,
    RunState,
    RunStatus,
    RunUsage,
    Submission,
    SweepPoint,
)
from toolkit.files.rundir import RunDir
from toolkit.metrics.sinks import JsonlSink, TensorBoardSink
from toolkit.nodes.start.children import open_log
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt import error_files
from toolkit.run.job import nodes
from toolkit.run.prepare import snapshot
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.requeue import follow_up
from toolkit.slurm.jobs import JobRow


@pytest.fixture
def runs(tmp_path: Path) -> list[rundir.RunDir]:
    made = []
    for number, name in enumerate(["digits", "digits", "mnist"]):
        path = tmp_path / name / f"2026010{number + 1}-000000-aaaa000{number}"
        path.mkdir(parents=True)
        (path / "config.yaml").write_text("")
        made.append(rundir.RunDir(path))
    return made


def test_a_run_is_found_by_id_prefix_name_and_path(runs: list[rundir.RunDir], tmp_path: Path) -> None:
    assert rundir.find(runs[0].id, tmp_path) == runs[0]
    assert rundir.find("20260103", tmp_path) == runs[2]
    assert rundir.find("aaaa0001", tmp_path) == runs[1]  # as narrow tables write it
    assert rundir.find("digits", tmp_path) == runs[1]
    assert rundir.find(str(runs[0].path)) == runs[0]
    # That of a script with TOOLKIT_RUN_DIR, by any name.
    elsewhere = rundir.RunDir(tmp_path / "elsewhere" / "mine")
    elsewhere.path.mkdir(parents=True)
    (elsewhere.path / "owner.json").write_text("{}")
    assert rundir.find(str(elsewhere.path)) == elsewhere
    assert rundir.find(f"digits/{runs[0].id}", tmp_path) == runs[0]


def test_an_ambiguous_prefix_lists_the_ids(runs: list[rundir.RunDir], tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=f"{runs[0].id}.*{runs[2].id}"):
        rundir.find("202601", tmp_path)


def test_an_empty_name_is_not_the_only_run_nor_the_current_folder(
    runs: list[rundir.RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from an unset variable of the shell: `toolkit rm "$RUN"` had removed the only run."""
    for run in runs[1:]:
        (run.path / "config.yaml").unlink()
    monkeypatch.chdir(runs[0].path)
    with pytest.raises(RunNotFoundError, match="empty; is a variable"):
        rundir.find("", tmp_path)


def test_the_run_of_the_later_moment_is_the_newest_when_clocks_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    before = 1_792_888_200.0  # 02:30 in summer time; half an hour later it is 02:00
    moments = iter((before, before + 1860))
    monkeypatch.setattr(time, "time", lambda: next(moments))
    try:
        made = [rundir.create("name", tmp_path) for _ in range(2)]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert sorted(made, key=lambda run: run.id) == made


def test_a_misspelt_name_gets_the_nearest(runs: list[rundir.RunDir], tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="did you mean 'digits'"):
        rundir.find("digit", tmp_path)


def test_no_runs_at_all_says_where_was_looked(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=str(tmp_path)):
        rundir.find("x", tmp_path)


def test_a_restarted_job_finds_its_run_and_no_other(runs: list[rundir.RunDir], tmp_path: Path) -> None:
    rundir.remember_job(runs[0], "box-5_1")
    rundir.remember_job(runs[2], "box-5_2")
    assert rundir.run_of_job("box-5_1", tmp_path) == runs[0]
    assert rundir.run_of_job("box-5_2", tmp_path) == runs[2]
    assert rundir.run_of_job("box-5", tmp_path) is None


@pytest.mark.parametrize("exists", [False, True])
def test_git_sees_nothing_of_a_folder_for_runs_that_was_made_for_them(tmp_path: Path, exists: bool) -> None:
    root = tmp_path / "runs"
    if exists:
        (root / "notes").mkdir(parents=True)
    run = rundir.create("name", root)
    rundir.remember_job(run, "box-5")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    said = subprocess.run(
        ["git", "-C", str(tmp_path), "status", "--short"], check=True, capture_output=True, text=True
    ).stdout
    assert (said == "") is not exists, "a folder that was there before is its owner's"


def test_a_new_run_is_private_and_distinct(tmp_path: Path) -> None:
    made = [rundir.create("name", tmp_path) for _ in range(20)]
    assert len({run.id for run in made}) == 20
    assert all(run.path.stat().st_mode & 0o777 == 0o700 for run in made)


def test_three_hundred_runs_of_one_second_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start on as many nodes: each looks before the others have made their folders.

    With names of four digits, two would agree in half of all cases.
    """
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    monkeypatch.setattr(Path, "exists", lambda _: False)
    digits = itertools.count()
    monkeypatch.setattr(secrets, "token_hex", lambda bytes_: f"{next(digits) // 2:0{2 * bytes_}x}")
    with ThreadPoolExecutor(8) as elements:
        runs = list(elements.map(lambda _: rundir.create("name", tmp_path), range(300)))
    assert len({run.path for run in runs}) == 300
    assert len(runs[0].id.rpartition("-")[2]) == 8


#: What a node that died may leave of a file that was not flushed to disk.
TORN = ["", "{", "\0" * 50, "\x9f", '{"state": "runn']


@pytest.mark.parametrize("text", TORN)
def test_a_torn_status_is_empty_and_says_why(run: RunDir, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The status is never flushed to disk.

    After a power cut it may be empty, and the requeued job must start all the same.
    """
    for name in ("status.json", "usage.json"):
        (run.path / name).write_bytes(text.encode("latin-1"))
    status = run.status()
    assert status == RunStatus(why=status.why)
    assert f"{run.path / 'status.json'} cannot be read: " in (status.why or "")
    assert run.usage() == RunUsage()
    for _ in range(3):
        run.status()
    named = [record.getMessage() for record in caplog.records]
    assert [line.partition(" cannot")[0] for line in named] == [
        str(run.path / "status.json"),
        str(run.path / "usage.json"),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("status", text) for text in ("[]", '"text"', "[" * 5000, '{"state": 5}')),
        *(("result", text) for text in (*TORN, "[]", "{}", '{"state": "completing"}')),
    ],
)
def test_a_status_or_result_of_another_shape_is_refused(run: RunDir, name: str, text: str) -> None:
    (run.path / f"{name}.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedFileError, match=rf"{name}\.json cannot be read: .*; fix it, or move it away"):
        getattr(run, name)()


def attempt(number: int) -> dict[str, object]:
    times = {"started": "2026-01-01T00:00:00.000+00:00", "ended": "2026-01-01T00:01:00.000+00:00"}
    return {"attempt": number, **times, "cause": "crashed", "decision": "restart", "nodes": "node1"}


@pytest.mark.parametrize("line", [b"\0" * 300, b'{"attempt": 2', b'{"attempt": 2, "nodes": "n\xc3'])
def test_a_last_line_that_was_cut_off_is_left_out_and_its_number_is_not_given_again(run: RunDir, line: bytes) -> None:
    run.add_attempt(AttemptRecord.from_json(attempt(1)))
    with (run.path / "attempts.jsonl").open("ab") as file:
        file.write(line)  # attempt 2's
    fsio.make_dir(run.attempt_logs(2))
    run.rank_log(2, 0).touch()
    assert [line.attempt for line in run.attempts()] == [1]
    assert run.next_attempt(run.attempts()) == 3
    run.add_attempt(AttemptRecord.from_json(attempt(3)))
    assert [line.attempt for line in run.attempts()] == [1, 3]


def test_a_last_line_that_lacks_only_its_line_break_counts(run: RunDir) -> None:
    (run.path / "attempts.jsonl").write_text(json.dumps(attempt(1)))
    assert [line.attempt for line in run.attempts()] == [1]
    run.add_attempt(AttemptRecord.from_json(attempt(2)))
    assert [line.attempt for line in run.attempts()] == [1, 2]


@pytest.mark.parametrize("line", [b"garbage\n", b"[2]\n", b'{"attempt": 2}\n', b"\n", b"[2]"])
def test_any_other_line_that_does_not_fit_is_refused_by_its_number(run: RunDir, line: bytes) -> None:
    run.add_attempt(AttemptRecord.from_json(attempt(1)))
    with (run.path / "attempts.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(DamagedFileError, match=r"attempts\.jsonl, (line 2|the last line), cannot be read: "):
        run.attempts()


def test_thousands_of_nodes_make_a_short_line(run: RunDir) -> None:
    nodes = tuple(f"node{number}" for number in range(10_000))
    run.add_attempt(AttemptRecord(1, nodes, 0.0, 60.0, "crashed", "restart"))
    assert (run.path / "attempts.jsonl").stat().st_size < 600
    (line,) = run.attempts()
    assert line.nodes == nodes


@pytest.mark.parametrize("nodes", ["n[1", "n[5-1]", 7, ["n1"], "n[1-9999999]"])
def test_what_is_no_host_list_is_named(run: RunDir, nodes: object) -> None:
    fsio.append_json_line(run.path / "attempts.jsonl", {**attempt(1), "nodes": nodes})
    with pytest.raises(DamagedFileError, match=r"nodes: .* is not a host list"):
        run.attempts()


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"\xff/x", b"runs/digits/1"])
def test_a_damaged_note_of_a_jobs_run_is_an_error_and_no_new_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".jobs").mkdir()
    (tmp_path / ".jobs/box-5").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"\.jobs/box-5 is damaged: .*toolkit resume RUN"):
        rundir.run_of_job("box-5", tmp_path)


@pytest.mark.parametrize("asks", ["the run of a job", "metrics"])
def test_a_file_server_that_is_away_is_not_a_missing_file(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """A job would start a new run, or its metrics be cut to nothing. On Python 3.14 every error is a False."""
    rundir.remember_job(run, "box-5")
    metrics = run.path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    stat = Path.stat

    def away(path: Path, **options: bool) -> object:
        if path in (run.path, metrics):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", away)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    calls = {
        "metrics": lambda: JsonlSink(metrics, 1),
        "the run of a job": lambda: rundir.run_of_job("box-5", run.path.parents[1]),
    }
    with pytest.raises(OSError, match="Input/output"):
        calls[asks]()


AWAY: dict[str, Callable[[RunDir], object]] = {
    "a request is withdrawn": lambda run: user_requests.answer(run, "1-1", user_requests.Answer()),
    "a request is answered": lambda run: user_requests.read_request(run, "1-1"),
    "a submission's new settings": lambda run: ownership.adopt_config(run, "token"),
    "who submitted": lambda run: Claim(run, run.owner()).note_command("job.sh"),
    "what an option of the config asks for": lambda run: [*follow_up.options_of_job({}, JobRow("1", "RUNNING"), run)],
    "whether a job has started": lambda run: follow_up.outcome_of("1", run, failed_job()),
    "the sources": lambda run: snapshot.acting_on(run, "job", []),
    "the newest owner": lambda run: run.last_owner_number(),
    "the number of the next attempt": lambda run: run.next_attempt([]),
    "what ranks say of their ends": lambda run: error_files.read_error_files(run.attempt_logs(1)),
    "the arrays of a sweep": lambda run: SweepDir(run.path).arrays(),
}


def failed_job() -> FakeSlurm:
    slurm = FakeSlurm()
    slurm.start(slurm.sbatch(["--no-requeue", "job.sh"]))
    slurm.finish("1", exit_code=1)
    return slurm


@pytest.mark.parametrize("what", AWAY)
def test_nothing_is_decided_by_a_file_server_that_is_away(
    run: RunDir, what: str, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """On Python 3.14 a missing config was the defaults, and the follow-up job lost its ``cluster.extra``."""
    change_limits(give_up_after_s=0.0)
    run.write_owner(OwnerRecord(1, "token", "slurm", host="node1", pid=1, time=0.0))
    kept = {run.path: None, run.path / "owner.json": None}
    stat = Path.stat

    def away(path: Path, **options: bool) -> object:
        if path.is_relative_to(run.path) and path not in kept:
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", away)
    for name in ("exists", "is_file", "is_dir"):
        monkeypatch.setattr(Path, name, lambda path: False)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))  # as from Python 3.13 on
    monkeypatch.setattr(Path, "iterdir", away)
    with pytest.raises(OSError, match="Input/output"):
        AWAY[what](run)


def test_a_file_replaced_on_another_node_is_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[OSError | bytes] = iter([OSError(errno.ESTALE, "Stale file handle"), b'{"state": "running"}'])

    def read(path: Path, most_bytes: int) -> bytes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(fsio, "read_bytes", read)
    assert run.status() == RunStatus(state=RunState.RUNNING)


def _write_error(run: RunDir) -> None:
    error_file.write(ValueError("x"), 3)


def _part(run: RunDir) -> Path:
    return run.checkpoints / "step-00000005.tmp-1a2b3c4d/rank-00001.safetensors"


@pytest.mark.parametrize("is_mount_point", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda run: run.claim_owner_number(1), id="an owner"),
        pytest.param(_write_error, id="a rank's error file"),
        pytest.param(lambda run: open_log(run.rank_log(1, 0)), id="a rank's log"),
        pytest.param(lambda run: open_log(run.logs / "agent-node1.log"), id="an agent's log"),
        pytest.param(lambda run: JsonlSink(run.tensorboard / "metrics.jsonl", None), id="metrics"),
        pytest.param(lambda run: TensorBoardSink(run.tensorboard), id="TensorBoard"),
        pytest.param(lambda run: CheckpointFolder(run.checkpoints).write(_part(run), []), id="a rank's part"),
        pytest.param(lambda run: CheckpointFolder(run.checkpoints).begin(5), id="a checkpoint"),
        pytest.param(lambda run: rundir.remember_job(run, "box-1"), id="which job serves it"),
    ],
)
def test_a_run_folder_that_is_away_is_not_made_anew(
    tmp_path: Path, write: Callable[[RunDir], object], is_mount_point: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lie on the disk below. The run's later jobs would not see the files of the mounted one."""
    run = rundir.create("test", tmp_path / "mounted")
    monkeypatch.setenv(rundir.RUN_DIR_VARIABLE, str(run.path))
    shutil.rmtree(tmp_path / "mounted")
    if is_mount_point:
        run.path.parent.mkdir(parents=True)
    with suppress(OSError, CheckpointError):
        write(run)
    assert not run.path.exists()
    assert (tmp_path / "mounted").exists() == is_mount_point


def test_an_id_tells_when_its_run_was_submitted(tmp_path: Path) -> None:
    before = int(time.time())
    moment = rundir.time_of_id(rundir.create("digits", tmp_path).id)
    assert before <= moment <= time.time()
    assert rundir.time_of_id("of another form") is None


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
    "degraded_nodes": {"node3": "hot"},
    "started": 1.0,
    "start": START,
    "updated": 2.0,
    "stop": "user",
    "progress": {"step": 5, "loss": 0.5, "stragglers": [STRAGGLER], "metrics": {"eval/loss": None}},
    "printed": {"step": 5, "checkpoint": "out/last.ckpt"},
    "submitted": 1.0,
    "goodput": {"training": 1.0},
    "start_up": {"queue": 1.0},
    "why": "rank 1: killed",
    "staging": ["/venv (1 GiB): nodes with a copy: 2 of 2, all from an earlier start"],
    "ended": 3.0,
    "supervised": True,
    "usage": USAGE,
    "interrupted": {"attempt": 3},
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
    "after.json": (DependencyRecord, AFTER, RunDir.dependencies),
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
        DamagedFileError, match=f"^{run.path / name}{line} cannot be read: {key}.*; fix it, or move it away$"
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
    assert (result.why, result.metrics) == ("a?b?c", {"caf?": 1.0})


def test_messages_are_read_like_files() -> None:
    assert RunProgress.from_json({"step": 5, "loss": float("nan"), "time": 1.0}).loss is None
    with pytest.raises(SchemaError, match="epoch: -1 is not a count"):
        RunProgress.from_json({"step": 5, "epoch": -1})
    assert records.decode(list[list[int]], [[1], []]) == [[1], []]
    with pytest.raises(SchemaError, match=r"^\[1\]\[0\]: \"x\" is not a count"):
        records.decode(list[list[int]], [[1], ["x"]])


def test_a_run_is_over_in_a_state_that_only_a_user_ends() -> None:
    over = {"completed", "stopped", "failed", "cancelled"}
    assert {state for state in RunState if state.is_over} == over
    assert {state for state in RunState if state.is_waiting} == {"queued", "requeued"}


def test_a_request_and_a_bad_node_are_records_too(run: RunDir) -> None:
    user_requests.record_intent(run, user_requests.Intent.CANCEL)
    written = json.loads((run.path / "requests/intent.json").read_text())
    assert (written["version"], written["intent"], sorted(written)) == (1, "cancel", ["intent", "time", "version"])
    nodes.remember(run, "node1", "sick")
    nodes.remember(run, "node2", "dead")
    kept = json.loads((run.path / "nodes.json").read_text())
    assert kept["node1"]["why"] == "sick"
    assert kept["node2"].keys() == {"why", "since", "is_drained"}
    put(run, "nodes.json", {"node1": {"why": 5, "since": 1.0}})
    with pytest.raises(DamagedFileError, match=r"nodes\.json cannot be read: node1\.why: 5 is not text"):
        nodes.remembered(run)
