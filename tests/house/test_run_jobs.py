"""Which jobs are a run's: numbers alone do not say it, of two clusters, a new controller or a copied folder."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import EXIT_DONE, EXIT_REQUEST, RequestError
from toolkit.cli import run_rows
from toolkit.cli.main import main
from toolkit.files import rundir
from toolkit.files.run_files import RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.site import reservations  # noqa: F401  # before Slurm is replaced: it asks the real one
from toolkit.plugins.sweep import awaited, rows
from toolkit.plugins.sweep import submission as sweeps
from toolkit.plugins.sweep.request import Options, read
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.records import submitted_run, user_requests
from toolkit.run.records.ownership import Claim, Overtaken
from toolkit.run.submission import executors, handle, submit
from toolkit.run.submission.handle import attach
from toolkit.run.submission.resume_run import resume
from toolkit.slurm import cluster_name, commands

JOB = "def main(config): print(config)\n"


class Site:
    """Two clusters, alpha and beta, with one home and one runs folder. ``go`` logs in to one of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.clusters = {"alpha": FakeSlurm(), "beta": FakeSlurm()}
        for name in self.clusters:
            (folder / f"{name}.conf").write_text(f"# ours\nClusterName={name.title()}\n")
        self.go("alpha")

    def go(self, cluster: str) -> FakeSlurm:
        self.slurm = self.clusters[cluster]
        self._monkeypatch.setenv("SLURM_CONF", str(self._folder / f"{cluster}.conf"))
        return self.slurm

    def install_anew(self, cluster: str) -> FakeSlurm:
        """Replace the cluster's controller by one that has no jobs yet, and gives the same numbers again."""
        self.clusters[cluster] = FakeSlurm()
        shutil.rmtree(self._folder / "cache", ignore_errors=True)  # earlier answers are some seconds old
        return self.go(cluster)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path, monkeypatch)
    for module in (executors, handle, commands):
        monkeypatch.setattr(module, "Slurm", lambda *_: site.slurm)
    script = ".submission_file_1a2b.sh"
    monkeypatch.setattr(
        executors, "_send_to_slurm", lambda run, config, token: site.slurm.sbatch([str(run.submitit / script)])
    )
    for name in ("SLURM_CLUSTERS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "project"
    (folder / "ownjobs").mkdir(parents=True)
    (folder / "ownjobs/__init__.py").touch()
    (folder / "ownjobs/job.py").write_text(JOB)
    (folder / "own.yaml").write_text("name: own\njob: ownjobs.job\ndata: {name: synthetic}\ntrain: {epochs: 3}\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return site


def send() -> RunDir:
    return submit.submit("own.yaml", executor="slurm").dir


def allocation(job: str, cluster: str = "alpha") -> Allocation:
    return Allocation(("node1",), (1,), 1, job_id=job, cluster=cluster)


def train(run: RunDir, slurm: FakeSlurm, job: str, cluster: str = "alpha", age_s: float = 0.0) -> Claim:
    """Have the job take the run and train it. Its status is ``age_s`` old."""
    slurm.start(job)
    owner = run.owner()
    claim = Claim.of_job(run, allocation(job, cluster), None if owner is None else owner.token)
    status = RunStatus(RunState.RUNNING, job_id=job, cluster=cluster, restart_count=0, attempt=1)
    run.write_status(status.replace(updated=time.time() - age_s))
    return claim


def states(slurm: FakeSlurm) -> dict[str, str]:
    return {row.job_id: row.state for row in slurm.user_jobs()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == EXIT_REQUEST
    return capsys.readouterr().err


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_run_of_another_cluster_is_ended_there_and_no_job_here_of_its_number(
    site: Site, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    run = send()
    train(run, site.slurm, "1")
    innocent = site.go("beta").sbatch(["/elsewhere/job.sh"])
    site.slurm.start(innocent)
    text = refused(capsys, how, run.id)
    assert "belongs to job 1 of the cluster alpha" in text
    assert f"`toolkit cancel {run.id}` there ends it" in text
    assert (states(site.slurm), site.slurm.sent) == ({innocent: "RUNNING"}, [])
    assert user_requests.read_intent(run) is None
    # The advice, literally.
    site.go("alpha")
    assert main(["cancel", run.id]) == EXIT_DONE
    assert states(site.slurm)["1"] in ("COMPLETING", "CANCELLED")


def test_a_run_that_another_cluster_trains_is_resumed_here_when_its_status_is_old(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    run = send()
    claim = train(run, site.slurm, "1")
    site.go("beta")
    for arguments in (["resume", run.id], ["cancel", run.id, "--gone"]):
        assert "works on the cluster alpha: its status is 0 s old" in refused(capsys, *arguments)
    assert "belongs to job 1 of the cluster alpha" in refused(capsys, "rm", run.id)
    # Its job was killed, and five minutes have passed.
    run.write_status(run.status().replace(updated=time.time() - 301))
    sent = resume(run)
    assert (sent.job_now, run.owner().cluster, claim.holds()) == ("1", "beta", False)
    assert not sent.is_over()
    # Slurm starts alpha's job once more: the number is the same, and the run is not its own any more.
    with pytest.raises(Overtaken):
        Claim.of_job(run, allocation("1"), claim.owner.token)


def test_a_cluster_that_is_gone_for_good_can_be_said_to_be_so(site: Site) -> None:
    run = send()
    train(run, site.slurm, "1", age_s=301)
    site.go("beta")
    assert main(["cancel", run.id, "--gone"]) == EXIT_DONE
    assert run.result().state is RunState.CANCELLED
    assert main(["rm", run.id]) == EXIT_DONE


def test_a_listing_believes_no_answer_about_another_clusters_number(site: Site) -> None:
    first = send()
    site.go("beta")
    second = send()
    first_row, second_row = run_rows.status_rows([first, second])
    assert (first_row.job_id, first_row.cluster, first_row.slurm) == ("1", "alpha", None)
    assert (second_row.job_id, second_row.cluster, second_row.slurm) == ("1", "beta", "PENDING")
    site.slurm.cancel("1")
    site.slurm.advance(60)
    assert not attach(first).is_over()
    assert attach(second).is_over()


def test_no_run_waits_for_another_clusters_job(site: Site) -> None:
    first = send()
    site.go("beta")
    send()
    with pytest.raises(RequestError, match=r"has its job on the cluster alpha, for which a job of this cluster cannot"):
        awaited.find([first.id], "slurm", site.slurm.show_jobs)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_CONF": "alpha"}, "alpha"),
        ({"SLURM_CONF": "alpha", "SLURM_CLUSTERS": "Gamma"}, "gamma"),
        ({"SLURM_CONF": "alpha", "SLURM_CLUSTERS": "alpha,beta"}, ""),
        ({"SLURM_CONF": "alpha", "SLURM_CLUSTERS": "all"}, ""),
        ({"SLURM_CONF": "alpha", "SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": "beta"}, "beta"),
        ({"SLURM_CONF": "alpha", "SLURM_CLUSTER_NAME": "beta"}, "alpha"),  # left in a login shell
        ({"SLURM_CONF": "missing"}, ""),
    ],
)
def test_a_cluster_is_named_by_what_slurms_programs_go_by(site: Site, tmp_path: Path, environ: Any, name: str) -> None:
    environ = {**environ, "SLURM_CONF": str(tmp_path / f"{environ['SLURM_CONF']}.conf"), "PATH": ""}
    assert cluster_name.name_here(environ) == name


@pytest.mark.parametrize("script", ["/home/u/other.sh", "/bin/bash", "of another run"])
def test_a_number_that_is_given_again_is_another_job(site: Site, script: str) -> None:
    run = send()
    train(run, site.slurm, "1", age_s=60)
    slurm = site.install_anew("alpha")
    if script == "of another run":
        other = send()
        assert run_rows.status_rows([other])[0].slurm == "PENDING"
    else:
        slurm.sbatch([script])
    slurm.start("1")
    assert run_rows.status_rows([run])[0].state == "running? (silent)"
    assert attach(run).is_over()
    assert main(["cancel", run.id]) == EXIT_DONE
    assert (states(slurm), slurm.sent) == ({"1": "RUNNING"}, [])
    assert run.result().state is RunState.CANCELLED
    assert resume(run).job_now == "2"


def own_script(site: Site, command: str, job: str) -> RunDir:
    """Return a run that the user's own batch script has started, and that has recorded what Slurm calls it."""
    slurm = site.slurm
    assert slurm.sbatch([command]) == job
    run = rundir.create("own", rundir.runs_root())
    run.config.write_text("name: own\n")
    rundir.remember_job(run, f"alpha-{job}")
    row = slurm.show_job(job)
    train(run, slurm, job).note_command(None if row is None else row.command)
    return run


def test_a_job_of_the_users_own_script_is_known_by_its_command_and_its_run(site: Site) -> None:
    run = own_script(site, "/home/u/ddp.sh a.yaml", "1")
    assert not attach(run).is_over()
    slurm = site.install_anew("alpha")
    other = slurm.sbatch(["/home/u/ddp.sh b.yaml"])
    assert attach(run).is_over()
    slurm = site.install_anew("alpha")
    second = own_script(site, "/home/u/ddp.sh a.yaml", other)  # the same script, and the same number
    assert attach(run).is_over()
    assert main(["cancel", run.id]) == EXIT_DONE
    assert slurm.sent == []
    assert main(["cancel", second.id]) == EXIT_DONE
    assert [sent.job_id for sent in slurm.sent] == ["1"]


@pytest.mark.parametrize("makes", [lambda site: send(), lambda site: own_script(site, "/home/u/ddp.sh", "1")])
def test_a_copy_of_a_run_has_no_job(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], makes: Callable[[Site], RunDir]
) -> None:
    run = makes(site)
    if states(site.slurm)["1"] == "PENDING":
        train(run, site.slurm, "1")
    copy = RunDir(tmp_path / "backup" / run.name / run.id)
    shutil.copytree(run.path, copy.path, symlinks=True)
    for how in ("cancel", "stop"):
        text = refused(capsys, how, str(copy.path))
        assert f"is a copy, and the job is that of {run.path}: `toolkit cancel {run.path}` ends it" in text
    assert (states(site.slurm)["1"], site.slurm.sent) == ("RUNNING", [])
    assert not attach(run).is_over()
    assert attach(copy).is_over()
    copy.write_status(copy.status().replace(updated=1.0))
    assert run_rows.status_rows([copy])[0].state == "lost"
    # Both advices, literally.
    assert main(["cancel", str(copy.path), "--gone"]) == EXIT_DONE
    assert (copy.result().state, run.result()) == (RunState.CANCELLED, None)
    assert main(["cancel", str(run.path)]) == EXIT_DONE
    assert states(site.slurm)["1"] != "RUNNING"


@pytest.mark.parametrize("moves", ["renamed", "root moved", "root linked", "config renamed"])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_run_that_was_moved_keeps_its_job(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: str, is_running: bool
) -> None:
    run = send()
    if is_running:
        train(run, site.slurm, "1")
    root = rundir.runs_root()
    if moves == "renamed":
        moved = run.path.with_name("20260101-000000-00000000")
        run.path.rename(moved)
    elif moves == "config renamed":
        moved = root / "better" / run.id
        run.path.parent.rename(moved.parent)
    else:
        moved = tmp_path / "new" / run.name / run.id
        root.rename(tmp_path / "new")
        if moves == "root linked":
            root.symlink_to(tmp_path / "new")
    monkeypatch.setenv("TOOLKIT_RUNS", str(moved.parent.parent))
    again = RunDir(moved)
    assert submitted_run.run_jobs(again).ask(site.slurm.show_jobs)["1"] is not None
    assert not attach(again).is_over()
    assert main(["cancel", str(moved)]) == EXIT_DONE
    assert states(site.slurm)["1"] in ("COMPLETING", "CANCELLED")


def test_elements_of_an_array_are_told_from_others_of_the_same_number(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look() -> list[str]:
        return [each.state for each in rows.of_points(sweep, run_rows.status_rows)]

    request = read("own.yaml", ["train.seed=0..1"], Options())
    sweep = sweeps.submit(request, Path.cwd(), "slurm", site.slurm).sweep
    (array,) = sweep.arrays().values()
    run = sweep.run_of(array.points[0])
    site.slurm.start("1_0")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    Claim.of_job(run, allocation("1_0"), array.token)
    monkeypatch.delenv("SLURM_JOB_ID")
    run.write_status(run.status().replace(state=RunState.RUNNING, updated=1.0, job_id="1_0", cluster="alpha"))
    assert look() == ["running (RUNNING)", "queued"]
    # On beta an array with the same number runs.
    site.go("beta").sbatch(["--array=0-1", "/home/u/array.sh"])
    site.slurm.start("1_0")
    assert look() == ["running? (silent)", "queued"]
    assert "has jobs on the cluster alpha, and this is beta" in refused(capsys, "sweep", "stop", "own")
    assert (site.slurm.sent, [*states(site.slurm).values()]) == ([], ["RUNNING", "PENDING"])
    # And so it is where alpha's controller was installed anew.
    slurm = site.install_anew("alpha")
    slurm.sbatch(["--array=0-1", "/home/u/array.sh"])
    slurm.start("1_0")
    waiting = sweep.run_of(array.points[1])
    waiting.write_status(waiting.status().replace(updated=1.0))
    assert [state.split()[0] for state in look()] == ["lost", "lost"]
    assert sweeps.stop(sweep, slurm) == (0, 0, {})
    assert (slurm.sent, [*states(slurm).values()]) == ([], ["RUNNING", "PENDING"])


def test_a_follow_up_job_is_the_runs_and_one_of_the_same_number_elsewhere_is_not(site: Site) -> None:
    run = send()
    claim = train(run, site.slurm, "1")
    script = str(run.submitit / "follow-up.sh")
    claim.note_follow_ups([site.slurm.sbatch(["--dependency=afterany:1", script])])
    answers = submitted_run.run_jobs(run).ask(site.slurm.show_jobs)
    assert [status and status.state for status in answers.values()] == ["RUNNING", "PENDING"]
    slurm = site.install_anew("alpha")
    for _ in range(2):
        slurm.sbatch(["/home/u/other.sh"])
    assert submitted_run.run_jobs(run).ask(slurm.show_jobs) == {"1": None, "2": None}
    attach(run).cancel()
    assert [*states(slurm).values()] == ["PENDING", "PENDING"]
