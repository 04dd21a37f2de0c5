"""The conclusions of `toolkit doctor --prove` from its run's files.

The played sites keep their promises, or break one.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.base.process_limits import limits
from toolkit.cli.main import main
from toolkit.files.run_files import AttemptRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.site import proof
from toolkit.plugins.site.proof import Proof
from toolkit.plugins.site.proof_rank import FOLLOWED, MEASURED, Followed, Measured
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.verdict import Cause, Decision
from toolkit.run.submission.handle import Run
from toolkit.slurm.jobs import JobStatus

FOLDER = {"visible_s": 0.002, "torn": 0.0, "lock_held": 1.0, "mtime_ahead_s": 0.01}


class Trial:
    """A run whose files the test has written already, as its supervisor and ranks would."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> None:
        self.dir = RunDir(folder)
        self.dir.logs.mkdir(parents=True)
        self.dir.submitit.mkdir()
        change_limits(proof_measured_s=0.0, proof_stopped_s=0.0, proof_returned_s=0.0, ask_slurm_every_s=0.0)
        change_limits(look_at_proof_every_s=0.001)
        self.slurm = FakeSlurm()
        monkeypatch.setattr(proof, "Slurm", lambda: self.slurm)
        self.job = self.slurm.sbatch(["--time=10", "job.sh"])
        self.slurm.start(self.job)
        self.dir.write_status(RunStatus(attempt=1))

    def measure(
        self, *hosts: str, folder: Mapping[str, float] = FOLDER, follower: str = "77", is_summed: bool = True
    ) -> None:
        record = Measured("gloo", hosts or ("a", "b"), ("eth0", "eth0"), follower, "", is_summed, folder)
        fsio.write_json(self.dir.path / MEASURED, record.to_json())

    def attempt(self, number: int, job: str, start: int, end: int, began: float) -> None:
        decision = Decision.REQUEUE if number == 1 else Decision.FINISH
        record = AttemptRecord(
            attempt=number,
            nodes=("a", "b"),
            job_id=job,
            started=began,
            ended=began + 5,
            cause=Cause.STOPPED,
            decision=decision,
            step_start=start,
            step_end=end,
        )
        self.dir.add_attempt(record)

    def end(self, state: RunState = RunState.COMPLETED, why: str = "completed") -> None:
        self.dir.write_result(RunResult(state=state, why=why))

    def follow(self, shrunk_s: float | None = 0.1, why: str = "", nodes: int = 2) -> None:
        fsio.write_json(self.dir.path / FOLLOWED, Followed(time.time(), nodes, shrunk_s, why).to_json())

    def start(self) -> proof._ProofRun:
        return proof._ProofRun(Run(self.dir, "slurm", self.job), requeue_delay_s=0.0)

    def proofs(self) -> dict[str, Proof]:
        trial = self.start()
        trial.play()
        return {each.name: each for each in trial.proofs}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> Trial:
    return Trial(tmp_path / "runs/doctor/1", monkeypatch, change_limits)


def play_well(trial: Trial) -> None:
    trial.measure()
    trial.attempt(1, trial.job, 0, 12, 100.0)
    trial.attempt(2, trial.job, 12, 13, 112.0)
    trial.end()
    trial.follow()


def test_a_site_that_keeps_its_promises_has_them_all_proven(trial: Trial) -> None:
    play_well(trial)
    proofs = trial.proofs()
    assert {each.is_proven for each in proofs.values()} == {True}
    assert proofs["coming back"].text == "requeued; started again after 7 s"
    assert proofs["all-reduce"].text == "the sum of 16 MiB is right on all ranks"
    assert [(sent.signal, sent.batch) for sent in trial.slurm.sent] == [("USR2", True)]


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("atomic replacement", {"torn": 3.0}, "3 reads found a file half written, or missing"),
        ("renamed files", {"visible_s": 12.4}, "seen 12.4 s late"),
        ("file locks", {"lock_held": 0.0}, "do not hold on the other node"),
        ("file times", {"mtime_ahead_s": -90.0}, "-90.00 s against a node's clock"),
    ],
)
def test_what_a_shared_folder_does_wrong_is_named(
    trial: Trial, name: str, folder: dict[str, float], words: str
) -> None:
    play_well(trial)
    trial.measure(folder=FOLDER | folder)
    proofs = trial.proofs()
    assert [each.name for each in proofs.values() if each.is_proven is False] == [name]
    assert proofs[name].text == words


