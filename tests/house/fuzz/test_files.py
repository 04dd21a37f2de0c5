"""Every file of a run, damaged in every way. Commands name it and hide no other run; no supervisor trains on it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.house.fuzz.damage import Damaged, damaged
from tests.house.fuzz.harness import ACCEPTED, CLEAR, COUNTS, MANY, NAMED, ROOT, SilentError, command, fuzz, seclude
from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import Ranks, completes
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError, ToolkitError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import Manifest, TensorPart, TensorRecord, ValueRecord
from toolkit.config import JobConfig
from toolkit.files import records, rundir
from toolkit.files.run_files import OwnerRecord, RunProgress, RunState, Straggler
from toolkit.files.rundir import RunDir
from toolkit.metrics import sinks
from toolkit.metrics.sinks import JsonlSink
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.journal import Journal
from toolkit.run.attempt.verdict import Cause, Decision, RankFailure, Verdict
from toolkit.run.job import nodes
from toolkit.run.job.nodes import Nodes
from toolkit.run.records import user_requests
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run
from toolkit.run.supervise.supervisor import Supervisor

#: The command, or other reader, that names each file when it cannot pass for what was written.
NAMED_BY = {
    "status.json": "status --wide",
    "owner.json": "status --wide",
    "requests/intent.json": "status --wide",
    "result.json": "status --wide",
    "submitit/submission.json": "status --wide",
    "attempts.jsonl": "why RUN",
    "nodes.json": "why RUN",
    "logs/attempt-001/error-1.json": "why RUN",
    "checkpoints/step-00000020/manifest.json": "checkpoint list RUN",
    "checkpoints/step-00000020/rank-00000.safetensors": "checkpoint verify RUN",
    "tensorboard/metrics.jsonl": "a resumed rank 0",
    "config.yaml": "resume RUN",
}


#: No process: the kernel gives no higher pid.
GONE = str(2**22 + 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run that crashed once, with every file that a run may have. Each file is written by its own writer."""
    seclude(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of files
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **more: Run(run, executor, "7"))
    for number in range(2):  # the other one shows whether commands continue
        made = _made(rundir.create("real", tmp_path / "runs"), is_open=number == 1)
    return made


def _made(run: RunDir, *, is_open: bool) -> RunDir:
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(name="real")))
    fsio.write_json(
        run.submitit / "submission.json",
        {"executor": "local", "job_id": GONE, "host": socket.gethostname(), "time": 1.8e9, "token": "0123"},
    )
    allocation = Allocation(("here",), (2,), 1)
    journal = Journal(run, allocation, Nodes(run, allocation, spare=0, allow_fewer=False))
    slow = (Straggler("here", (1,), 1.5, 1.8e9, None),)
    for number in (1, 2):
        attempt = Attempt(number, 1.8e9, allocation, journal.start_times(None), ended=1.8e9 + 60)
        attempt.progress = RunProgress(
            step=20 * number,
            step_start=0,
            total_steps=60,
            epoch=0,
            epochs=2,
            loss=0.5,
            metrics={"eval/accuracy": 0.5},
            spent={"training": 30.0},
            stragglers=slow,
            phase="train",
        )
        failure = RankFailure(1, "here", "ValueError: x", 1.8e9 + 59)
        journal.set_status(RunState.RUNNING, attempt)
        fsio.make_dir(run.attempt_logs(number))
        run.rank_log(number, 1).write_text("a log\n")
        said = {"rank": 1, "host": "here", "time": 1.8e9, "type": "ValueError", "message": "x", "traceback": "T\nx"}
        fsio.write_json(run.error_file(number, 1), {**said, "exit_code": 1})
        if number == 1:
            journal.add(attempt, Verdict(Cause.CRASHED, Decision.RESTART, "rank 1: ValueError: x", failure))
    # an open run has no result: its supervisor died during attempt 2
    if not is_open:
        journal.write_result(attempt, RunState.STOPPED, "stopped by the user", None)
    run.claim_owner_number(1)
    run.write_owner(OwnerRecord(1, "0123", "local", socket.gethostname(), int(GONE), 1.8e9))
    nodes.remember(run, "node9", "sick")
    (run.logs / "supervisor.log").write_text("a line\n")
    fsio.append_json_line(run.bad_samples, {"index": 5, "position": 7, "error": "OSError"})
    fsio.append_json_line(run.skipped_steps, {"step": 3, "why": "not finite", "positions": [0, 1], "samples": [4, 5]})
    sink = JsonlSink(run.tensorboard / "metrics.jsonl", None)
    for step in (10, 20, 30):
        sink.scalars(step, {"train/loss": 1.0})
    sink.close()
    for step in (10, 20):
        _checkpoint(run, step)
    return run


