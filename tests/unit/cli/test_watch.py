"""`toolkit watch`: how often it asks Slurm, what it shows where, and how it ends."""

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tests.bench.listing import make_runs
from tests.waiting import wait_for
from toolkit.base import fsio
from toolkit.cli import run_rows
from toolkit.cli import watch_view as watching
from toolkit.cli.run_rows import read_rows
from toolkit.cli.watch_view import Watch
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus, SweepPoint
from toolkit.plugins.sweep.sweep_folder import ArrayRecord, Point, SweepDir, SweepRecord
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.slurm.shared_queue import SharedQueue

ARGS = Namespace(run=[], state=None, since=None, name=None, columns=None)


class Hour:
    """Runs, a fake Slurm, and watchers of them by the fake's clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.slurm = FakeSlurm(now=time.time())
        self.answer = tmp_path / "queue.json"

    def run(self, state: str, job: str | None = None) -> rundir.RunDir:
        run = rundir.create("digits")
        run.config.write_text("")
        # Its supervisor writes for as long as the test lasts.
        status = {"state": state, "attempt": 1, "job_id": job, "updated": time.time() + 1e6}
        run.write_status(RunStatus.from_json(status))
        return run

    def watcher(self) -> Watch:
        queue = SharedQueue(self.slurm, self.answer, lambda: self.slurm.now, self.slurm.advance)
        return Watch(ARGS, queue, lambda: self.slurm.now)

    def calls_of(self, *watchers: Watch, seconds: int = 3600, every_s: int = 5) -> int:
        for _ in range(seconds // every_s):
            for watcher in watchers:
                watcher.rows()
            self.slurm.advance(every_s)
        return len(self.slurm.asked_for_jobs)


@pytest.fixture
def hour(tmp_path: Path) -> Hour:
    return Hour(tmp_path)


def test_runs_that_go_on_are_watched_without_a_call_to_slurm(hour: Hour) -> None:
    for number in range(5):
        hour.run("running", str(number + 1))
    assert hour.calls_of(hour.watcher(), every_s=60) == 0


def test_waiting_runs_cost_few_calls_while_nothing_changes(hour: Hour) -> None:
    for _ in range(3):
        hour.run("queued", hour.slurm.sbatch(["job.sh"]))
    assert 5 <= hour.calls_of(hour.watcher(), every_s=10) <= 20


def test_changing_runs_and_three_terminals_cost_120_calls_an_hour_at_most(hour: Hour) -> None:
    """The answer changes every half minute. One job is unknown to Slurm and to accounting."""
    jobs = [hour.slurm.sbatch(["job.sh"]) for _ in range(3)]
    for job in (*jobs, "900000"):
        hour.run("queued", job)
    watchers = [hour.watcher() for _ in range(3)]
    for number in range(120):
        hour.slurm.estimate_start(jobs[0], hour.slurm.now + 1000 + number)
        hour.calls_of(*watchers, seconds=30, every_s=10)
    assert 60 <= len(hour.slurm.asked_for_jobs) <= 120


def test_a_new_waiting_run_is_asked_about_within_half_a_minute(hour: Hour) -> None:
    hour.run("queued", hour.slurm.sbatch(["job.sh"]))
    watcher = hour.watcher()
    hour.calls_of(watcher, seconds=1800, every_s=30)
    new = hour.run("queued", hour.slurm.sbatch(["job.sh"]))
    hour.calls_of(watcher, seconds=60, every_s=10)
    (row,) = (row for row in watcher.rows() if row.run == new.id)
    assert row.state == "queued (PENDING, Priority)"


def test_a_run_that_ends_stays_in_the_table_for_an_hour(hour: Hour) -> None:
    run = hour.run("running", "1")
    watcher = hour.watcher()
    run.write_status(RunStatus(RunState.COMPLETED, job_id="1", ended=hour.slurm.now, updated=hour.slurm.now))
    run.write_result(RunResult(RunState.COMPLETED))
    assert [row.state for row in watcher.rows()] == ["completed"]
    hour.slurm.advance(3700)
    assert watcher.rows() == []


def test_an_ended_run_is_read_again_only_with_the_next_list(hour: Hour) -> None:
    ended, going = hour.run("running", "1"), hour.run("running", "2")
    ended.write_result(RunResult(RunState.COMPLETED))
    ended.write_status(RunStatus(RunState.COMPLETED, job_id="1", ended=hour.slurm.now, updated=hour.slurm.now))
    watcher = hour.watcher()

    def states() -> list[str]:
        found = {row.run: str(row.state) for row in watcher.rows()}
        return [found[ended.id], found[going.id]]

    assert states() == ["completed", "running"]
    ended.clear_result()
    for run in (ended, going):
        run.write_status(run.status().replace(state=RunState.STOPPING, ended=None, updated=time.time() + 1e6))
    assert states() == ["completed", "stopping"]
    hour.slurm.advance(watching.LIST_EVERY_S)
    assert states() == ["stopping", "stopping"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60)])
def test_the_picture_fits_into_its_terminal(tmp_path: Path, width: int, height: int) -> None:
    make_runs(tmp_path, 100)
    rows = run_rows.with_slurm(read_rows(rundir.all_runs(tmp_path)), lambda _: {})
    lines = str(watching.render_screen(rows, (), width, height)).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines[:2])) <= max(width, 60)
    assert "101 runs: " in lines[0]


def test_a_sweep_is_one_row_until_an_hour_after_its_end(hour: Hour) -> None:
    sweep = SweepDir(rundir.runs_root() / rundir.SWEEPS / "seeds")
    job = hour.slurm.sbatch(["--array=0-1", str(sweep.path / "arrays/0001-token.sh")])
    first = hour.run("queued", f"{job}_0")
    stamp, points = first.id.rpartition("-")[0], []
    for index in range(2):
        points.append(Point(str(index), f"digits/{stamp}-0000000{index}"))
        run = sweep.run_of(points[-1])
        shutil.copytree(first.path, run.path)
        run.write_status(run.status().replace(job_id=f"{job}_{index}", updated=hour.slurm.now))
        fsio.write_json(run.path / "point.json", SweepPoint("seeds", str(index)).to_json())
    shutil.rmtree(first.path)
    array = ArrayRecord(tuple(points), "token", "slurm", is_array=True, job_id=job)
    fsio.write_json(sweep.next_array("token"), array.to_json())
    fsio.write_json(sweep.path / "sweep.json", SweepRecord("mine.yaml", hour.slurm.now, stamp).to_json())
    single, watcher = hour.run("running", "9"), hour.watcher()
    rows = watcher.rows()
    assert [row.run for row in rows] == ["seeds", single.id]
    assert rows[0].points == {"queued": 2}
    assert len(hour.slurm.asked_for_jobs) == 1
    hour.slurm.cancel(job)
    hour.slurm.advance(watching.ENDED_S + 60)
    assert [row.run for row in watcher.rows()] == [single.id]


@pytest.fixture
def live(hour: Hour) -> rundir.RunDir:
    return hour.run("running", "1")


def environ() -> dict[str, str]:
    return os.environ | {"PATH": "/nothing", "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}


def test_without_a_terminal_it_prints_once_for_each_change_and_ends_with_the_runs(live: rundir.RunDir) -> None:
    argv = [sys.executable, "-m", "toolkit", "watch", live.id]
    with subprocess.Popen(argv, env=environ(), stdout=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(120, process.kill)
        stop.start()
        try:
            assert process.stdout.readline().endswith("1 runs: 1 running\n")
            live.write_result(RunResult(RunState.COMPLETED))
            rest = process.stdout.read()
            assert process.wait() == 0
        finally:
            stop.cancel()
            process.kill()
    assert rest.count("1 runs: ") == 1
    assert "1 runs: 1 completed" in rest


class Terminal:
    """A terminal whose screen is read all the time, as a real one is. A full buffer would stop the program."""

    def __init__(self) -> None:
        self.main, self.program_side = pty.openpty()
        self.seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := os.read(self.main, 4096):
                self.seen += data

    def close(self) -> None:
        os.close(self.program_side)  # the reader then gets an error
        self._reader.join(30)
        os.close(self.main)


@pytest.mark.parametrize("how", ["q", "ctrl-c"])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(live: rundir.RunDir, how: str) -> None:
    terminal = Terminal()
    argv, side = [sys.executable, "-m", "toolkit", "watch"], terminal.program_side
    process = subprocess.Popen(
        argv,
        env=environ(),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's `&` has it ignored
    )
    try:
        wait_for(lambda: live.id.encode() in terminal.seen, 60, "the table shows the run")
        if how == "q":
            # Terminals send an arrow key as Esc and two letters. Esc alone would end the program.
            seen = len(terminal.seen)
            os.write(terminal.main, b"\x1b[A")
            wait_for(lambda: len(terminal.seen) > seen or process.poll() is not None, 60, "the next picture")
            assert process.poll() is None
            os.write(terminal.main, b"q")
        else:
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == (0 if how == "q" else 130)
    finally:
        process.kill()
        process.wait()
        terminal.close()
    assert b"Traceback" not in terminal.seen
    assert terminal.seen.rstrip().endswith((b"\x1b[?25h", b"\x1b[?1049l"))
