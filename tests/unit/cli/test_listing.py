"""The list of many runs: which are shown, in which columns. Its cache may be old, damaged or missing."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.bench.listing import make_runs
from tests.command import Command
from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.cli import columns, run_rows
from toolkit.cli.run_rows import read_rows
from toolkit.cli.selection import parse_since
from toolkit.files import rundir
from toolkit.files.run_files import JobUsage, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.records import submitted_run
from toolkit.slurm import commands


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm(now=time.time())
    monkeypatch.setattr(commands, "Slurm", lambda: slurm)
    return slurm


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write sixty runs that are a while old, and one that cannot be read."""
    make_runs(tmp_path / "runs", 60)
    return tmp_path / "runs"


def listed(command: Command, *words: str) -> list[dict[str, Any]]:
    return json.loads(command("status", "--json", *words))


def test_all_runs_are_listed_and_the_unreadable_one_says_which_file_it_is(root: Path, command: Command) -> None:
    rows = listed(command, "--all")
    assert len(rows) == 61
    (bad,) = (row for row in rows if row["state"] == "unreadable")
    assert bad["run"] == "20260101-000000-deadbeef"
    assert bad["why"].startswith("status.json cannot be read: ")
    out = command("status", "--all", "--wide")
    assert "61 runs: " in out
    (line,) = (line for line in out.splitlines() if line.startswith(bad["run"]))
    assert "status.json cannot be read: " in line


def test_what_a_job_uses_now_is_a_line_of_its_row(root: Path) -> None:
    run = rundir.all_runs(root)[7]
    used = JobUsage("7", nodes=2, cpus=8, cpu_held_s=80.0, busy_cpus=2.0, used_bytes=1 << 30, memory_bytes=16 << 30)
    run.write_status(run.status().replace(usage=used))
    assert read_rows([run])[0].using == "uses 2.0 of 8 CPUs, 1 GiB of 16 GiB of memory a node"
    gpus = {"gpus_per_node": 4, "gpu_held_s": 80.0, "busy_gpus": 2.4, "power_w": 1234.5, "unused_gpus": ("GPU 3 of b",)}
    run.write_status(run.status().replace(usage=used.replace(**gpus)))
    assert read_rows([run])[0].using.endswith(", 2.4 of 8 GPUs at 1234 W; GPU 3 of b is unused")


def test_a_run_whose_config_is_gone_is_a_row_that_says_so(root: Path, command: Command) -> None:
    run = rundir.all_runs(root)[7]
    run.config.unlink()
    (row,) = (row for row in listed(command, "--all") if row["run"] == run.id)
    assert row["why"] == "config.yaml is missing"


def test_a_file_that_cannot_be_read_at_the_moment_does_not_hide_the_other_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    stale, plain = rundir.all_runs(root)[5], fsio.read_bytes

    def read_bytes(path: Path, *most_bytes: int) -> bytes:
        if stale.path in path.parents:
            raise OSError(5, "Input/output error", str(path))
        return plain(path, *most_bytes)

    monkeypatch.setattr(fsio, "read_bytes", read_bytes)
    (row,) = (row for row in listed(command, "--all") if row["run"] == stale.id)
    assert row["state"] == "unreadable"
    assert "Input/output error" in row["why"]


def test_rows_that_processes_read_are_those_of_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, command: Command
) -> None:
    rows = listed(command, "--all")
    change_limits(runs_read_whole=10)
    assert listed(command, "--all") == rows
    assert len(rows) == 61
    # A process that the system kills costs time, and no rows.
    here, read = os.getpid(), run_rows._row
    monkeypatch.setattr(run_rows, "_row", lambda *args: read(*args) if os.getpid() == here else os._exit(1))
    assert listed(command, "--all") == rows


