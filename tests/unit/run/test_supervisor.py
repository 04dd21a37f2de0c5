"""The supervisor's loop with a launcher whose events the test chooses."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.waiting import PATIENCE, wait_for
from toolkit import config as configs
from toolkit.base import fsio, this_node
from toolkit.base.errors import EXIT_STOPPED, CheckpointError, RequestError, StoppedError
from toolkit.base.process_limits import limits
from toolkit.checkpoint import folder as checkpoint_folder
from toolkit.config import JobConfig
from toolkit.config.schema import NotifyConfig
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, FirstFailure, RunResult, RunState, RunStatus, Straggler
from toolkit.files.rundir import RunDir
from toolkit.hang import Watchdog
from toolkit.nodes.agent.messages import NodeRequest, RanksReporting, RequestAnswered
from toolkit.nodes.agent.reports import ProgressSummary, RankReport
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Events, Progress
from toolkit.nodes.start.launcher import AllRanksEnded, NodeFailed, RanksExited
from toolkit.run.attempt.error_files import read_error_file
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run
from toolkit.run.submission.resume_run import resume
from toolkit.run.supervise import conclude, rank_stop, supervisor
from toolkit.run.supervise.rank_stop import StopAsked
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick")


class Store:
    """Stands for the store: notes the proposals."""

    proposed: list[str]

    def __init__(self) -> None:
        self._closed = False
        Store.proposed = []
        Store.on_propose = lambda: None

    on_propose: Callable[[], object]

    def propose(self, kind: str, by: str) -> None:
        assert not self._closed, "its pipe is closed"
        Store.proposed.append(kind)
        Store.on_propose()

    def close(self) -> None:
        self._closed = True


class Ranks:
    """A launcher whose every attempt plays the next of ``acts``. It notes the signals to its step."""

    tells_each_end = False

    def __init__(self, *acts: Callable[[Ranks], None]) -> None:
        self._acts = list(acts)
        self.signals: list[signal.Signals] = []
        self.answers_kill = True
        self.abandoned = False

    def listen(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        self.events = events

    def start_agents(self, hosts: Collection[str]) -> None: ...

    def start_store(self, *args: Any) -> Store:
        return Store()

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], store: Any
    ) -> Ranks:
        self.attempt, self.environ, self.hosts = attempt, environ, allocation.hosts
        self._acts.pop(0)(self)
        return self

    def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.signals.append(number)
        if self.answers_kill:
            self.events.put(AllRanksEnded(137))
        self.answers_kill = True

    def abandon(self) -> None:
        self.abandoned = True
        self.events.put(AllRanksEnded(-9))

    def report(self, **fields: Any) -> None:
        """Report as rank 0, on the first node."""
        step = fields.get("step")
        self.events.put(RankReport(self.attempt, 0, "in a step", step, 0, fields))
        self.events.put(RanksReporting(self.attempt, self.hosts[0], (0,)))
        self.events.put(Progress(self.hosts[0], ProgressSummary(self.attempt, 1, 0, 1 + (step or 0), step, step)))

    def tell_result(self, step: int, **metrics: float) -> None:
        result = {"step": step, "metrics": metrics}
        self.events.put(RankReport(self.attempt, 0, "finishing", step, 0, None, result))


class NodeAgents:
    """The agents of the nodes. They answer no request."""

    silent_hosts: frozenset[str] = frozenset()
    unsure_hosts: frozenset[str] = frozenset()
    heartbeat_s = 1.0
    heard_hosts: frozenset[str] = frozenset()
    sick_hosts: Mapping[str, str] = {}
    usages: Mapping[tuple[str, float], Mapping[str, Any]] = {}
    ready: Mapping[tuple[str, str], float] = {}
    has_torch: Mapping[str, bool] = {}

    def ask_for_unanswered(self) -> None: ...

    def last_sign(self, host: str) -> float:
        return 0.0

    def host_at(self, address: str) -> str | None: ...

    def ask(self, orders: Mapping[str, NodeRequest], wait_s: float) -> Mapping[str, RequestAnswered]:
        return {}

    def close(self) -> None: ...


def ended(*ranks: int, code: int | None = None) -> RanksExited:
    number = None if code else signal.SIGKILL
    return RanksExited(ranks, "node2", f"exit code {code}" if code else "killed by SIGKILL", number, time.time(), code)


def supervise(run: RunDir, ranks: Ranks, notify: NotifyConfig | None = None, **retry: int) -> int:
    config = JobConfig(notify=notify or NotifyConfig())
    for name, value in retry.items():
        setattr(config.retry, name, value)
    return Supervisor(run, config, Allocation(("here",), (4,), 1), ranks, None).run()


def left_behind(run: RunDir, **more: Any) -> None:
    """Write the status of a supervisor that has died in its first attempt. ``more`` are other keys of it."""
    place = {"nodes": ["a"], "tasks": [2], "progress": {}}
    status = {"state": "running", "attempt": 1, "started": 1.0, "updated": 2.0, "stop": None}
    run.write_status(RunStatus.from_json({**status, **place, **more}))


def completes(ranks: Ranks) -> None:
    ranks.report(step=10, step_start=0)
    ranks.tell_result(10, **{"eval/accuracy": 0.5})
    ranks.events.put(AllRanksEnded(0))


def fails(ranks: Ranks) -> None:
    ranks.events.put(ended(2))
    ranks.events.put(AllRanksEnded(137))


def stops(ranks: Ranks, count: int = 4) -> None:
    """End as ranks that were told to stop, and have saved."""
    ranks.events.put(ended(*range(count), code=EXIT_STOPPED))
    ranks.events.put(AllRanksEnded(EXIT_STOPPED))


def test_a_completed_attempt_becomes_a_result(run: RunDir) -> None:
    assert supervise(run, Ranks(completes)) == 0
    result = run.result()
    assert (result.state, result.step, result.metrics) == ("completed", 10, {"eval/accuracy": 0.5})


def test_ranks_that_all_end_with_0_but_hand_over_no_result_have_not_completed(run: RunDir) -> None:
    assert supervise(run, Ranks(lambda ranks: ranks.events.put(AllRanksEnded(0)), completes)) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, second.cause) == ("crashed", "restart", "completed")
    assert "handed over no result" in first.line


def test_attempts_that_make_no_step_start_again_after_growing_pauses(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart takes a second. A folder that is away for ten seconds would use up all restarts."""
    pauses: list[float] = []

    def noted(context: Any, attempt: Any, pause_s: float) -> bool:
        pauses.append(pause_s)
        return rank_stop.stopped_in_pause(context, attempt, 0.0)

    monkeypatch.setattr(supervisor, "stopped_in_pause", noted)

    def fails_after_a_step(ranks: Ranks) -> None:
        ranks.report(step=5, step_start=0)
        fails(ranks)

    assert supervise(run, Ranks(fails, fails, fails_after_a_step, completes), no_progress_attempts=9) == 0
    first_s = limits().first_pause_s
    assert pauses == [0, first_s, 2 * first_s, 0]  # the attempt before the last made a step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_store_starts_in_its_container_stops_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def start_store(ranks: Ranks, *_: object) -> None:
        ranks.events.put(StopAsked(number))
        raise StoppedError("not waited for")

    monkeypatch.setattr(Ranks, "start_store", start_store)
    assert supervise(run, Ranks()) == 75
    assert [line.cause for line in run.attempts()] == ["stopped"]


