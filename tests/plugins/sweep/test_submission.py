"""Submitting a sweep: every point exactly once, with few calls of sbatch. The submitter may be killed anywhere."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from toolkit import config as configs
from toolkit.base.errors import ConfigError, RequestError
from toolkit.files.run_files import RunState
from toolkit.plugins import testing
from toolkit.plugins.sweep import element, points, request, submission, sweep_folder
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.sweep.submission import Submitted
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import ownership

CONFIG = "job: jobs.mine\nname: mine\ndata: {name: digits}\nparams: {width: 1}\n"
JOB = """
from dataclasses import dataclass
@dataclass
class Params:
    width: int
def main(config): print(config)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project = tmp_path / "project"
    (project / "jobs").mkdir(parents=True)
    (project / "jobs/__init__.py").touch()
    (project / "jobs/mine.py").write_text(JOB)
    (project / "mine.yaml").write_text(CONFIG)
    (tmp_path / "site.yaml").write_text("{}")
    monkeypatch.chdir(project)
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    return project


def submit(slurm: FakeSlurm, *overrides: str, **options: object) -> Submitted:
    asked = request.read("mine.yaml", overrides, Options(**options))  # type: ignore[arg-type]
    return submission.submit(asked, Path.cwd(), "slurm", slurm)


class SlurmOnDisk(FakeSlurm):
    """A Slurm with its jobs in a file, for submitters that are killed. It may kill one that has just sent a job."""

    def __init__(self, path: Path, kill_after: int = -1) -> None:
        super().__init__()
        self.path, self._kill_after, self.max_array_size = path, kill_after, 3
        self.path.touch()

    @property
    def scripts(self) -> list[str]:
        return self.path.read_text().split()

    def sbatch(self, arguments: Sequence[str]) -> str:
        number = len(self.scripts)
        with self.path.open("a") as file:
            file.write(f"{arguments[-1]}\n")
        if number == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(number)

    def job_of_script(self, path: str) -> str | None:
        return str(self.scripts.index(path)) if path in self.scripts else None