def test_filters_by_state_name_and_age(root: Path, command: Command) -> None:
    rows = listed(command, "--all")
    failed = [row["run"] for row in rows if row["state"] == "failed"]
    assert failed
    assert [row["run"] for row in listed(command, "--state", "failed")] == failed
    two = [row["run"] for row in rows if row["state"] in ("failed", "stopped")]
    assert [row["run"] for row in listed(command, "--state", "stopped,failed")] == two
    assert {row["name"] for row in listed(command, "--name", "gpt*")} == {"gpt-small", "gpt-large"}
    recent = listed(command, "--since", "2h")
    assert recent == [row for row in rows if row["submitted"] and row["submitted"] > time.time() - 7200]
    assert 0 < len(recent) < 61
    assert [row["run"] for row in listed(command, "--state", "unreadable")] == ["20260101-000000-deadbeef"]


def test_own_columns_hold_metrics_and_config_keys_and_sort(root: Path, command: Command) -> None:
    names = "run,optim.lr,train.seed,eval/accuracy"
    words = ["status", "--all", "--state", "over", "--columns", names, "--sort", "eval/accuracy", "--reverse"]
    head, *lines = command(*words).splitlines()
    assert head.split() == ["RUN", "OPTIM.LR", "TRAIN.SEED", "EVAL/ACCURACY"]
    cells = [line.split() for line in lines if line[:4] == "2026"]
    accuracies = [float(row[3]) for row in cells if len(row) == 4]
    assert len(accuracies) > 30
    assert accuracies == sorted(accuracies, reverse=True)
    assert {row[1] for row in cells} == {"0.1", "0.01", "0.001", "0.0100", "0.1000", "0.0010"} & {r[1] for r in cells}
    by_lr = listed(command, "--all", "--sort", "optim.lr", "--state", "over")
    rates = [row["config"]["optim.lr"] for row in by_lr]
    assert rates == sorted(rates)
    # Runs that are named stay in that order, if no other is asked for.
    two = [row["run"] for row in by_lr[:2]]
    for given in (two, two[::-1]):
        assert [row["run"] for row in listed(command, *given)] == given
        assert [row["run"] for row in listed(command, *given, "--sort", "run")] == sorted(given)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--state", "fialed"], "did you mean 'failed'?"),
        (["--since", "soon"], "--since 'soon': give a time such as 90min"),
        (["--columns", "run,los"], "did you mean 'loss'?"),
        (["--sort", "optim.lrr"], "did you mean 'optim.lr'?"),
    ],
)
def test_a_wrong_filter_or_column_is_refused_with_what_there_is(
    root: Path, words: list[str], says: str, command: Command
) -> None:
    assert says in command.refuses("status", "--all", *words)