def test_a_signal_in_the_pause_between_two_attempts_is_heard_at_once(run: RunDir, change_limits: ChangeLimits) -> None:
    change_limits(first_pause_s=600.0, longest_pause_s=600.0)

    def fails_first(ranks: Ranks) -> None:
        fails(ranks)
        threading.Thread(target=send_once_it_is_judged, args=[ranks]).start()

    def send_once_it_is_judged(ranks: Ranks) -> None:
        wait_for(run.attempts, 60, "the line of the attempt")
        ranks.events.put(StopAsked(signal.SIGTERM))

    assert supervise(run, Ranks(fails_first)) == 75
    assert [line.cause for line in run.attempts()] == ["crashed", "stopped"]


def test_the_line_of_an_attempt_names_its_slow_nodes_if_there_were_any(run: RunDir) -> None:
    slow = Straggler("node2", (3,), 1.6, 1.0, None)

    def crawls(ranks: Ranks) -> None:
        ranks.report(step=10, step_start=0, stragglers=[slow.to_json()])
        ranks.events.put(ended(1))

    assert supervise(run, Ranks(crawls, completes)) == 0
    first, second = run.attempts()
    assert first.slow_nodes == (slow,)
    assert second.slow_nodes == ()


def test_two_ranks_named_in_the_first_line_end_the_attempt_too(run: RunDir) -> None:
    ranks = Ranks(lambda r: r.events.put(ended(2, 3)), completes)
    assert supervise(run, ranks) == 0
    assert ranks.signals == [signal.SIGKILL]
    assert [line.decision for line in run.attempts()] == ["restart", "finish"]
    assert run.attempts()[0].first_failure.rank == 2