def _checkpoint(run: RunDir, step: int) -> None:
    checkpoints = CheckpointFolder(run.checkpoints)
    folder = checkpoints.begin(step)
    file, data = "rank-00000.safetensors", bytes(range(1, 49))
    head = safetensors.numpy.save({"w": np.frombuffer(data, np.float32).reshape(3, 4)}).removesuffix(data)
    checkpoints.write(folder / file, [memoryview(head), memoryview(data)])
    header = TensorPart(file, 0, len(head), (0,), (len(head),), zlib.crc32(head))
    part = TensorPart(file, len(head), 48, (0, 0), (3, 4), zlib.crc32(data))
    record = TensorRecord("replicated", "float32", (3, 4), (part,))
    value = ValueRecord("replicated", 0, {"a": [1, 2.5, None]})
    meta = {"metrics": {"eval/accuracy": 0.5}, "evaluated": step, "samples": 64 * step, "identity": {"job": "x"}}
    versions = {"torch": "2.0", "toolkit": "0.1"}
    files = {file: len(head) + 48}
    checkpoints.commit(folder, Manifest(step, 1, versions, meta, files, {"w": record}, {"v": value}, (header,)))


class Folder:
    """A folder whose files can be put back as they were."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = [file for file in path.rglob("*") if file.is_file()]
        self.files = {str(file.relative_to(path)): file.read_bytes() for file in found}

    def restore(self) -> None:
        for file in self.path.rglob("*"):
            if file.is_file() and str(file.relative_to(self.path)) not in self.files:
                file.unlink()
        for name, content in self.files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)


def read_by_commands(run: RunDir, name: str) -> dict[str, str]:
    """Return what each reader of the file says, by the reader's name."""
    argvs = [["status"], ["status", "--wide"], ["status", run.id, "--json"], ["logs", run.id]]
    argvs += [["why", run.id], ["why", run.id, "--json"]]
    argvs += [["report", run.id, "--to", str(run.path.parent.parent / "report.html")], ["report", run.id, "--json"]]
    if name.startswith("checkpoints"):
        argvs += [["checkpoint", "list", run.id], ["checkpoint", "verify", run.id], ["checkpoint", "diff", run.id]]
        argvs += [["checkpoint", "list", run.id, "--json"], ["checkpoint", "prune", run.id]]
    # these three commands change a run, and read these files only
    read = (
        "config.yaml",
        "result.json",
        "submitit/submission.json",
        "status.json",
        "requests/intent.json",
        "owner.json",
    )
    if name in read:
        argvs += [["stop", run.id], ["cancel", run.id], ["resume", run.id]]
    said = {}
    for argv in argvs:
        records.warn_once.cache_clear()
        answer = command(argv)
        if "--json" in argv and answer.out:
            json.loads(answer.out, parse_constant=_refuse)
        said[" ".join(argv).replace(f" {run.id}", " RUN")] = answer.text
    said["a resumed rank 0"] = _said_by(_resumed_sink, run)
    return said


def _resumed_sink(run: RunDir) -> None:
    JsonlSink(run.tensorboard / "metrics.jsonl", 20).close()