def test_an_age_is_a_time_or_a_date() -> None:
    now = 1_800_000_000.0
    assert [parse_since("--since", text, now) for text in ("90min", "12h", "2d")] == [
        now - 5400,
        now - 43200,
        now - 172800,
    ]
    assert parse_since("--since", "2026-01-31", now) == time.mktime((2026, 1, 31, 0, 0, 0, 0, 0, -1))
    with pytest.raises(RequestError):
        parse_since("--since", "9999999999999d", now)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_listing_is_a_line_a_run_within_the_width(
    root: Path, width: int, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    runs = rundir.all_runs(root)
    head, *lines = command("status", "--all").splitlines()[: len(runs) + 1]
    assert max(map(len, [head, *lines])) <= width
    assert [line.split()[0] for line in lines] == [run.id[-8:] for run in runs]
    names = head.split()
    assert names == [name.upper() for name in columns.USUAL if name.upper() in names]
    assert "STATE" in names
    assert width < 80 or {"NAME", "STEP", "NOTE"} <= {*names}


def test_a_filter_that_no_run_matches_says_how_many_there_are(root: Path, command: Command) -> None:
    assert command("status", "--name", "nosuch") == f"none of the 61 runs under {root} matches these filters\n"


def test_notes_on_several_runs_are_cut_at_the_width_and_those_on_one_are_whole(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "rank 1 on node7: ValueError: the label 11 is not one of the 10 classes\nof sample 3 " + "x" * 90
    runs = [rundir.create("broken") for _ in range(2)]
    for run in runs:
        run.config.write_text("")
        run.write_status(RunStatus(state=RunState.FAILED))
        run.write_result(RunResult(RunState.FAILED, why=error))
    columns.print_rows(run_rows.status_rows(runs), width=80)
    _, *lines, last = capsys.readouterr().out.splitlines()
    for run, line in zip(runs, lines, strict=True):
        assert len(line) == 80
        assert line.startswith(f"{run.id[-8:]}  broken  failed ")
        assert "  ValueError: the label 11 is not" in line
        assert line.endswith("...")
    assert last == "`toolkit status RUN` shows all of one run, --wide shows all columns"
    columns.print_rows(run_rows.status_rows(runs))
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  rank")[2] for line in lines] == [" ".join(error.split()).removeprefix("rank")] * 2
    columns.print_rows(run_rows.status_rows(runs[:1]), width=80)
    told = capsys.readouterr().out
    assert error in told
    assert "\nnext: fix the cause, then `toolkit " in told


def test_many_waiting_runs_cost_one_call_and_say_what_they_wait_for(
    root: Path, slurm: FakeSlurm, command: Command
) -> None:
    run = rundir.create("waits")
    run.config.write_text("")
    job = slurm.sbatch(["job.sh"])
    slurm.estimate_start(job, time.time() + 3 * 86400)
    run.write_status(RunStatus.from_json({"state": "queued", "job_id": job, "updated": time.time()}))
    (row,) = (row for row in listed(command, "--all") if row["run"] == run.id)
    assert (row["state"], row["reason"]) == ("queued (PENDING, Resources)", "Resources")
    assert row["expected_start"] > time.time()
    assert slurm.asked_for_jobs[0] == ()
    assert len(slurm.asked_for_jobs) == 2  # the second about the jobs that this Slurm never had
    assert "waits for free nodes (Resources); Slurm expects it to start at " in command("status", run.id)
    assert len(slurm.asked_for_jobs) == 2


def test_a_silent_run_whose_owner_cannot_be_read_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for number in range(2):
        made = rundir.create(f"run{number}")
        made.config.write_text("")
        made.write_status(RunStatus.from_json({"state": "running", "updated": 1.0, "progress": {}}))
    monkeypatch.setattr(
        submitted_run, "liveness_without_job", Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    )
    lines = command("status").splitlines()
    assert len([line for line in lines if "unreadable" in line]) == 2


NOW = time.time()
NODES = [f"node{number:02}" for number in range(1, 5)]
SLOW = {"host": "node03", "ranks": [12, 13, 14, 15], "ratio": 1.61, "since": NOW - 720.0, "until": None}
RECOVERED = {"host": "node01", "ranks": [2], "ratio": 3.0, "since": NOW - 900.0, "until": NOW - 810.0}


@pytest.fixture
def run(change_limits: ChangeLimits) -> RunDir:
    change_limits(supervisor_silent_s=3600.0)  # NOW was when the tests began
    made = rundir.create("digits")
    made.config.write_text("")
    return made


def stands(run: RunDir, *stragglers: dict[str, Any], nodes: list[str] = NODES, **more: Any) -> None:
    progress = {"step": 30, "stragglers": list(stragglers)}
    run.write_status(
        RunStatus.from_json({"state": "running", "nodes": nodes, "updated": NOW, "progress": progress, **more})
    )


def told(command: Command, *argv: str) -> list[str]:
    return [line for line in command(*argv).splitlines() if "slow" in line]


def test_status_names_who_is_slow_now(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    expected = "node03 (ranks 12-15) is 1.6 times slower than the others for 12 min"
    assert told(command, "status") == [expected]


def test_status_as_json_has_all_of_them(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    (row,) = json.loads(command("status", "--json"))
    assert [(s["host"], s["slow_s"], s["until"] is None) for s in row["stragglers"]] == [
        ("node01", 90.0, False),
        ("node03", 720.0, True),
    ]


@pytest.mark.parametrize("stragglers", [[RECOVERED], []])
def test_status_says_nothing_where_nobody_is_slow(
    run: RunDir, stragglers: list[dict[str, Any]], command: Command
) -> None:
    stands(run, *stragglers)
    assert told(command, "status") == []
