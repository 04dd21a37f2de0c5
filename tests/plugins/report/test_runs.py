"""Why a run failed: its attempts' records, its ranks' error files and logs. They may be in any state."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import fsio
from toolkit.files.run_files import AttemptRecord, RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.report.why.diagnosis import Diagnosis
from toolkit.plugins.report.why.runs import cause_of
from toolkit.run.attempt import advice

RESET = "RuntimeError: Connection reset by peer"


def close(run: RunDir, cause: str, how: str = "exit code 1", rank: int | None = 2, **more: Any) -> None:
    """Note a closed attempt, of which a rank failed first."""
    number = len(run.attempts()) + 1
    times = {"started": "2026-11-20T15:00:00.000+00:00", "ended": "2026-11-20T15:01:00.000+00:00"}
    first = {"rank": rank, "host": "node2", "how": how}
    keys = {"attempt": number, "nodes": "node[1-2]", "cause": cause, "decision": "restart", "line": how, **times}
    run.add_attempt(AttemptRecord.from_json({**keys, "first_failure": first, **more}))


def write_log(run: RunDir, rank: int, text: str) -> None:
    path = run.rank_log(1, rank)
    fsio.make_dir(path.parent)
    path.write_text(text)


def tell(run: RunDir, rank: int, kind: str, message: str, at: float = 1.0) -> None:
    """Write a rank's error file."""
    path = run.error_file(1, rank)
    fsio.make_dir(path.parent)
    text = f'Traceback (most recent call last):\n  File "/w/mine.py", line 42, in step\n{kind}: {message}\n'
    said = {"type": kind, "message": message, "traceback": text}
    fsio.write_json(path, {"rank": rank, "host": "node2", "time": at, **said})


def the_cause(run: RunDir) -> Diagnosis:
    found = cause_of(run)
    assert found is not None
    return found


def named(run: RunDir) -> str | None:
    found = cause_of(run)
    return found.rule if found else None


def test_a_text_is_diagnosed_as_it_is() -> None:
    assert cause_of("KeyError: 'a'").rule == "py.key"


def test_the_first_failing_ranks_own_words_are_the_cause(run: RunDir) -> None:
    tell(run, 2, "KeyError", "'labels'")
    tell(run, 0, "RuntimeError", "Connection reset by peer", at=0.5)
    close(run, "crashed", "KeyError: 'labels'")
    found = the_cause(run)
    assert (found.rule, found.rank, found.host, found.where) == ("py.key", 2, "node2", "mine.py:42 in step")


def test_the_log_tells_where_the_words_are_no_clear_error(run: RunDir) -> None:
    tell(run, 2, "DistBackendError", "NCCL error in: x.cpp:1, unhandled system error")
    write_log(run, 2, "n2:1:2 [0] NCCL WARN NET/IB : Got async event : port error\n")
    close(run, "crashed")
    found = the_cause(run)
    assert found.rule == "nccl.ib_port_down"
    assert (found.rank, found.log) == (2, str(run.rank_log(1, 2)))


def test_another_ranks_error_is_the_cause_of_a_lost_connection(run: RunDir) -> None:
    tell(run, 2, "RuntimeError", "Connection reset by peer", at=1.0)
    tell(run, 7, "ModuleNotFoundError", "No module named 'einops'", at=2.0)
    close(run, "crashed", RESET)
    found = the_cause(run)
    assert (found.rule, found.rank) == ("py.module_not_found", 7)


def test_others_do_not_overrule_a_signal_of_the_first(run: RunDir) -> None:
    tell(run, 0, "RuntimeError", "Gloo connectFullMesh failed with connection refused")
    close(run, "crashed", "killed by SIGSEGV")
    assert named(run) == "signal.segv"


def test_the_records_of_slurms_doings_are_the_cause(run: RunDir) -> None:
    for cause, rule in (("timeout", "slurm.time_limit"), ("preempted", "slurm.preempted"), ("hang", "run.hang")):
        close(run, cause, "as the record says")
        assert named(run) == rule


def test_memory_of_the_gpu_and_of_the_node_are_told_apart(run: RunDir) -> None:
    close(run, "out_of_memory", "killed by SIGKILL (Out Of Memory)")
    assert named(run) == "host.oom_kill"
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    tell(run, 2, "OutOfMemoryError", message)
    close(run, "out_of_memory", f"OutOfMemoryError: {message}", attempt=1)
    assert named(run) == "cuda.oom"


