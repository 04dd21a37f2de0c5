"""Values that are set while a run trains are a function of the step.

That holds whatever dies between the request and its answer.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.disks import no_file_longer_than
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import JobConfig
from toolkit.config.schema import set_values
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.plugins.report import compare
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session
from toolkit.ranks.stop import Gate
from toolkit.run.prepare import live_values
from toolkit.run.records import changes, stop_request
from toolkit.run.records.changes import LIVE, Change, in_force
from toolkit.run.records.stop_request import Answer, UserRequest, Wish
from toolkit.train import profile
from toolkit.train.on_request import OnRequest


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create("name", tmp_path)
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(job="jobs.classify")))
    return run


class Rank:
    """The only rank of an attempt, with its present values."""

    def __init__(self, run: RunDir, step: int = 0) -> None:
        gate = cast(Gate, None)
        session = Session(0, 1, 0, torch.device("cpu"), run.path, 1, HashStore(), Reporter(), gate)
        self._run, self.values = run, dict[str, Any]()
        self.on_request = OnRequest(session, self._adopt)
        self.on_request.resume(step)

    def _adopt(self, values: Mapping[str, Any]) -> None:
        self.values |= values

    def ask(self, step: int, request: UserRequest) -> Answer | None:
        """Carry out a new request at this step."""
        return self.carry_out(step, stop_request.put(self._run, request))

    def carry_out(self, step: int, request_id: str) -> Answer | None:
        self.on_request.carry_out(stop_request.KIND + request_id, step)
        return stop_request.answer_to(self._run, request_id)

    def set(self, step: int, **values: Any) -> Answer | None:
        return self.ask(step, request(**values))

    def rates(self, first: int, last: int) -> list[float]:
        """Make the steps, and return the rate of each."""
        made = []
        for step in range(first, last):
            if step >= self.on_request.next_step:
                self.on_request.pass_step(step)
            made.append(self.values.get("optim.lr", 0.1))
        return made


def request(**values: Any) -> UserRequest:
    return UserRequest(Wish.SET, time.time(), values={f"optim.{name}": value for name, value in values.items()})


def test_a_restart_makes_each_step_with_the_value_that_it_had(run: RunDir) -> None:
    first = Rank(run)
    made = first.rates(0, 5)
    assert first.set(5, lr=0.2) == Answer(attempt=1, step=5)
    made += first.rates(5, 8)
    first.set(8, lr=0.3)
    made += first.rates(8, 10)
    for checkpoint in range(11):
        assert Rank(run, checkpoint).rates(checkpoint, 10) == made[checkpoint:]


def test_a_value_that_is_set_after_a_restart_ends_a_later_one_of_before(run: RunDir) -> None:
    Rank(run).set(50, lr=0.2)
    again = Rank(run, step=40)
    again.set(45, lr=0.3)
    assert set(again.rates(45, 60)) == {0.3}
    assert set(Rank(run, step=40).rates(45, 60)) == {0.3}
    assert Rank(run, step=40).rates(40, 46) == [0.1] * 5 + [0.3]


@pytest.mark.parametrize(
    "values", [{"nodot": 1}, {"a.b.c": 1}, {"optim.newer": 1}, {"optim.lr": "fast"}, {"train.epochs": 5}, {"": 1}, {}]
)
def test_a_request_that_no_command_makes_is_refused_and_leaves_no_trace(run: RunDir, values: dict[str, Any]) -> None:
    rank = Rank(run)
    answer = rank.ask(5, UserRequest(Wish.SET, time.time(), values=values))
    assert answer is not None
    assert "nothing was done" in (answer.refused or "")
    assert (changes.read(run), rank.values) == ([], {})


def test_a_line_of_the_history_that_does_not_fit_is_left_out(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    Rank(run).set(5, lr=0.2)
    for values in ({"nodot": 1}, {"optim.newer": 1, "optim.lr": 7.0}):
        changes.append(run, Change(time.time(), values, step=6, request="r"))
    assert Rank(run, step=8).rates(8, 9) == [0.2]
    assert "a line sets nodot, which no run can take" in caplog.text


def test_a_full_disk_changes_nothing_and_the_answer_says_so(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    rank = Rank(run)
    monkeypatch.setattr(fsio, "append_json_line", full)
    answer = rank.set(5, lr=0.2)
    assert answer is not None
    assert "nothing was done: [Errno 28] No space left on device" in (answer.refused or "")
    assert rank.values == {}


def test_a_request_is_carried_out_once(run: RunDir) -> None:
    """Two supervisors may propose it twice. A rank may die between the history and the answer."""
    rank, asked = Rank(run), stop_request.put(run, request(lr=0.2))
    rank.carry_out(5, asked)
    rank.carry_out(6, asked)
    assert [change.step for change in changes.read(run)] == [5]
    # Without its answer, in the next attempt.
    (run.path / "requests" / f"{asked}.answer.json").unlink()
    again = Rank(run, step=3)
    assert again.carry_out(4, asked) == Answer(attempt=1, step=5)
    assert [change.step for change in changes.read(run)] == [5]
    assert again.rates(4, 7) == [0.1, 0.2, 0.2]


def test_a_request_that_is_withdrawn_before_its_step_changes_nothing(run: RunDir) -> None:
    rank, asked = Rank(run), stop_request.put(run, request(lr=0.2))
    stop_request.remove(run, asked)
    assert rank.carry_out(5, asked) is None
    assert (rank.values, changes.read(run)) == ({}, [])
    assert list((run.path / "requests").iterdir()) == []


def test_a_damaged_line_of_the_history_costs_only_itself(run: RunDir) -> None:
    changes.append(run, Change(1.0, {"optim.lr": 0.2}, step=5))
    with (run.path / "changes.jsonl").open("a") as file:
        file.write('{"time": 1.0, "values": []}\n{"ti')
    changes.append(run, Change(1.0, {"optim.lr": 0.3}, step=7))
    damage: list[str] = []
    assert in_force(changes.read(run, damage)) == [(5, "optim.lr", 0.2), (7, "optim.lr", 0.3)]
    assert len(damage) == 2


def test_a_resume_with_another_value_ends_what_was_set(run: RunDir) -> None:
    changes.end_by_resume(run, {"optim.lr": 0.5})
    assert not (run.path / "changes.jsonl").exists(), "there was nothing to end"
    changes.append(run, Change(1.0, {"optim.lr": 0.2, "train.log_every": 3}, step=5))
    changes.end_by_resume(run, {"optim.lr": 0.5})
    assert in_force(changes.read(run)) == [(5, "train.log_every", 3)]
    changes.append(run, Change(2.0, {"optim.lr": 0.7}, step=9))
    assert in_force(changes.read(run)) == [(5, "train.log_every", 3), (9, "optim.lr", 0.7)]


# ------------------------------------------------------------------------------------------------- before it is sent


def test_values_are_checked_with_those_that_were_set_before(run: RunDir) -> None:
    assert live_values.checked(run, ["optim.lr=1e-3", "train.eval_every=epoch"]) == {
        "optim.lr": 0.001,
        "train.eval_every": "epoch",
    }
    fsio.write_atomic(run.config, run.config.read_text().replace("schedule: constant", "schedule: cosine"))
    assert live_values.checked(run, ["optim.min_lr=0.005"]) == {"optim.min_lr": 0.005}
    changes.append(run, Change(1.0, {"optim.lr": 0.001}, step=5))
    with pytest.raises(ConfigError, match=r"optim\.min_lr: 0\.005 is more than optim\.lr 0\.001"):
        live_values.checked(run, ["optim.min_lr=0.005"])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'; did you mean 'optim.lr'"),
        ("optim.weight_decay=0.1", "after `toolkit stop "),
        ("params.width=3", "after `toolkit stop "),
        ("optim.lr=fast", "optim.lr"),
        ("optim.lr=-1", "optim.lr"),
        ("train.log_every=0", "train.log_every"),
        ("checkpoint.keep=1", "checkpoint.keep"),
        ("lr", "unknown key 'lr'"),
    ],
)
def test_what_cannot_be_set_is_refused_before_it_is_sent(run: RunDir, override: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        live_values.checked(run, [override])
    assert why in str(caught.value)


def test_scripts_and_own_loops_are_told_which_keys_they_read(run: RunDir) -> None:
    config = run.config.read_text()
    fsio.make_dir(run.code)
    (run.code / "train.py").write_text("import toolkit\n\nwith toolkit.start() as run:\n    pass\n")
    fsio.write_atomic(run.config, config.replace("job: jobs.classify", "job: train.py"))
    assert live_values.checked(run, ["train.log_every=3"]) == {"train.log_every": 3}
    with pytest.raises(ConfigError, match=r"optim\.lr: run .* has a loop of its own, which does not read it"):
        live_values.checked(run, ["optim.lr=0.1"])
    fsio.write_atomic(run.config, config.replace("job: jobs.classify", f"job: {configs.FOREIGN_JOB}"))
    with pytest.raises(ConfigError, match="is a script under `toolkit exec`"):
        live_values.checked(run, ["train.log_every=3"])
    with pytest.raises(RequestError, match="say what"):
        live_values.checked(run, [])


def test_each_live_key_is_one_of_the_config_and_can_be_set() -> None:
    config = JobConfig()
    assert set(LIVE) <= set(configs.all_keys())
    set_values(config, dict.fromkeys(LIVE, 3))
    assert {configs.value_of(config, key) for key in LIVE} == {3}


# ------------------------------------------------------------------------------------------------------- profiles


def profile_of(steps: int, rank: int = 0) -> UserRequest:
    return UserRequest(Wish.PROFILE, time.time(), rank=rank, steps=steps)


def test_a_profile_that_cannot_begin_does_not_end_the_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any, **how: Any) -> None:
        raise RuntimeError("another profiler runs")

    rank = Rank(run)
    monkeypatch.setattr(profile, "profile", busy)
    answer = rank.ask(5, profile_of(2))
    assert answer is not None
    assert answer.refused == "no profile can be made: another profiler runs"
    assert rank.rates(5, 8) == [0.1] * 3


def test_a_second_profile_is_refused_while_one_is_made(run: RunDir) -> None:
    rank = Rank(run)
    asked = stop_request.put(run, profile_of(2))
    assert rank.carry_out(5, asked) is None
    answer = rank.ask(6, profile_of(2))
    assert "a profile is being made up to step 7: ask again after it" in ((answer and answer.refused) or "")
    rank.rates(6, 7)
    rank.on_request.close()  # the training ends after one of two steps
    answer = stop_request.answer_to(run, asked)
    assert answer is not None
    assert (answer.step, answer.steps) == (5, 1)
    (file,) = answer.files
    assert Path(file) == run.path / "profiles/step-00000005-rank-0.json.gz"
    answer = rank.ask(9, profile_of(2, rank=1))
    assert "there is no rank 1" in ((answer and answer.refused) or "")


def test_the_files_of_a_profile_of_the_last_steps_are_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written by a thread, which ends with the process."""
    is_closing, write, close = threading.Event(), profile.StepProfile._write, profile.StepProfile.close

    def write_late(*args: Any) -> None:
        is_closing.wait(10.0)
        write(*args)

    def close_noting(*args: Any) -> None:
        is_closing.set()
        close(*args)

    monkeypatch.setattr(profile.StepProfile, "_write", write_late)
    monkeypatch.setattr(profile.StepProfile, "close", close_noting)
    rank = Rank(run)
    asked = stop_request.put(run, profile_of(2))
    rank.carry_out(5, asked)
    rank.rates(6, 8)
    assert stop_request.answer_to(run, asked) is None
    rank.on_request.close()
    answer = stop_request.answer_to(run, asked)
    assert answer is not None
    assert (answer.step, answer.steps, len(answer.files)) == (5, 2, 1)


def test_a_disk_that_is_full_costs_only_the_profile(tmp_path: Path) -> None:
    answers: list[Answer] = []
    recorded = profile.StepProfile(tmp_path, 0, 5, 1, memory=False, answer=answers.append)
    torch.ones(3).sum()
    with no_file_longer_than(100):
        assert not recorded.pass_step(6)
        recorded.close(6)
    assert [("the disk is full" in (answer.refused or "")) for answer in answers] == [True]
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_of_runs_names_what_was_set(run: RunDir, tmp_path: Path) -> None:
    other = rundir.create("name", tmp_path)
    fsio.write_atomic(other.config, run.config.read_text())
    changes.append(run, Change(1.0, {"optim.lr": 0.2}, step=5))
    assert compare.facts(run, other)["config"] == {"optim.lr since step 5": [0.2, None]}