def test_a_wrong_sum_over_the_ranks_is_a_failure(trial: Trial) -> None:
    play_well(trial)
    trial.measure(is_summed=False)
    assert [each.name for each in trial.proofs().values() if each.is_proven is False] == ["all-reduce"]


def test_a_run_that_comes_back_in_another_job_says_so(trial: Trial) -> None:
    play_well(trial)
    (trial.dir.path / "attempts.jsonl").unlink()
    trial.attempt(1, trial.job, 0, 12, 100.0)
    trial.attempt(2, "99", 12, 13, 112.0)
    assert trial.proofs()["coming back"].text.startswith("by a follow-up job (requeue is forbidden), 99;")


def test_what_does_not_come_is_failed_and_what_needs_it_is_not_tried(trial: Trial) -> None:
    trial.end(RunState.FAILED, "no GPU")
    assert trial.proofs() == {"start of ranks": Proof("start of ranks", False, "the run failed: no GPU")}


def test_a_signal_that_changes_nothing_is_a_failure(trial: Trial) -> None:
    trial.measure()
    proofs = trial.proofs()
    assert (proofs["signals"].is_proven, proofs["signals"].text) == (False, "not within the time")
    assert "coming back" not in proofs
    assert (proofs["follow-up job"].is_proven, proofs["srun after a loss"].is_proven) == (False, None)


def test_one_node_proves_nothing_about_two(trial: Trial) -> None:
    play_well(trial)
    trial.measure("a")
    trial.follow(None, "the job has one node", 1)
    proofs = trial.proofs()
    untried = {name for name, each in proofs.items() if each.is_proven is None}
    assert untried == {"all-reduce", "shared folder", "srun after a loss"}


def test_a_site_that_gives_no_nodes_back_is_told_why(trial: Trial) -> None:
    play_well(trial)
    trial.follow(None, "Slurm gives no nodes back: Job shrink is disabled\nand more")
    failed = trial.proofs()["srun after a loss"]
    assert (failed.is_proven, failed.text) == (False, "Slurm gives no nodes back: Job shrink is disabled")


def test_a_command_that_ends_early_leaves_no_follow_up_job(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = trial.slurm.sbatch(["--time=10", "follower.sh"])
    started = trial.start()
    # Rank 0 writes its record while the run is canceled.
    monkeypatch.setattr(Run, "cancel", lambda _: trial.measure(follower=follower))
    started.end()
    assert trial.slurm.show_jobs([follower])[follower].state == "CANCELLED"


def test_the_time_in_the_queue_does_not_count(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """The run and its follow-up job wait in the queue for longer than RETURN_S."""
    follower = trial.slurm.sbatch(["--time=10", "follower.sh"])
    trial.measure(follower=follower)
    trial.attempt(1, trial.job, 0, 12, 100.0)
    trial.slurm.finish(trial.job)
    trial.slurm.requeue(trial.job)
    change_limits(proof_returned_s=0.05)
    looks = 0
    show_jobs = trial.slurm.show_jobs

    def slow_queue(jobs: Iterable[str]) -> dict[str, JobStatus | None]:
        nonlocal looks
        # a look takes POLL_S at least, so a hundred of them exceed RETURN_S
        looks += 1
        if looks == 100:
            trial.attempt(2, trial.job, 12, 13, 112.0)
            trial.end()
        if looks == 200:
            trial.follow()
        return show_jobs(jobs)

    monkeypatch.setattr(trial.slurm, "show_jobs", slow_queue)
    began = time.monotonic()
    proofs = trial.proofs()
    assert time.monotonic() - began > 2 * limits().proof_returned_s
    assert (proofs["coming back"].is_proven, proofs["follow-up job"].is_proven) == (True, True)


@pytest.mark.parametrize(("reason", "queue_s"), [("Priority", 0.05), ("JobHeldUser", 3600.0)])
def test_a_job_that_stays_in_the_queue_or_is_held_is_given_up(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, reason: str, queue_s: float
) -> None:
    play_well(trial)
    (trial.dir.path / FOLLOWED).unlink()
    change_limits(proof_queued_s=queue_s)
    monkeypatch.setattr(trial.slurm, "show_jobs", lambda jobs: {job: JobStatus(job, "PENDING", reason) for job in jobs})
    assert trial.proofs()["follow-up job"].text == "job 77 was not seen"


def test_without_slurm_nothing_can_be_proven(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "--prove"]) == 2
    assert "toolkit doctor --prove needs Slurm: no Slurm here" in capsys.readouterr().err