def killed(slurm: SlurmOnDisk, at: int, *overrides: str, **options: object) -> bool:
    """Submit in another process, killed at its file operation ``at``. False if it ran to its end."""
    child = os.fork()
    if child == 0:
        count = itertools.count()

        def seen(operation: str, path: str) -> None:
            if "/.sweeps/" in path and "/.code" not in path and next(count) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with testing.watch(seen):
                submit(slurm, *(overrides or ["train.seed=0..6"]), **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def assert_each_point_once(slurm: SlurmOnDisk, sweep: SweepDir) -> None:
    assert sorted(slurm.scripts) == sorted(str(array.script) for array in sweep.arrays())
    assert len(slurm.scripts) == 3
    seeds = [point.values["train.seed"] for array in sweep.arrays() for point in array.points()]
    assert Counter(seeds) == Counter(range(7))
    for number, script in enumerate(slurm.scripts):
        array = next(array for array in sweep.arrays() if str(array.script) == script)
        record = array.record()
        assert record is not None
        assert record.job_id == str(number)
        # The jobs know their list by the token in the script that was submitted.
        assert f"{ownership.TOKEN_VARIABLE}={record.token}\n" in array.script.read_text()


@pytest.mark.sample(2)
@pytest.mark.parametrize("at", range(110))
def test_a_submitter_killed_at_any_operation_loses_nothing(tmp_path: Path, at: int) -> None:
    slurm = SlurmOnDisk(tmp_path / "jobs")
    # It has about a hundred operations on the sweep's files; the last numbers here are after its end.
    assert killed(slurm, at) or at > 60
    sent = submit(slurm, "train.seed=0..6")
    assert_each_point_once(slurm, sent.sweep)


@pytest.mark.parametrize("number", range(3))
def test_a_submitter_killed_after_an_sbatch_finds_its_job(tmp_path: Path, number: int) -> None:
    slurm = SlurmOnDisk(tmp_path / "jobs", kill_after=number)
    assert killed(slurm, -1)
    sent = submit(SlurmOnDisk(tmp_path / "jobs"), "train.seed=0..6")
    assert_each_point_once(slurm, sent.sweep)


def test_jobs_of_an_sbatch_that_came_too_late_leave_the_points_alone() -> None:
    sent = submit(FakeSlurm(), "train.seed=0..1")
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    assert element.claim(array, 0, "another token") is None
    assert not list(sent.sweep.runs.glob("mine/*"))
    run = element.claim(array, 0, record.token)
    assert run is not None
    assert configs.load_config(run.config, site=False).train.seed == 0
    assert (run.code / "jobs/mine.py").is_file()


def test_ten_thousand_points_take_as_few_calls_as_arrays_can_have() -> None:
    slurm = FakeSlurm()
    # The values are few, so that the test is quick: the number of points is made by repeating them.
    slurm.max_array_size = 101
    sent = submit(slurm, "train.seed=0..499", "params.width=1,2", max_running=20)
    assert len(sent.jobs) == len(slurm.submitted) == math.ceil(1000 / 101)
    first, second = list(slurm.submitted.values())[:2]
    assert "--array=0-100%20" in first
    assert not any(option.startswith("--dependency") for option in first)
    assert f"--dependency=afterany:{sent.jobs[0]}" in second  # at most 20 of the whole sweep run


def test_the_same_points_are_never_submitted_twice() -> None:
    slurm = FakeSlurm()
    first = submit(slurm, "train.seed=0..3")
    again = submit(slurm, "train.seed=0..3", "cluster.time_min=99", "cluster.partition=long")
    more = submit(slurm, "train.seed=2..5")
    assert [(s.new, s.known, len(s.jobs)) for s in (first, again, more)] == [(4, 0, 1), (0, 4, 0), (2, 2, 1)]
    assert submit(slurm, "train.seed=0..3", "train.epochs=9").new == 4  # another config is another point
    assert submit(slurm, "train.seed=0..3", name="other").new == 4
    runs = [point.run for array in first.sweep.arrays() for point in array.points()]
    assert len(set(runs)) == len(runs) == 10


def test_a_point_has_the_config_that_submit_would_make() -> None:
    overrides = ["optim.lr=0.125", "params.width=3", "data.root=."]
    sent = submit(FakeSlurm(), "optim.lr=0.125,0.5", "params.width=2,3", "data.root=.")
    asked = configs.load_config("mine.yaml", overrides)
    asked.data.root = str(Path.cwd())
    (array,) = sent.sweep.arrays()
    record, listed = array.record(), array.points()
    assert record is not None
    index = next(i for i, point in enumerate(listed) if point.values == {"optim.lr": 0.125, "params.width": 3})
    run = element.claim(array, index, record.token)
    assert run is not None
    assert configs.load_config(run.config, site=False) == asked
    place = run.point()
    assert place is not None
    assert (place.sweep, place.values) == ("mine", {"optim.lr": 0.125, "params.width": 3})


def test_references_follow_the_swept_key() -> None:
    asked = request.read(
        "mine.yaml", ["optim.lr=0.1,0.2", "optim.min_lr=${optim.lr}", "optim.schedule=cosine"], Options()
    )
    found = list(points.checked(asked, Path.cwd(), "slurm"))
    assert [point.settings["optim.min_lr"] for point in found] == [0.1, 0.2]


def test_every_combination_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.min_lr: 0\.3 is more than optim\.lr 0\.2.*at the point"):
        submit(FakeSlurm(), "optim.lr=0.5,0.2", "optim.min_lr=0.1,0.3", "optim.schedule=cosine")
    with pytest.raises(ConfigError, match=r"unknown key 'optim\.lrr'"):
        submit(FakeSlurm(), "optim.lrr=1,2")
    with pytest.raises(ConfigError, match=r"params\.widht"):
        submit(FakeSlurm(), "params.widht=1,2")
    with pytest.raises(RequestError, match=r"cluster\.partition: .*cannot be swept"):
        submit(FakeSlurm(), "cluster.partition=a,b")
    with pytest.raises(ConfigError, match=r"cluster\.components: Slurm has no arrays of heterogeneous jobs"):
        submit(FakeSlurm(), "optim.lr=0.1,0.2", "cluster={components: [{}, {}]}")
    assert not (tmp_path / "runs").exists()


def test_a_full_quota_loses_nothing() -> None:
    slurm = FakeSlurm()
    slurm.max_array_size = 2
    slurm.refuses_submissions = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    with pytest.raises(RequestError, match=r"(?s)2 points are not submitted.*Nothing is lost") as caught:
        submit(slurm, "train.seed=0..3")
    assert caught.value.exit_code == 2
    slurm.refuses_submissions = ""
    sent = submit(slurm, "train.seed=0..3")
    listed = [point.values["train.seed"] for array in sent.sweep.arrays() for point in array.points()]
    assert (sorted(listed), len(slurm.submitted)) == ([0, 1, 2, 3], 2)


class SlurmWithALimit(FakeSlurm):
    """One whose users may have ``most`` jobs. It refuses as 22.05 and 24.11 do."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def sbatch(self, arguments: Sequence[str]) -> str:
        ranges = [each.removeprefix("--array=0-").partition("%")[0] for each in arguments if each.startswith("--array")]
        wanted = 1 + int(ranges[0]) if ranges else 1
        over = len([row for row in self._jobs.values() if not row.is_over]) + wanted > self.most
        limit = "sbatch: error: AssocMaxSubmitJobLimit\n  sbatch: error: Batch job submission failed: Job violates ..."
        self.refuses_submissions = limit if over else ""
        return super().sbatch(arguments)


def test_a_sweep_of_more_points_than_jobs_is_submitted_as_there_is_room() -> None:
    slurm = SlurmWithALimit(5)
    with pytest.raises(RequestError, match=r"(?s)6 points are not submitted: .*the same command submits what is"):
        submit(slurm, "train.seed=0..10")
    assert len(slurm._jobs) == 5
    for job in list(slurm._jobs):
        slurm.cancel(job)
    with pytest.raises(RequestError, match=r"1 points are not submitted"):
        submit(slurm, "train.seed=0..10")
    slurm.most = 100
    sent = submit(slurm, "train.seed=0..10")
    records = [array.record() for array in sent.sweep.arrays()]
    assert all(record is not None and record.job_id is not None for record in records)
    listed = [point.values["train.seed"] for array in sent.sweep.arrays() for point in array.points()]
    assert sorted(listed) == [*range(11)]


def test_points_that_a_wrong_partition_kept_back_are_sent_with_the_next_one(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.refuses_submissions = "invalid partition specified: gpuu"
    with pytest.raises(RequestError, match=r"(?s)2 points are not submitted.*other cluster\.\* values"):
        submit(slurm, "train.seed=0,1", "cluster.partition=gpuu")
    slurm.refuses_submissions = ""
    sent = submit(slurm, "train.seed=0,1,2", "cluster.partition=gpu", "cluster.time_min=7")
    scripts = [array.script.read_text() for array in sent.sweep.arrays()]
    assert len(scripts) == 2
    assert all("--partition=gpu\n" in script and "--time=7\n" in script for script in scripts)
    assert {point.changes["cluster.partition"] for array in sent.sweep.arrays() for point in array.points()} == {"gpu"}


def test_arrays_wait_for_each_other_and_for_what_the_config_names() -> None:
    slurm = FakeSlurm()
    slurm.max_array_size = 2
    submit(slurm, "train.seed=0..3", "cluster.extra.dependency=afterok:4711", max_running=1)
    options = [[word for word in words if word.startswith("--dependency")] for words in slurm.submitted.values()]
    assert options == [[], [f"--dependency=afterok:4711,afterany:{next(iter(slurm.submitted))}"]]


def test_a_site_without_arrays_gets_single_jobs_and_no_storm() -> None:
    slurm = FakeSlurm()
    slurm.max_array_size = 0
    assert len(submit(slurm, "train.seed=0..2").jobs) == 3
    assert not any(option.startswith("--array") for options in slurm.submitted.values() for option in options)
    with pytest.raises(RequestError, match="this site has none"):
        submit(slurm, "train.seed=3..5", max_running=2)
    with pytest.raises(RequestError, match="no job arrays"):
        submit(slurm, "train.seed=0..500")


def test_points_of_different_sizes_go_into_arrays_of_their_own() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "cluster.nodes=1,2", "train.seed=0..1")
    sizes = [array.script.read_text().split("--nodes=")[1].split("\n")[0] for array in sent.sweep.arrays()]
    assert (len(sent.jobs), sorted(sizes)) == (2, ["1", "2"])


def test_a_start_that_was_cut_off_is_completed_by_the_next() -> None:
    sent = submit(FakeSlurm(), "train.seed=0..1")
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    for at in range(200):
        child = os.fork()
        if child == 0:
            count = itertools.count()

            def seen(operation: str, path: str) -> None:
                if next(count) == at:  # noqa: B023  # called in this turn only
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                with testing.watch(seen):
                    element.claim(array, 0, record.token)
            finally:
                os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            break
    run = element.claim(array, 0, record.token)
    assert run is not None
    assert at > 10
    assert configs.load_config(run.config, site=False).train.seed == 0
    assert run.point() is not None


def test_an_element_of_a_retry_takes_a_failed_run_over_and_leaves_a_completed_one() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..1")
    (array,) = sent.sweep.arrays()
    record = array.record()
    assert record is not None
    for index, state in enumerate((RunState.FAILED, RunState.COMPLETED)):
        run = element.claim(array, index, record.token)
        assert run is not None
        ownership.submit_as(run, "slurm", ownership.take(run, 0), record.token)
        write_ended(run, state, "as the test wants")
    sweep_record = sent.sweep.record()
    assert sweep_record is not None
    retry = submission.add_list(sent.sweep, sweep_record, array.points(), "slurm", is_array=True)
    submission.submit_array(retry, sweep_record, slurm)
    again = retry.record()
    assert again is not None
    failed = element.claim(retry, 0, again.token)
    assert failed is not None
    owner = failed.owner()
    assert (failed.result(), owner and owner.token) == (None, again.token)
    assert element.claim(retry, 0, again.token) == failed  # the same job, started again by Slurm
    assert element.claim(retry, 1, again.token) is None


def test_a_list_that_cannot_be_read_is_named_and_nothing_is_submitted_over_it() -> None:
    slurm = FakeSlurm()
    sent = submit(slurm, "train.seed=0..2")
    (array,) = sent.sweep.arrays()
    lines = array.points_path.read_text().splitlines()
    array.points_path.write_text("\n".join([lines[0], lines[1][:40], lines[2]]) + "\n")
    with pytest.raises(RequestError, match=r"0001\.jsonl, line 2, cannot be read"):
        submit(slurm, "train.seed=0..5")
    assert len(slurm.submitted) == 1


def test_equal_points_of_two_sweeps_have_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    first, second = (submit(FakeSlurm(), "train.seed=0..3", name=name) for name in ("first", "second"))
    listed = [sent.sweep.arrays()[0].points() for sent in (first, second)]
    assert [point.id for point in listed[0]] == [point.id for point in listed[1]]
    assert len({point.run for points in listed for point in points}) == 8


def test_a_second_submitter_is_refused_while_one_works() -> None:
    sweep = sweep_folder.of_name("mine")
    with sweep.locked(), pytest.raises(RequestError, match="another `toolkit sweep`"):
        submit(FakeSlurm(), "train.seed=0..2")


def test_a_file_describes_a_sweep_and_arguments_win(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"extends: {Path.cwd()}/mine.yaml\ntrain: {{epochs: 3}}\n"
        "sweep:\n  name: from-file\n  max_running: 2\n  train.seed: 0..3\n"
        "  optim.lr: [0.1, 0.2]\n  optim.name: ['sgd']\n"
    )
    asked = request.read(path, ["optim.lr=0.5"], Options(max_running=7))
    assert (asked.options.name, asked.options.max_running) == ("from-file", 7)
    found = list(points.checked(asked, Path.cwd(), "slurm"))
    assert [point.values for point in found] == [{"train.seed": seed, "optim.name": "sgd"} for seed in range(4)]
    assert all(point.settings["optim.lr"] == 0.5 and point.settings["train.epochs"] == 3 for point in found)
    with pytest.raises(ConfigError, match="`toolkit sweep "):
        configs.load_config(path)
    path.write_text("sweep: {optim.lrr: [1], max_runing: 3}\njob: jobs.mine\n")
    with pytest.raises(ConfigError, match=r"line 1: sweep: 'max_runing' is neither .*did you mean 'max_running'"):
        request.read(path, [], Options())
    path.write_text("sweep: {train.seed: []}\njob: jobs.mine\n")
    with pytest.raises(ConfigError, match=r"train\.seed: an empty list"):
        request.read(path, [], Options())


def test_the_list_of_points_is_plain_json() -> None:
    sent = submit(FakeSlurm(), "train.seed=5,6")
    (array,) = sent.sweep.arrays()
    lines = [json.loads(line) for line in array.points_path.read_text().splitlines()]
    assert [line["values"] for line in lines] == [{"train.seed": 5}, {"train.seed": 6}]