def test_a_node_failure_is_slurms_unless_a_device_says_more(run: RunDir) -> None:
    close(run, "node_failure", "node2 is lost")
    assert named(run) == "slurm.node_fail"
    tell(run, 2, "AcceleratorError", "CUDA error: uncorrectable ECC error encountered")
    assert named(run) == "gpu.ecc"


def test_an_unknown_end_has_no_cause(run: RunDir) -> None:
    close(run, "crashed", "exit code 3")
    write_log(run, 2, "step 1 loss 2.0\nbye\n")
    assert cause_of(run) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_of_a_run_that_could_write_nothing_the_full_disk_is_the_cause(
    run: RunDir, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(fsio, "write_atomic", full)
    found = the_cause(run)
    assert os.strerror(number) in found.line
    assert found.rule.startswith("fs.")
    assert list(run.path.glob(".room-*")) == []


def test_runs_that_completed_or_never_failed_have_none(run: RunDir) -> None:
    assert cause_of(run) is None
    close(run, "stopped")
    assert cause_of(run) is None
    close(run, "timeout")
    run.write_result(RunResult(RunState.COMPLETED))
    assert cause_of(run) is None


def test_a_job_that_ended_before_its_first_attempt_is_read_from_its_log(run: RunDir) -> None:
    log = run.submitit / "41_0_log.err"
    log.write_text("slurmstepd: error: *** JOB 41 ON node1 CANCELLED AT 2026-11-20T15:00:00 DUE TO TIME LIMIT ***\n")
    found = the_cause(run)
    assert (found.rule, found.host, found.log) == ("slurm.time_limit", "node1", str(log))


def test_an_attempt_that_was_not_closed_is_read_from_its_error_files(run: RunDir) -> None:
    tell(run, 1, "KeyError", "'labels'")
    found = the_cause(run)
    assert (found.rule, found.rank) == ("py.key", 1)


def test_what_ranks_have_left_is_read_as_far_as_possible(run: RunDir) -> None:
    close(run, "crashed", "KeyError: 'labels'")
    run.error_file(1, 2).parent.mkdir(parents=True, exist_ok=True)
    run.error_file(1, 2).write_bytes(b"\xff{")
    run.rank_log(1, 2).mkdir()  # a folder where the log should be
    assert named(run) == "py.key"


def test_the_last_finite_losses_are_told_of_a_loss_that_is_not_finite(run: RunDir) -> None:
    lines = [{"step": step, "train/loss": loss, "train/lr": 0.5} for step, loss in ((10, 2.0), (20, 1.5))]
    fsio.make_dir(run.tensorboard)
    bad = '{"step": 30, "train/loss": NaN, "train/lr": 0.5}\n'
    (run.tensorboard / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + bad)
    tell(run, 1, "NotFiniteError", "train.on_nan: the loss is not finite since step 25 on rank 1")
    close(run, "crashed", "NotFiniteError: train.on_nan: the loss is not finite since step 25 on rank 1", rank=1)
    found = the_cause(run)
    assert found.rule == "numeric.nan"
    assert found.cause.endswith("The last finite losses: 2 (step 10), 1.5 (step 20), at a rate of 0.5.")


@pytest.mark.parametrize(
    ("kind", "message", "is_of_code"),
    [
        ("KeyError", "'labels'", True),
        ("ValueError", "bad", True),
        ("OSError", "[Errno 24] Too many open files", False),
        ("JobFailedError", "a data worker died (pid 7) before the batch of step 3", False),
    ],
)
def test_the_next_step_names_a_line_only_where_it_is_to_be_mended(
    run: RunDir, kind: str, message: str, is_of_code: bool
) -> None:
    run.config.write_text("")
    tell(run, 2, kind, message)
    where = "mine.py:42 in step"
    first = {"rank": 2, "host": "node2", "how": f"{kind}: {message}", "where": where}
    close(run, "crashed", f"{kind}: {message}", decision="give_up", first_failure=first)
    run.write_result(RunResult(RunState.FAILED))
    assert (f"fix {where}" in advice.of(run)) is is_of_code


def test_a_run_of_a_resume_check_is_not_to_be_resumed(run: RunDir) -> None:
    run.config.write_text("")
    tell(run, 2, "KeyError", "'labels'")
    close(run, "crashed", "KeyError: 'labels'", decision="give_up")
    run.write_result(RunResult(RunState.FAILED))
    fsio.make_dir(run.trace)
    assert (
        advice.of(run)
        == "fix the cause, then check again: the run is a part of a resume-check, which resumes it itself"
    )
