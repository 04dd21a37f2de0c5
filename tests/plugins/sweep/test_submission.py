"""Submitting a sweep: every point exactly once, with few calls of sbatch. The submitter may be killed anywhere."""

import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, RequestError, SlurmRefusedError
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState
from toolkit.nodes.allocation import Allocation
from toolkit.plugins import testing
from toolkit.plugins.sweep import request, submission, sweep_folder
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.sweep.submission import Submitted
from toolkit.plugins.sweep.sweep_folder import ArrayRecord, Point, SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import ownership
from toolkit.slurm.jobs import JobRow

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

    def __init__(self, path: Path, kill_after: int = -1, most: int = 9) -> None:
        super().__init__()
        self.path, self._kill_after, self._most, self.max_array_size = path, kill_after, most, 3
        self.path.touch()

    @property
    def scripts(self) -> list[str]:
        return self.path.read_text().split()

    def sbatch(self, arguments: Sequence[str]) -> str:
        number = len(self.scripts)
        if number == self._most:
            raise SlurmRefusedError("AssocMaxSubmitJobLimit")
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
            if "/runs/" in path and "/.code" not in path and next(count) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with testing.hook_disk_operations(seen), suppress(RequestError):
                submit(slurm, *(overrides or ["train.seed=0..6"]), **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def assert_each_point_once(slurm: SlurmOnDisk, sweep: SweepDir) -> None:
    """Each point has one run, whose owner's token is in the script of the job that its files name."""
    arrays = sweep.arrays()
    assert sorted(slurm.scripts) == sorted(str(path.with_suffix(".sh")) for path in arrays)
    points = [point for array in arrays.values() for point in array.points]
    assert Counter(point.values["train.seed"] for point in points) == Counter(range(7))
    assert {run.path for run in rundir.all_runs()} == {sweep.run_of(point).path for point in points}
    for path, array in arrays.items():
        assert array.job_id == str(slurm.scripts.index(str(path.with_suffix(".sh"))))
        assert f"{ownership.TOKEN_VARIABLE}={array.token}\n" in path.with_suffix(".sh").read_text()
        for index, point in enumerate(array.points):
            run, owner = sweep.run_of(point), sweep.run_of(point).owner()
            assert owner.token == array.token
            assert ownership.jobs_of(run) == [f"{array.job_id}_{index}"]
            assert configs.load_config(run.config, site=False).train.seed == point.values["train.seed"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", range(0, 400, 4))
def test_a_submitter_killed_at_any_operation_loses_nothing(tmp_path: Path, at: int) -> None:
    slurm = SlurmOnDisk(tmp_path / "jobs")
    # It has about 370 operations below the folder for runs; the last numbers here are after its end.
    assert killed(slurm, at) or at > 350
    sent = submit(slurm, "train.seed=0..6")
    assert_each_point_once(slurm, sent.sweep)


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", range(284, 304))
def test_a_submitter_killed_while_it_removes_what_slurm_has_refused_loses_nothing(tmp_path: Path, at: int) -> None:
    killed(SlurmOnDisk(tmp_path / "jobs", most=1), at)
    slurm = SlurmOnDisk(tmp_path / "jobs")
    assert_each_point_once(slurm, submit(slurm, "train.seed=0..6").sweep)


@pytest.mark.parametrize("number", range(3))
def test_a_submitter_killed_after_an_sbatch_finds_its_job(tmp_path: Path, number: int) -> None:
    slurm = SlurmOnDisk(tmp_path / "jobs", kill_after=number)
    assert killed(slurm, -1)
    sent = submit(SlurmOnDisk(tmp_path / "jobs"), "train.seed=0..6")
    assert_each_point_once(slurm, sent.sweep)


def interrupt(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *seeds: str) -> None:
    """Have a submission end where it calls this function."""
    with monkeypatch.context() as patched:
        patched.setattr(module, name, lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            submit(FakeSlurm(), *seeds)


def test_a_completed_submission_keeps_points_that_ended_or_were_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    interrupt(monkeypatch, submission._Sender, "_sbatch", "train.seed=0..3")
    sweep = sweep_folder.of_name("mine")
    ended, resumed, *left = map(sweep.run_of, sweep.points())
    write_ended(ended, RunState.CANCELLED, "by its user")
    taken = ownership.submit_as(resumed, "slurm", ownership.take(resumed, 1))
    for _ in range(2):
        assert submit(slurm, "train.seed=0..3").new == 0
        assert sorted(point.values["train.seed"] for point in sweep.points()) == [0, 1, 2, 3]
    assert [*slurm.submitted] == ["1"]
    assert [ownership.jobs_of(run) for run in left] == [["1_0"], ["1_1"]]
    assert (ended.result(), resumed.owner()) == (RunResult(RunState.CANCELLED, 0, why="by its user"), taken)


def test_points_that_live_on_another_cluster_are_not_submitted_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their submitter was killed before it knew the job, which started."""
    interrupt(monkeypatch, submission, "_note", "train.seed=0..1")
    sweep = sweep_folder.of_name("mine")
    here, there = map(sweep.run_of, sweep.points())
    owner = there.owner()
    fsio.write_json(there.path / "owner.json", owner.replace(cluster="alps").to_json())
    monkeypatch.setenv("SLURM_CLUSTERS", "eiger")
    slurm = FakeSlurm()
    for _ in range(2):
        submit(slurm, "train.seed=0..1")
        assert f"run {there.id} is not submitted again: its job is on the cluster alps" in caplog.text
        assert sorted(point.values["train.seed"] for point in sweep.points()) == [0, 1]
    assert (ownership.jobs_of(here), [*slurm.submitted]) == (["1_0"], ["1"])
    assert there.owner() == owner.replace(cluster="alps")


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


def test_an_array_that_slurm_holds_for_ever_is_named(slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    shown = slurm.show_job
    slurm.show_job = lambda job_id: replace(shown(job_id) or JobRow(job_id, "PENDING"), reason="PartitionTimeLimit")
    submit(slurm, "train.seed=0..1")
    assert "job 1 is queued and may never start" in caplog.text
    assert "`toolkit sweep stop mine` cancels it" in caplog.text


def test_a_point_of_two_interrupted_submissions_is_submitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        interrupt(monkeypatch, ownership, "submit_as", "train.seed=0..1")
    slurm = FakeSlurm()
    sweep = submit(slurm, "train.seed=0..1").sweep
    (array,) = sweep.arrays().values()
    assert ([point.values["train.seed"] for point in array.points], [*slurm.submitted]) == ([0, 1], ["1"])


def test_no_script_has_the_name_of_one_that_slurm_has_refused() -> None:
    slurm, names = FakeSlurm(), list[str]()
    usual = slurm.sbatch

    def sbatch(arguments: Sequence[str]) -> str:
        names.append(arguments[-1])
        return usual(arguments)

    slurm.sbatch, slurm.refuses_submissions = sbatch, "AssocMaxSubmitJobLimit"
    with pytest.raises(RequestError):
        submit(slurm, "train.seed=0..1")
    slurm.refuses_submissions = ""
    submit(slurm, "train.seed=0..1")
    assert len(set(names)) == 2
    # Nor does a second submitter, where the file system keeps nobody out.
    sweep = sweep_folder.of_name("mine")
    assert sweep.next_array("a") != sweep.next_array("b")


def test_files_that_must_not_be_torn_are_on_the_disk_before_slurm_has_the_job() -> None:
    flushed, needed = list[str](), set[str]()
    slurm = FakeSlurm()
    usual = slurm.sbatch

    def sbatch(arguments: Sequence[str]) -> str:
        for run in rundir.all_runs():
            needed.update(str(run.path / name) for name in ("owner.json", "config.yaml", "point.json"))
        assert needed <= {re.sub(r"\.([^/]+)\.tmp-\w+$", r"\1", path) for path in flushed}
        return usual(arguments)

    slurm.sbatch = sbatch
    with testing.hook_disk_operations(lambda operation, path: flushed.append(path) if operation == "fsync" else None):
        sent = submit(slurm, "train.seed=0..1")
    assert len(needed) == 6
    for run in map(sent.sweep.run_of, sent.sweep.points()):
        assert any(path.startswith(str(run.submitit / ".submission.json")) for path in flushed)


def test_jobs_of_an_sbatch_that_came_too_late_leave_the_points_alone() -> None:
    sent = submit(FakeSlurm(), "train.seed=0..1")
    (array,) = sent.sweep.arrays().values()
    run = sent.sweep.run_of(array.points[0])
    place = Allocation(("node1",), (1,), 1, job_id="99_0")
    with pytest.raises(ownership.Overtaken):
        ownership.Claim.of_job(run, place, "another token")
    assert ownership.Claim.of_job(run, place, array.token).owner.token == array.token
    assert (run.code / "jobs/mine.py").is_file()


def test_each_job_of_an_array_supervises_its_run() -> None:
    sent = submit(FakeSlurm(), "train.seed=0..1")
    ((path, array),) = sent.sweep.arrays().items()
    first, second = (point.run for point in array.points)
    root, script = rundir.runs_root(), path.with_suffix(".sh")
    lines = script.read_text().splitlines()
    at = lines.index("runs=(")
    assert lines[at : at + 4] == ["runs=(", first, second, ")"]
    assert lines[-1] == f'exec {sys.executable} -m toolkit supervise "$TOOLKIT_SUPERVISE_RUN/config.yaml"'
    # A shell picks the run by the element's number, and logs into its folder.
    script.write_text(script.read_text().replace(lines[-1], 'echo "$TOOLKIT_SUPERVISE_RUN"'))
    environ = {"PATH": os.environ["PATH"], "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    command = ["bash", str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert (root / second / "submitit/7_1_0_log.out").read_text() == f"{root / second}\n"
    # One that was removed is not run.
    shutil.rmtree(root / second)
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, f"there is no {root / second}/config.yaml\n")


def test_many_points_take_as_few_calls_as_arrays_can_have(slurm: FakeSlurm) -> None:
    slurm.max_array_size = 21
    sent = submit(slurm, "train.seed=0..49", max_running=20)
    assert len(sent.jobs) == len(slurm.submitted) == math.ceil(50 / 21)
    first, second = list(slurm.submitted.values())[:2]
    assert "--array=0-20%20" in first
    assert not any(option.startswith("--dependency") for option in first)
    assert f"--dependency=afterany:{sent.jobs[0]}" in second  # at most 20 of the whole sweep run


def test_more_points_than_a_sweep_may_have_are_refused() -> None:
    with pytest.raises(RequestError, match=r"2,001 points are more than the 2,000"):
        submit(FakeSlurm(), "train.seed=0..2000")
    points = tuple(Point(str(number), f"mine/{number}") for number in range(1999))
    array = ArrayRecord(points, "token", "slurm", is_array=True, job_id="1")
    fsio.write_json(sweep_folder.of_name("mine").next_array("token"), array.to_json())
    with pytest.raises(RequestError, match=r"sweep mine: 2,001 points are more than the 2,000"):
        submit(FakeSlurm(), "train.seed=4,5")


def test_the_same_points_are_never_submitted_twice(slurm: FakeSlurm) -> None:
    first = submit(slurm, "train.seed=0..3")
    again = submit(slurm, "train.seed=0..3", "cluster.time_min=99", "cluster.partition=long")
    more = submit(slurm, "train.seed=2..5")
    assert [(s.new, s.known, len(s.jobs)) for s in (first, again, more)] == [(4, 0, 1), (0, 4, 0), (2, 2, 1)]
    assert submit(slurm, "train.seed=0..3", "train.epochs=9").new == 4  # another config is another point
    assert submit(slurm, "train.seed=0..3", name="other").new == 4
    runs = [point.run for point in first.sweep.points()]
    assert len(set(runs)) == len(runs) == 10


def test_a_point_has_the_config_that_submit_would_make() -> None:
    overrides = ["optim.lr=0.125", "params.width=3", "data.root=."]
    sent = submit(FakeSlurm(), "optim.lr=0.125,0.5", "params.width=2,3", "data.root=.")
    asked = configs.load_config("mine.yaml", overrides)
    asked.data.root = str(Path.cwd())
    wanted = {"optim.lr": 0.125, "params.width": 3}
    run = next(sent.sweep.run_of(point) for point in sent.sweep.points() if point.values == wanted)
    assert configs.load_config(run.config, site=False) == asked
    place = run.point()
    assert (place.sweep, place.values) == ("mine", {"optim.lr": 0.125, "params.width": 3})


def test_references_follow_the_swept_key() -> None:
    asked = request.read(
        "mine.yaml", ["optim.lr=0.1,0.2", "optim.min_lr=${optim.lr}", "optim.schedule=cosine"], Options()
    )
    found = request.check_points(asked, Path.cwd(), "slurm")
    assert [point.config.optim.min_lr for point in found] == [0.1, 0.2]


def test_every_combination_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.min_lr: 0\.3 is more than optim\.lr 0\.2.*at the point"):
        submit(FakeSlurm(), "optim.lr=0.5,0.2", "optim.min_lr=0.1,0.3", "optim.schedule=cosine")
    with pytest.raises(ConfigError, match=r"optim\.lrr: unknown key"):
        submit(FakeSlurm(), "optim.lrr=1,2")
    with pytest.raises(ConfigError, match=r"params\.widht"):
        submit(FakeSlurm(), "params.widht=1,2")
    with pytest.raises(RequestError, match=r"cluster\.partition: .*cannot be swept"):
        submit(FakeSlurm(), "cluster.partition=a,b")
    with pytest.raises(ConfigError, match=r"cluster\.components: Slurm has no arrays of heterogeneous jobs"):
        submit(FakeSlurm(), "optim.lr=0.1,0.2", "cluster={components: [{}, {}]}")
    assert not (tmp_path / "runs").exists()


def test_points_that_slurm_refuses_are_sent_by_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm()
    slurm.max_array_size, sbatch = 2, slurm.sbatch

    def refuse_the_second(arguments: Sequence[str]) -> str:
        slurm.refuses_submissions = "AssocMaxSubmitJobLimit" if slurm.submitted else ""
        return sbatch(arguments)

    monkeypatch.setattr(slurm, "sbatch", refuse_the_second)
    with pytest.raises(
        RequestError, match=r"(?s)2 points are not submitted.*AssocMaxSubmitJobLimit.*Nothing is lost"
    ) as caught:
        submit(slurm, "train.seed=0..3", "cluster.partition=gpuu")
    assert caught.value.exit_code == 2
    assert len(rundir.all_runs()) == 2
    # They are made anew: the partition may have been wrong.
    monkeypatch.setattr(slurm, "sbatch", sbatch)
    slurm.refuses_submissions = ""
    sent = submit(slurm, "train.seed=0..3", "cluster.partition=gpu", "cluster.time_min=7")
    assert (sent.new, sorted(point.values["train.seed"] for point in sent.sweep.points())) == (2, [0, 1, 2, 3])
    scripts = [path.with_suffix(".sh").read_text() for path in sent.sweep.arrays()]
    assert ["--partition=gpu\n" in script and "--time=7\n" in script for script in scripts] == [False, True]


def test_arrays_wait_for_each_other_and_for_what_the_config_names(slurm: FakeSlurm) -> None:
    slurm.max_array_size = 2
    submit(slurm, "train.seed=0..3", "cluster.extra.dependency=afterok:4711", max_running=1)
    options = [[word for word in words if word.startswith("--dependency")] for words in slurm.submitted.values()]
    assert options == [[], [f"--dependency=afterok:4711,afterany:{next(iter(slurm.submitted))}"]]


def test_a_site_without_arrays_gets_single_jobs_and_no_storm(slurm: FakeSlurm) -> None:
    slurm.max_array_size = 0
    assert len(submit(slurm, "train.seed=0..2").jobs) == 3
    assert not any(option.startswith("--array") for options in slurm.submitted.values() for option in options)
    with pytest.raises(RequestError, match="this site has none"):
        submit(slurm, "train.seed=3..5", max_running=2)
    with pytest.raises(RequestError, match="no job arrays"):
        submit(slurm, "train.seed=0..200")


def test_points_of_different_sizes_go_into_arrays_of_their_own(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "cluster.nodes=1,2", "train.seed=0..1")
    scripts = [path.with_suffix(".sh").read_text() for path in sent.sweep.arrays()]
    sizes = [script.split("--nodes=")[1].split("\n")[0] for script in scripts]
    assert (len(sent.jobs), sorted(sizes)) == (2, ["1", "2"])


def test_a_damaged_record_is_named_and_nothing_is_submitted_over_it(slurm: FakeSlurm) -> None:
    sent = submit(slurm, "train.seed=0..2")
    (path,) = sent.sweep.arrays()
    path.write_text(path.read_text()[:100])
    with pytest.raises(RequestError, match=r"0001-\w+\.json"):
        submit(slurm, "train.seed=0..5")
    assert len(slurm.submitted) == 1


def test_equal_points_of_two_sweeps_have_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    first, second = (submit(FakeSlurm(), "train.seed=0..3", name=name) for name in ("first", "second"))
    listed = [sent.sweep.points() for sent in (first, second)]
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
    found = request.check_points(asked, Path.cwd(), "slurm")
    assert [point.values for point in found] == [{"train.seed": seed, "optim.name": "sgd"} for seed in range(4)]
    assert {(point.config.optim.lr, point.config.train.epochs) for point in found} == {(0.5, 3)}
    with pytest.raises(ConfigError, match="`toolkit sweep "):
        configs.load_config(path)
    path.write_text("sweep: {optim.lrr: [1], max_runing: 3}\njob: jobs.mine\n")
    with pytest.raises(ConfigError, match=r"line 1: sweep: 'max_runing' is neither .*did you mean 'max_running'"):
        request.read(path, [], Options())
    path.write_text("sweep: {train.seed: []}\njob: jobs.mine\n")
    with pytest.raises(ConfigError, match=r"train\.seed: an empty list"):
        request.read(path, [], Options())
