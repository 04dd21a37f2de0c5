"""`toolkit logs`: followed, merged, and the errors alone."""

import io
import json
import socket
import subprocess
import sys
import time

import pytest

from tests.command import Command
from tests.process_limits import ChangeLimits
from toolkit import config as configs
from toolkit.base import fsio, terminal
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.cli.commands.logs import LOOK_EVERY
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, FirstFailure, OwnerRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir

AT = 1_795_519_584.0


@pytest.fixture
def run() -> RunDir:
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
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
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
    assert command("logs", run.id, "--supervisor", "--follow") == "café\nend \ufffd"


def test_what_rank_0_prints_comes_first_and_the_supervisors_log_where_it_has_none(
    run: RunDir, command: Command
) -> None:
    fsio.make_dir(run.logs)
    (run.logs / "supervisor.log").write_text("the nodes were bad\n")
    assert command("logs", run.id) == "the nodes were bad\n"
    for number in (1, 2):
        fsio.make_dir(run.attempt_logs(number))
        run.rank_log(number, 0).write_text(f"of attempt {number}\n")
    assert command("logs", run.id) == "of attempt 2\n"
    assert command("logs", run.id, "--attempt", "1") == "of attempt 1\n"
    assert command("logs", run.id, "--supervisor") == "the nodes were bad\n"


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_the_last_lines_are_those_of_tail(
    run: RunDir, capsys: pytest.CaptureFixture[str], change_limits: ChangeLimits, end: str, piece: int
) -> None:
    change_limits(log_read_bytes=piece)
    fsio.make_dir(run.attempt_logs(1))
    log = run.rank_log(1, 0)
    for text in ("", "x", "\n", "\n\n", "one\n\nthree is longer than a piece\nfour"):
        log.write_text(text + end)
        for count in range(6):
            assert cli.main(["logs", run.id, "--tail", str(count)]) == EXIT_DONE
            tail = subprocess.run(["tail", "-n", str(count), str(log)], capture_output=True, text=True, check=True)
            assert capsys.readouterr().out == tail.stdout, (text, count)


def test_the_last_lines_of_all_ranks_are_those_by_time(run: RunDir, command: Command) -> None:
    attempt_with_logs(run)
    out = command("logs", run.id, "--merged", "--tail", "2")
    assert [line.split()[-1] for line in out.splitlines()] == ["last", "ends"]
    command.refuses("logs", run.id, "--tail", "-1")


@pytest.mark.parametrize("prints", [True, False])
def test_following_a_script_that_has_not_started_waits_for_what_it_prints(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command, prints: bool
) -> None:
    run.config.write_text(f"job: {configs.SCRIPT_JOB}\nargv: [python, x.py]\n")
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
    out, err = command.ends(EXIT_DONE, "logs", run.id, "--follow")
    assert out == ("epoch 1\n" if prints else "attempt 1: 2 ranks\n")
    assert err == f"run {run.id} is completed: waiting for rank-0.log\n"  # as its status says


