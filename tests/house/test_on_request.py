"""Profiles that users ask of ranks that train. Whatever comes of one, the training continues."""

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.disks import no_file_longer_than
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.ranks.agreement import Gate
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, RequestKind, UserRequest
from toolkit.train import profile
from toolkit.train.profile import RequestedProfiles


@pytest.fixture
def run() -> RunDir:
    run = rundir.create("name")
    fsio.write_atomic(run.config, configs.dump_config(JobConfig(job="jobs.classify")))
    return run


class Rank:
    """The only rank of an attempt."""

    def __init__(self, run: RunDir) -> None:
        gate = cast(Gate, None)
        session = Session(0, 1, 0, torch.device("cpu"), run.path, 1, HashStore(), Reporter(), gate)
        self._run, self.on_request = run, RequestedProfiles(session)

    def ask(self, step: int, request: UserRequest) -> Answer | None:
        """Carry out a new request at this step."""
        return self.carry_out(step, user_requests.put(self._run, request))

    def carry_out(self, step: int, request_id: str) -> Answer | None:
        self.on_request.carry_out(user_requests.KIND + request_id, step)
        return user_requests.answer_to(self._run, request_id)

    def make_steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            if self.on_request.is_recording:
                self.on_request.pass_step(step)


def profile_of(steps: int, rank: int = 0) -> UserRequest:
    return UserRequest(RequestKind.PROFILE, time.time(), rank=rank, steps=steps)


def test_a_request_that_is_withdrawn_before_its_step_starts_no_profile(run: RunDir) -> None:
    rank, asked = Rank(run), user_requests.put(run, profile_of(2))
    user_requests.remove(run, asked)
    assert rank.carry_out(5, asked) is None
    assert not rank.on_request.is_recording
    assert list((run.path / "requests").iterdir()) == []


def test_a_profile_that_cannot_begin_does_not_end_the_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any, **how: Any) -> None:
        raise RuntimeError("another profiler runs")

    rank = Rank(run)
    monkeypatch.setattr(profile, "profile", busy)
    assert rank.ask(5, profile_of(2)).refused == "no profile can be made: another profiler runs"
    assert not rank.on_request.is_recording


def test_a_second_profile_is_refused_while_one_is_made(run: RunDir) -> None:
    rank = Rank(run)
    asked = user_requests.put(run, profile_of(2))
    assert rank.carry_out(5, asked) is None
    answer = rank.ask(6, profile_of(2))
    assert "a profile is being made up to step 7: try again after it" in ((answer and answer.refused) or "")
    rank.make_steps(6, 7)
    rank.on_request.close()  # the training ends after one of two steps
    answer = user_requests.answer_to(run, asked)
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
    asked = user_requests.put(run, profile_of(2))
    rank.carry_out(5, asked)
    rank.make_steps(6, 8)
    assert user_requests.answer_to(run, asked) is None
    rank.on_request.close()
    answer = user_requests.answer_to(run, asked)
    assert (answer.step, answer.steps, len(answer.files)) == (5, 2, 1)


def test_a_disk_that_is_full_costs_only_the_profile(tmp_path: Path) -> None:
    answers: list[Answer] = []
    recorded = profile.StepProfile(tmp_path, profile_of(1), 5, answers.append)
    torch.ones(3).sum()
    with no_file_longer_than(100):
        assert not recorded.pass_step(6)
        recorded.close(6)
    assert [("the disk is full" in (answer.refused or "")) for answer in answers] == [True]
    assert list(tmp_path.iterdir()) == []