def test_a_kill_that_is_lost_is_sent_again(run: RunDir) -> None:
    ranks = Ranks(lambda r: r.events.put(ended(0)), completes)
    ranks.answers_kill = False
    assert supervise(run, ranks) == 0
    assert ranks.signals == [signal.SIGKILL] * 2


def test_a_wrong_request_is_not_tried_again(run: RunDir) -> None:
    said = {"rank": 1, "host": "node2", "time": 1.0, "type": "ConfigError", "message": "no", "traceback": "T"}

    def refuses(ranks: Ranks) -> None:
        path = run.error_file(1, 1)
        fsio.make_dir(path.parent)
        fsio.write_json(path, {**said, "exit_code": 2})
        ranks.events.put(ended(1, code=2))
        ranks.events.put(AllRanksEnded(2))

    assert supervise(run, Ranks(refuses)) == 1
    assert "would fail again unchanged" in run.result().why


def test_a_stop_is_found_without_a_signal(run: RunDir) -> None:
    """Slurm sends a suspended job none, and a batch script's shell would die of it."""

    def told(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        Store.on_propose = lambda: stops(ranks)
        user_requests.record_intent(run, Intent.STOP)

    assert supervise(run, Ranks(told)) == 75
    assert (Store.proposed, run.result().state) == (["stop"], "stopped")


def test_a_command_has_the_supervisor_look_for_the_stop_at_once(run: RunDir, change_limits: ChangeLimits) -> None:
    """In steady training it looks rarely: all runs share the file server."""
    change_limits(files_often_s=0.0, files_every_s=3600.0, supervisor_quiet_s=3600.0, supervisor_silent_s=3600.0)
    proposed = threading.Event()

    def told(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        def ask() -> None:
            user_requests.record_intent(run, Intent.STOP)
            os.kill(os.getpid(), signal.SIGCONT)
            if not proposed.wait(PATIENCE * 20):
                completes(ranks)

        Store.on_propose = lambda: (proposed.set(), stops(ranks))
        threading.Timer(2 * limits().status_every_s, ask).start()  # the first look has found nothing

    assert supervise(run, Ranks(told)) == 75
    assert (Store.proposed, run.result().state) == (["stop"], "stopped")


def test_a_signal_makes_the_supervisor_propose_a_stop_once(run: RunDir) -> None:
    def told(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        def stop() -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # the second one changes nothing
            stops(ranks)

        Store.on_propose = stop
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    ranks = Ranks(told)
    assert supervise(run, ranks) == 75
    assert Store.proposed == ["stop"]
    (line,) = run.attempts()
    assert (line.cause, line.decision, line.step_end) == ("stopped", "finish", 7)
    assert line.stop_asked is not None
    assert ranks.signals == []


def test_a_signal_that_comes_when_all_ranks_have_ended_still_counts_for_the_verdict(run: RunDir) -> None:
    def ends(ranks: Ranks) -> None:
        fails(ranks)
        ranks.events.put(StopAsked(signal.SIGTERM))

    assert supervise(run, Ranks(ends)) == 75
    assert run.attempts()[0].cause == "stopped"


def test_a_signal_between_two_attempts_keeps_the_next_from_starting(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarting = conclude.carry_out

    def carry_out(*args: Any) -> None:
        restarting(*args)  # the verdict is "restart"
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)

    def crashes(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        ranks.events.put(ended(0))

    monkeypatch.setattr(conclude, "carry_out", carry_out)
    assert supervise(run, Ranks(crashes)) == 75
    assert [(line.cause, line.decision) for line in run.attempts()] == [
        ("crashed", "restart"),
        ("stopped", "finish"),
    ]
    assert run.result().state == "stopped"


def test_a_cancelled_run_is_killed_at_once_and_not_asked(run: RunDir) -> None:
    def told(ranks: Ranks) -> None:
        user_requests.record_intent(run, Intent.CANCEL)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    ranks = Ranks(told)
    assert supervise(run, ranks) == 1
    assert ranks.signals == [signal.SIGKILL]
    assert run.result().state == "cancelled"


def test_a_run_that_was_cancelled_while_it_waited_does_not_start(run: RunDir) -> None:
    user_requests.record_intent(run, Intent.CANCEL)
    assert supervise(run, Ranks()) == 1
    assert run.result().state == "cancelled"
    assert run.attempts() == []


def test_who_resumes_a_run_that_was_given_up_gets_a_new_budget(run: RunDir) -> None:
    assert supervise(run, Ranks(fails, fails), max_failures=1) == 1
    assert supervise(run, Ranks(fails, completes), max_failures=1) == 0
    assert [line.decision for line in run.attempts()] == ["restart", "give_up", "restart", "finish"]


def saves(run: RunDir, step: int) -> None:
    """Stand for a committed checkpoint."""
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def test_after_a_sigkill_no_other_failure_is_awaited(run: RunDir, change_limits: ChangeLimits) -> None:
    """It cost half a second of each restart. After an exit code the others' error files may tell the cause."""
    change_limits(error_reports_s=600.0)
    began = time.monotonic()
    assert supervise(run, Ranks(lambda ranks: ranks.events.put(ended(0)), completes)) == 0
    assert time.monotonic() - began < 300.0


@pytest.mark.parametrize("job", [JobConfig().job, configs.SCRIPT_JOB])
def test_ranks_do_not_wait_for_one_that_leaves_with_the_exit_code_of_a_stop(
    run: RunDir, change_limits: ChangeLimits, job: str
) -> None:
    """Before, they waited for dist.timeout_s, and the end was judged a hang."""
    change_limits(stop_s=0.05, script_stop_s=0.05)
    config = JobConfig(job=job)
    config.retry.max_failures = 0

    def leaves(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        ranks.answers_kill = False
        ranks.events.put(ended(1, code=EXIT_STOPPED))
        ranks.send_signal = kill

    def kill(number: signal.Signals = signal.SIGKILL) -> None:
        ranks.events.put(ended(0, 2, 3))
        ranks.events.put(AllRanksEnded(137))

    ranks = Ranks(leaves)
    Supervisor(run, config, Allocation(("here",), (4,), 1), ranks, None).run()
    (line,) = run.attempts()
    assert line.cause == "crashed"
    assert line.line.startswith("rank 1 on node2: exit code 75 (that of a stop), but no stop was requested; given up")


def test_failures_count_from_the_last_attempt_that_gained_more_than_it_lost(run: RunDir) -> None:
    def gains(ranks: Ranks) -> None:
        first = len(run.attempts()) * 100
        saves(run, first + 100)
        ranks.report(step=first + 110, step_start=first, spent={"training": 1e6})
        ranks.events.put(ended(0))

    def gains_nothing(ranks: Ranks) -> None:
        ranks.report(step=305, step_start=300, spent={"training": 1e6})  # saves no checkpoint
        ranks.events.put(ended(0))

    def does_not_start(ranks: Ranks) -> None:
        ranks.events.put(ended(0))

    assert supervise(run, Ranks(gains, gains, gains, gains_nothing, does_not_start), max_failures=1) == 1
    lines = run.attempts()
    assert [line.step_saved for line in lines] == [100, 200, 300, 300, 300]
    assert [line.gained_s > 0.0 for line in lines] == [True, True, True, False, False]
    told = [line.line.removeprefix("rank 0 on node2: killed by SIGKILL; ") for line in lines]
    assert told[2] == "restart from step 300, free: the attempt gained more time than it lost"
    assert told[3] == "restart after failure 1 of 1 since step 300"
    assert told[4] == "given up after 2 failures since step 300 (retry.max_failures: 1)"


@pytest.mark.parametrize("before", ["nothing", "a supervisor that died"])
def test_no_read_that_fails_once_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, before: str
) -> None:
    """A file server may be away for a moment, at any of them."""
    change_limits(retry_every_s=0.0)
    open_regular, reads = fsio.open_regular, list[str]()

    def fails_once(path: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY and path.startswith(str(tmp_path)):
            reads.append(path)
            if len(reads) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return open_regular(path, flags, mode)

    number, made = 0, -1
    while number <= made or made < 0:
        run = rundir.create("test", tmp_path)
        fsio.write_atomic(run.config, configs.dump_config(JobConfig()))
        if before != "nothing":
            run.write_status(RunStatus(state=RunState.RUNNING, attempt=1, nodes=("here",), tasks=(4,), started=1.0))
        reads.clear()
        with monkeypatch.context() as patch:
            patch.setattr(fsio, "open_regular", fails_once)
            assert supervise(run, Ranks(completes)) == 0, reads[number - 1]
        assert [line.cause for line in run.attempts()][-1] == "completed", reads[number - 1]
        number, made = number + 1, max(made, len(reads))
    assert made > 5


def test_an_attempt_is_judged_although_its_checkpoints_cannot_be_listed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(folder: Path) -> list[Path]:
        raise CheckpointError(f"listing {folder} failed (Stale file handle)")

    monkeypatch.setattr(checkpoint_folder, "committed", fails)
    assert supervise(run, Ranks(completes)) == 0
    assert [(line.step_saved, line.gained_s) for line in run.attempts()] == [(None, 0.0)]


@pytest.mark.parametrize(("state", "again"), [("completed", False), ("failed", False), ("cancelled", True)])
def test_a_job_that_slurm_restarts_after_its_end_does_nothing(run: RunDir, state: str, again: bool) -> None:
    """A state "cancelled" without a user's request may mean a preemption that went unnoticed."""
    run.write_result(RunResult.from_json({"state": state}))
    allocation = Allocation(("here",), (4,), 1, restart_count=1)
    ranks = Ranks(*[completes] * again)
    assert Supervisor(run, JobConfig(), allocation, ranks, None).run() == 0
    assert run.result().state == ("completed" if again else state)
    assert len(run.attempts()) == again


def test_an_attempt_that_has_saved_says_so_though_the_disk_is_away_at_its_end(run: RunDir) -> None:
    """Else the next one finds that nothing was ever saved, and begins anew."""
    progress = {"step": 30, "step_start": 0, "step_saved": 20}
    place = {"nodes": ["a"], "tasks": [2], "started": 1.0, "updated": 9.0}
    run.write_status(RunStatus.from_json({"state": "running", "attempt": 1, "progress": progress, **place}))
    assert supervise(run, Ranks(completes)) == 0
    assert run.attempts()[0].step_saved == 20


@pytest.mark.parametrize(("saved", "reached"), [(20, 30), (35, 35)])  # the last status may be older
@pytest.mark.parametrize(("stop", "cause"), [(None, "node_failure"), ("signal", "preempted")])
def test_an_attempt_that_nobody_closed_gets_its_line(
    run: RunDir, stop: str | None, cause: str, saved: int, reached: int
) -> None:
    left_behind(run, updated=9.0, stop=stop, progress={"step": 30, "step_start": 10, "spent": {"training": 4.0}})
    saves(run, saved)
    assert supervise(run, Ranks(completes)) == 0
    first, second = run.attempts()
    assert (first.cause, first.step_end, second.attempt) == (cause, reached, 2)
    assert (first.step_saved, first.gained_s) == (saved, 2.0 if saved == 20 else 4.0)


def test_an_attempt_whose_status_a_resume_replaced_gets_its_line_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its number was used again. Its old error file made a completed attempt a crashed one."""
    left_behind(run, progress={"step": 30, "step_start": 10})
    fsio.make_dir(run.attempt_logs(1))
    fsio.write_json(run.error_file(1, 0), {"rank": 0, "host": "a", "time": 1.5, "type": "OSError", "message": "old"})
    monkeypatch.setattr(Run, "is_over", lambda *_, **__: True)
    monkeypatch.setattr(executors, "_send_to_local", lambda *_: "1")
    fsio.write_json(run.submitit / "submission.json", {"executor": "local", "job_id": "1"})
    resume(run, executor="local")
    assert run.status().state == "queued"
    assert supervise(run, Ranks(completes)) == 0
    first, second = run.attempts()
    assert (first.attempt, first.cause, first.step_end) == (1, "node_failure", 30)
    assert (second.attempt, second.cause) == (2, "completed")


def test_a_full_disk_delays_the_record_but_does_not_lose_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    change_limits(retry_every_s=0.01)
    failures = iter([OSError(28, "No space left on device")] * 3)
    add = RunDir.add_attempt

    def add_attempt(self: RunDir, line: AttemptRecord) -> None:
        for error in failures:
            raise error
        add(self, line)

    monkeypatch.setattr(RunDir, "add_attempt", add_attempt)
    assert supervise(run, Ranks(completes)) == 0
    assert len(run.attempts()) == 1


def foreign_failure(run: RunDir, rank: int, text: str) -> Callable[[Ranks], None]:
    """Return the act of a rank of a user script that fails. It writes ``text`` into its error file."""

    def fails(ranks: Ranks) -> None:
        path = run.error_file(1, rank)
        fsio.make_dir(path.parent)
        path.write_text(text)
        ranks.events.put(AllRanksEnded(1))

    return fails


def failure_of(run: RunDir, message: str) -> RankFailure:
    """Return what an error file of rank 0 says."""
    fsio.make_dir(run.attempt_logs(1))
    fsio.write_json(run.error_file(1, 0), {"rank": 0, "host": "node1", "type": "RuntimeError", "message": message})
    return read_error_file(run.error_file(1, 0))


@pytest.mark.parametrize(
    ("message", "blames_node"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: the launch timed out and was terminated", True),
        ("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, ncclSystemError: System call (e.g. socket, malloc) failed", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, ncclRemoteError: a remote process exited prematurely", False),
        ("[enforce fail at socket.cc:142] rv != -1. -1 vs -1. connect: Invalid argument", True),
        ("[enforce fail at socket.cc:142] rv != -1. -1 vs -1. connect: Network is unreachable", True),
        ("[pair.cc:534] Connection closed by peer [10.0.0.3]:4711", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: invalid argument", False),
        ("CUDA error: out of memory", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_device_error_in_an_error_file_blames_the_node_of_its_rank(
    run: RunDir, message: str, blames_node: bool
) -> None:
    assert failure_of(run, message).blames_node is blames_node


@pytest.mark.parametrize(
    ("message", "address"),
    [
        (
            "NCCL error in: NCCLUtils.cpp:94, ncclSystemError\nLast error:\nncclOsSocketPollConnect: connect to "
            "10.0.0.3<41234> returned Connection timed out, exceeded error retry count after 35 attempts",
            "10.0.0.3",
        ),
        ("socketStartConnect: connect to fe80::1%eth0<41234> failed : No route to host", "fe80::1"),
        (
            "The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500).",
            "10.0.0.1",
        ),
        (
            "The client socket has failed to connect to any network address of (::ffff:10.0.0.1, 29500). The client ",
            "10.0.0.1",
        ),
        ("timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:4711", "10.0.0.2"),
        ("socketProgress: Connection closed by remote peer 10.0.0.3<41234>", None),
        ("[pair.cc:534] Connection closed by peer [10.0.0.3]:4711", None),
        ("trying to connect to (1.2, 3)", None),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_the_address_that_a_rank_could_not_connect_to_is_read_from_its_error(
    run: RunDir, message: str, address: str | None
) -> None:
    """A broken connection does not count. The rank at its other end may have ended for its own reasons."""
    assert failure_of(run, message).unreached == address


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ('{"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1700000000"}}}', "ValueError: x"),
        ('{"message": {"mess', "no message"),
    ],
    ids=["whole", "torn by the kill"],
)
def test_a_failure_in_torchs_format_is_told_with_the_host_of_its_rank(run: RunDir, text: str, how: str) -> None:
    allocation = Allocation(("node1", "node2"), (3, 1), 1)
    config = JobConfig()
    config.retry.max_failures = 0
    assert Supervisor(run, config, allocation, Ranks(foreign_failure(run, 3, text)), None).run() == 1
    (line,) = run.attempts()
    assert line.first_failure == FirstFailure(3, "node2", how)


def hangs(ranks: Ranks) -> None:
    """Hang with rank 0 in its eighth step; the other ranks have reported nothing."""
    ranks.report(step=7, step_start=0)


def supervise_quickly(run: RunDir, ranks: Ranks, job: str = JobConfig().job, agents: Any = None) -> int:
    """Supervise with a group timeout of 1 s."""
    config = JobConfig(job=job)
    config.dist.timeout_s = 1
    agents = NodeAgents() if agents is None else agents
    return Supervisor(run, config, Allocation(("node1", "node2"), (1, 1), 1), ranks, None, agents).run()


@pytest.fixture
def impatient(change_limits: ChangeLimits) -> None:
    change_limits(status_every_s=0.05)


@pytest.mark.usefixtures("impatient")
def test_ranks_that_hang_where_they_should_stop_are_not_taken_for_a_second_hang(
    run: RunDir, change_limits: ChangeLimits
) -> None:
    change_limits(stop_s=2.0, script_stop_s=2.0)

    def told(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()

    ranks = Ranks(told)
    supervise_quickly(run, ranks)
    assert ranks.signals == [signal.SIGKILL]


def test_a_foreign_script_runs_once_its_first_rank_has_a_log(run: RunDir) -> None:
    def shows_up(ranks: Ranks) -> None:
        assert run.status().state is RunState.STARTING
        fsio.make_dir(run.attempt_logs(1))
        run.rank_log(1, 0).write_text("hello\n")
        threading.Thread(target=end, args=(ranks,), daemon=True).start()

    def end(ranks: Ranks) -> None:
        try:
            wait_for(lambda: run.status().state is RunState.RUNNING, PATIENCE * 10, "a status that says so")
        except BaseException:
            ranks.events.put(ended(0, code=1))
            raise
        ranks.events.put(AllRanksEnded(0))

    assert supervise_quickly(run, Ranks(shows_up), job=configs.SCRIPT_JOB) == 0


def test_a_run_that_needs_more_open_files_than_allowed_is_refused_before_its_ranks(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_node, "max_open_files", lambda: 87)
    with pytest.raises(RequestError, match=r"4 ranks need 88 open files .* hard limit is 87: .* at most 3 ranks"):
        supervise(run, Ranks())
    assert run.attempts() == []
    monkeypatch.setattr(this_node, "max_open_files", lambda: 88)
    assert supervise(run, Ranks(completes)) == 0


def test_a_foreign_script_that_exits_with_0_when_it_is_told_to_end_is_stopped(run: RunDir) -> None:
    """It has saved its state, and has more to do."""

    def saves(ranks: Ranks) -> None:
        ranks.answers_kill = False
        ranks.events.put(StopAsked(signal.SIGTERM))
        ranks.events.put(AllRanksEnded(0))

    ranks = Ranks(saves)
    assert supervise_quickly(run, ranks, job=configs.SCRIPT_JOB) == 75
    assert ranks.signals == [signal.SIGTERM]
    assert run.result().state == "stopped"


def test_a_rank_of_a_script_that_ends_badly_in_a_stop_leaves_the_others_their_time(
    run: RunDir, change_limits: ChangeLimits
) -> None:
    """Each rank saves for itself, for as long as it may, and the run says whether it has ended by then."""
    change_limits(script_stop_s=0.3, error_reports_s=0.0)
    config = JobConfig(job=configs.SCRIPT_JOB)
    config.cluster.save_before_limit_s = 0
    began = time.monotonic()

    def saves(ranks: Ranks) -> None:
        ranks.answers_kill = False
        ranks.events.put(StopAsked(signal.SIGTERM))
        ranks.events.put(ended(1, code=143))

    ranks = Ranks(saves)
    Supervisor(run, config, Allocation(("node1", "node2"), (2, 2), 1), ranks, None).run()
    assert ranks.signals == [signal.SIGTERM, signal.SIGKILL]
    assert time.monotonic() - began >= 0.3
    assert run.result().why.startswith(
        "stopped as asked; killed 0 s after SIGTERM: what it was saving may be incomplete"
    )


@pytest.mark.parametrize(("name", "where"), [("SIGABRT", "train.py:4 in step"), ("SIGKILL", None)])
def test_a_ranks_own_words_do_not_hide_the_signal_that_killed_it(run: RunDir, name: str, where: str | None) -> None:
    """With SIGKILL the stack in its log is another process's, such as that of a data worker."""

    def dies(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        fsio.make_dir(run.error_file(1, 0).parent)
        error = {"rank": 0, "host": "node2", "type": "RuntimeError", "message": "peer closed"}
        fsio.write_json(run.error_file(1, 0), error)
        stack = 'Thread 0x7f (most recent call first):\n  File "train.py", line 4 in step\n'
        run.rank_log(1, 0).write_text(f"Fatal Python error: Aborted\n\n{stack}")
        ranks.events.put(RanksExited((0,), "node2", f"killed by {name}", signal.Signals[name], time.time()))

    supervise(run, Ranks(dies), max_failures=0)
    (line,) = run.attempts()
    assert (line.first_failure.how, line.first_failure.where) == (f"killed by {name}", where)


def test_a_stop_beside_a_lost_node_is_not_said_to_be_committed(run: RunDir) -> None:
    def stops(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        ranks.events.put(ended(0, 1, code=EXIT_STOPPED))
        ranks.events.put(NodeFailed("here"))
        ranks.events.put(AllRanksEnded(EXIT_STOPPED))

    supervise(run, Ranks(stops))
    assert "committed" not in run.attempts()[0].line


def test_no_rank_gets_the_token_of_its_submission(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ownership.TOKEN_VARIABLE, "abc")
    ranks = Ranks(completes)
    supervise(run, ranks)
    assert ownership.TOKEN_VARIABLE not in ranks.environ


#: The parts that only watch or advise, and what makes each.
MAY_FAIL = {
    "hang investigation": "plugins.node_watch.investigation.Investigation",
    "usage recorder": "plugins.node_watch.job_usage.JobUsageRecorder",
    "node staging": "plugins.staging.supervisor_side.NodeStaging",
    "dead node finder": "plugins.node_watch.batch_host_watch.DeadNodes",
    "check nodes": "plugins.site.checks.preflight.mark_bad_nodes",
    "notify": "run.supervise.notify.notify",
    "doubtful nodes": "plugins.site.node_history.doubtful_for",
    "efficiency": "plugins.node_watch.efficiency.of_run",
}


class FailsLater:
    def __init__(self, *parts: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise ValueError("no number")


@pytest.mark.parametrize("fails_later", [False, True])
@pytest.mark.parametrize("part", MAY_FAIL)
def test_a_part_that_fails_does_not_end_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, fails_later: bool
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("no number")

    is_object = MAY_FAIL[part].rpartition(".")[2][0].isupper()
    monkeypatch.setattr(f"toolkit.{MAY_FAIL[part]}", FailsLater if fails_later and is_object else fail)
    assert supervise_quickly(run, Ranks(completes)) == 0
    assert run.attempts()[0].cause == "completed"
    lines = [record.message for record in caplog.records if record.message.startswith(f"{part} has failed")]
    assert len(lines) == 1
    assert "no number" in lines[0]


def test_a_hang_is_ended_where_the_search_for_its_cause_fails(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.plugins.node_watch.investigation.Investigation", FailsLater)
    monkeypatch.setattr(Watchdog, "is_stuck", lambda watch: watch is not None and not run.attempts())
    assert supervise(run, Ranks(lambda ranks: None, completes)) == 0
    assert [line.cause for line in run.attempts()] == ["hang", "completed"]