def test_following_the_log_of_a_run_without_a_process_ends(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (run.logs / "supervisor.log").parent.mkdir(exist_ok=True)
    (run.logs / "supervisor.log").write_text("the last line\n")
    (run.path / "result.json").unlink()
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    fsio.write_json(run.path / "owner.json", OwnerRecord(1, "", "local", socket.gethostname(), 2**22 + 1, AT).to_json())
    assert command("logs", run.id, "--follow") == "the last line\n"
    assert 0 < len(naps) <= 2 * LOOK_EVERY


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


def test_merged_logs_are_in_the_order_of_time_with_their_writers(run: RunDir, command: Command) -> None:
    attempt_with_logs(run)
    lines = [line.split(" | ", 1) for line in command("logs", run.id, "--merged").splitlines()]
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


def test_merged_logs_go_on_after_midnight(run: RunDir, command: Command) -> None:
    logs = run.attempt_logs(1)
    logs.mkdir(parents=True)
    midnight = time.mktime((2026, 11, 25, 0, 0, 0, 0, 0, -1))
    run.write_status(RunStatus(RunState.COMPLETED, attempt=1, started=midnight - 60, updated=midnight))
    (logs / "rank-0.log").write_text("23:59:30 a\n00:00:30 d\n")
    (logs / "rank-1.log").write_text("23:59:40 b\n00:00:20 c\n")
    assert [line[-1] for line in command("logs", run.id, "--merged").splitlines()] == ["a", "b", "c", "d"]


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


def test_errors_begin_with_the_rank_that_failed_first(run: RunDir, command: Command) -> None:
    attempt_with_logs(run)
    error(run, 0, AT + 5, "late")
    error(run, 10, AT + 4, "early")
    lines = command("logs", run.id, "--errors").splitlines()
    assert lines[0].startswith("rank 10 on n10 failed first: ")
    assert lines[1] == "  at early"
    assert lines[2].startswith("rank 0 on n0 failed later: ")


def test_a_rank_that_was_killed_shows_its_last_lines_before_the_others_errors(run: RunDir, command: Command) -> None:
    attempt_with_logs(run)
    error(run, 0, AT + 5, "connection reset")
    failure = FirstFailure(1, "n1", "killed by SIGKILL")
    run.add_attempt(AttemptRecord(1, ("n1",), AT, AT + 9, "crashed", "give_up", first_failure=failure))
    lines = command("logs", run.id, "--errors").splitlines()
    assert lines[0] == "rank 1 on n1 failed first: killed by SIGKILL"
    assert lines[2] == "  Traceback"
    assert lines[3].startswith("rank 0 on n0 failed later: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--merged", "--rank", "1"], "go only with --attempt"),
        (["--merged", "--attempt", "7"], "no log of a rank of attempt 7"),
        (["--attempt", "1", "--supervisor"], "--supervisor is one log for all attempts"),
        (["--rank=0", "--attempt=0"], "--attempt 0"),
        (["--rank", "7"], "no such log; there are: none yet"),
    ],
)
def test_logs_refuses_what_has_no_meaning(run: RunDir, words: list[str], says: str, command: Command) -> None:
    assert says in command.refuses("logs", run.id, *words)


def test_a_run_without_failures_says_so(run: RunDir, command: Command) -> None:
    assert command("logs", run.id, "--errors") == "no rank of attempt 1 has failed\n"


BAR = "".join(f"\r {step}%|##   | {step}/99 [00:00<00:01, 99.1it/s]" for step in range(100))


def with_bars(run: RunDir, text: str) -> None:
    fsio.make_dir(run.attempt_logs(1))
    run.rank_log(1, 0).write_bytes(text.encode())


@pytest.mark.parametrize("how", [["--tail", "3"], ["--merged", "--tail", "3"]])
def test_of_a_progress_bar_only_what_is_seen_at_last_is_a_line(
    how: list[str], run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bars(run, f"begin\nloading\n{BAR}\r\nsaved\r\n{BAR}")
    assert cli.main(["logs", run.id, *how]) == EXIT_DONE
    seen = " 99%|##   | 99/99 [00:00<00:01, 99.1it/s]"
    lines = [line.removeprefix("rank 0     | ") for line in capsys.readouterr().out.splitlines()]
    assert lines == [seen, "saved", seen]


def test_a_bar_below_another_is_no_line_of_its_own(run: RunDir, command: Command) -> None:
    inner = "".join(f"\n\r shards {step}%\x1b[A\r train {step}%" for step in range(50))
    with_bars(run, f"begin\n{inner}\ndone\n")
    assert command("logs", run.id) == "begin\n train 49%\ndone\n"


def test_a_followed_bar_is_written_every_few_seconds_into_a_pipe(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (run.path / "result.json").unlink()
    with_bars(run, "begin\n")
    steps, now = iter(range(60)), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        """Draw the bar once a second for a minute, and end the run."""
        now[0] += 1.0
        step = next(steps, None)
        with run.rank_log(1, 0).open("a", newline="") as log:
            log.write("\nend\n" if step is None else f"\r {step}%")
        if step is None:
            run.write_result(RunResult(RunState.COMPLETED))

    monkeypatch.setattr(time, "sleep", go_on)
    lines = command("logs", run.id, "--follow").splitlines()
    assert (lines[0], lines[-1]) == ("begin", "end")
    assert 4 <= len(lines) - 2 <= 8, lines


def test_on_a_terminal_a_bar_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    bar = terminal.OneLine(10.0)
    bar.draw(" 1%")
    bar.draw(" 2%\x1b[2J")
    bar.print_above("a line\n")
    assert out.getvalue() == "\r\x1b[K 1%\r\x1b[K 2%\\x1b[2J\r\x1b[Ka line\n"