def _said_by(read: Any, run: RunDir) -> str:
    """Return the warnings of ``read``, or its error."""
    warnings: list[str] = []
    log, kept = sinks.log, sinks.log.warning
    try:
        log.warning = lambda text, *args: warnings.append(text % args)
        read(run)
    except (ToolkitError, OSError) as error:
        return str(error)
    finally:
        log.warning = kept
    return "\n".join(warnings)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def two_gigabytes(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


@contextmanager
def within_s(limit_s: float, what: str) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{what}: a command waits: {''.join(traceback.format_stack(frame)[-2:])}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("count", COUNTS)
def test_every_command_survives_a_damaged_file_and_one_names_it(run: RunDir, count: int) -> None:
    folder = Folder(run.path)
    (other,) = (each for each in rundir.all_runs() if each.path != run.path)
    whole = {**read_by_commands(run, "config.yaml"), **read_by_commands(run, "checkpoints")}
    folder.restore()

    def check(case: Damaged) -> str:
        file = run.path / case.name
        try:
            file.write_bytes(case.content)
            said = read_by_commands(run, case.name)
        finally:
            folder.restore()
        assert other.id[-8:] in said["status"], "the other run is not shown"
        is_named = any(file.name in text and text != whole[who] for who, text in said.items())
        is_plain = b"\0" in case.content if case.name == "config.yaml" else case.is_plain  # YAML may be cut anywhere
        if case.name.endswith("metrics.jsonl"):  # a kill leaves a file without lines, and one that is cut off
            is_plain &= bool(case.content) and case.how != "cut"
        if case.name in NAMED_BY and is_plain and file.name not in said[NAMED_BY[case.name]]:
            raise SilentError(f"{NAMED_BY[case.name]} does not name it: {said[NAMED_BY[case.name]]}")
        return NAMED if is_named else ACCEPTED

    fuzz("damaged files, commands", damaged(folder.files), check, count)


@pytest.mark.parametrize("put", [pipe, two_gigabytes])
def test_no_command_waits_for_what_lies_in_place_of_a_file(run: RunDir, put: Callable[[Path], None]) -> None:
    """In a folder for the runs of several users anybody may put it there."""
    folder = Folder(run.path)
    names = {*NAMED_BY, "logs/attempt-001/rank-1.log", "logs/supervisor.log"}
    # Logs and metrics may have any length, and have no end only where they have no lines.
    for name in sorted(names if put is pipe else [one for one in names if not one.startswith(("logs", "tensorb"))]):
        (run.path / name).unlink(missing_ok=True)
        put(run.path / name)
        with within_s(60.0, name):
            said = read_by_commands(run, name)
        for path in (run.path / name, *run.path.rglob("*.damaged-*")):
            path.unlink(missing_ok=True)
        folder.restore()
        assert Path(name).name.removesuffix(".json") in said.get(NAMED_BY.get(name, ""), name), name


@pytest.fixture
def quick(change_limits: ChangeLimits) -> Iterator[None]:
    """Shorten the patience, and restore the test runner's signal handlers at the end."""
    change_limits(error_reports_s=0.0)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCONT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("count", COUNTS)
def test_a_supervisor_goes_on_with_a_run_whose_files_are_damaged_or_names_the_file(run: RunDir, count: int) -> None:
    """Attempt 2 is left over: its number must not be given again.

    Only a user's request, an end, or a file that it names keeps the run from continuing.
    """
    user_requests.record_intent(run, user_requests.Intent.STOP)
    stopped = Folder(run.path)
    user_requests.clear_intent(run)
    folder = Folder(run.path)

    def check(case: Damaged) -> str:
        (stopped if case.name == "requests/intent.json" else folder).restore()
        (run.path / case.name).write_bytes(case.content)
        ranks = Ranks(completes)
        try:
            # the highest number that the damaged files still show
            had = max(2, *(line.attempt for line in run.attempts()), 0)
            code = Supervisor(run, JobConfig(), Allocation(("here",), (2,), 1), ranks, None).run()
        except DamagedFileError as error:
            return _refusal(case, str(error), ranks)
        numbers = [line.attempt for line in run.attempts()]
        result = run.result()
        assert result is not None
        assert len(numbers) == len(set(numbers)), f"a number was given twice: {numbers}"
        if case.name == "requests/intent.json":
            assert (code, result.state) in ((75, "stopped"), (1, "cancelled")), f"a stopped run trained: {result}"
            return CLEAR
        assert (code, result.state) == (0, "completed")
        assert numbers[-1] > had, f"attempt {had} is overwritten by {numbers}"
        assert not case.name.startswith(f"logs/attempt-{numbers[-1]:03d}")
        return ACCEPTED

    fuzz("damaged files, supervisor", damaged(stopped.files), check, count)
    folder.restore()


def _refusal(case: Damaged, why: str, ranks: Ranks) -> str:
    assert case.name in why
    assert len(ranks._acts) == 1, f"trained although {why}"
    return NAMED


@pytest.mark.soak
@pytest.mark.dist
def test_every_command_survives_a_damaged_file_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was made on this machine, by two ranks, and lost one of them."""
    environ = {**os.environ, "TOOLKIT_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    fault = {"kind": "SIGKILL", "rank": 0, "attempt": 1, "operation": 20}
    overrides = ["train.max_steps=60", "checkpoint.every_steps=20", "name=real"]
    argv = [sys.executable, "-m", "toolkit", "submit", "configs/digits_ddp.yaml", "--executor", "local", "--wait"]
    for chaos in (json.dumps([fault]), "[]"):
        done = subprocess.run(
            [*argv, *overrides], cwd=ROOT, env={**environ, "TOOLKIT_CHAOS": chaos}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    seclude(monkeypatch, tmp_path)
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **more: Run(run, executor, "7"))
    run, other = rundir.all_runs()
    assert len(run.attempts()) == 2
    shutil.rmtree(run.code.resolve())  # sources, which only the ranks read
    folder = Folder(run.path)

    def check(case: Damaged) -> str:
        try:
            (run.path / case.name).write_bytes(case.content)
            said = read_by_commands(run, case.name)
        finally:
            folder.restore()
        assert other.id[-8:] in said["status"]
        return NAMED if any(Path(case.name).name in text for text in said.values()) else ACCEPTED

    fuzz("damaged files of a real run", damaged(folder.files), check, MANY)
