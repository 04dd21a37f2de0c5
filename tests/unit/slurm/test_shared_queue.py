"""One answer of Slurm for all processes of a user. How often Slurm is asked, and what a failed answer means."""

import fcntl
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import SlurmError
from toolkit.base.trust import cache_dir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.slurm import cluster_name, shared_queue
from toolkit.slurm.jobs import JobStatus
from toolkit.slurm.shared_queue import SharedQueue
from toolkit.slurm.states import describe_reason, expected_start


class Site:
    """A fake Slurm, its clock, and any number of processes."""

    def __init__(self, path: Path | None, accounting: bool = True) -> None:
        self.slurm = FakeSlurm(accounting=accounting)
        self.path: Any = path

    def process(self) -> SharedQueue:
        return SharedQueue(self.slurm, self.path, lambda: self.slurm.now, self.slurm.advance)

    @property
    def calls(self) -> int:
        return len(self.slurm.asked_for_jobs)

    def state(self, job: str) -> str:
        """Return the state that a new process is told of a job."""
        return self.process().show_jobs([job])[job].state


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "queue.json")


def test_twenty_watchers_of_fifty_jobs_ask_120_times_an_hour_at_most(site: Site) -> None:
    jobs = [site.slurm.sbatch(["job.sh"]) for _ in range(50)]
    watchers = [site.process() for _ in range(20)]
    begun = site.slurm.now
    while site.slurm.now < begun + 3600:
        for first, watcher in enumerate(watchers):
            found = watcher.show_jobs(jobs[first : first + 10], every_s=30)
            assert len(found) == 10
        site.slurm.advance(20)
    assert 60 <= site.calls <= 120


def test_questions_to_accounting_count_as_well(site: Site) -> None:
    """Jobs that Slurm has forgotten come up at each question."""
    queue, begun, number = site.process(), site.slurm.now, 0
    while site.slurm.now < begun + 3600:
        number += 1
        assert queue.show_jobs(["900000", f"90000{number}"], every_s=30)["900000"] is None
        site.slurm.advance(5)
    assert site.calls <= 120


def test_a_job_submitted_after_the_answer_is_not_yet_known_and_never_none(site: Site) -> None:
    first = site.slurm.sbatch(["job.sh"])
    site.process().show_jobs([first])
    second = site.slurm.sbatch(["job.sh"])
    assert list(site.process().show_jobs([first, second])) == [first]
    site.slurm.advance(5)
    assert list(site.process().show_jobs([first, second])) == [first, second]


def test_a_controller_that_does_not_answer_is_asked_once_for_all_and_says_nothing(site: Site) -> None:
    job = site.slurm.sbatch(["job.sh"])
    site.process().show_jobs([job])
    site.slurm.advance(10)
    site.slurm.is_up = False
    for _ in range(20):
        with pytest.raises(SlurmError, match="Unable to contact"):
            site.process().show_jobs([job])
    assert site.calls == 2
    site.slurm.is_up = True
    site.slurm.advance(5)
    assert site.state(job) == "PENDING"


def test_the_end_of_a_job_is_remembered_where_accounting_is_off(tmp_path: Path) -> None:
    site = Site(tmp_path / "queue.json", accounting=False)
    job = site.slurm.sbatch(["job.sh"])
    site.slurm.start(job)
    site.slurm.finish(job, exit_code=1)
    site.process().show_jobs([job])
    site.slurm.forget(job)
    site.slurm.advance(60)
    assert site.state(job) == "FAILED"
    assert site.process().show_jobs(["99"]) == {}
    site.slurm.advance(60)
    assert site.process().show_jobs(["99"]) == {"99": None}


def test_a_job_forgotten_before_any_look_is_found_by_the_question_of_another(site: Site) -> None:
    """Each process asks accounting about its own jobs, and one whose answer is always fresh never asks."""
    theirs, mine = (site.slurm.sbatch(["job.sh"]) for _ in range(2))
    site.slurm.start(mine)
    site.slurm.finish(mine, exit_code=1)
    site.slurm.forget(mine)
    other, process = site.process(), site.process()
    other.show_jobs([theirs], every_s=30)
    site.slurm.advance(10)
    assert process.show_jobs([mine], every_s=30) == {}
    site.slurm.advance(20)
    other.show_jobs([theirs], every_s=30)
    site.slurm.advance(10)
    calls = site.calls
    assert (process.show_jobs([mine], every_s=30)[mine].state, site.calls) == ("FAILED", calls)


def test_a_job_that_is_requeued_after_its_end_waits_again(site: Site) -> None:
    job = site.slurm.sbatch(["job.sh"])
    site.slurm.start(job)
    site.slurm.finish(job, exit_code=1)
    site.process().show_jobs([job])
    site.slurm.advance(10)
    site.slurm.requeue(job)
    status = site.process().show_jobs([job])[job]
    assert (status.state, status.reason) == ("PENDING", "BeginTime")


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"[1]", b'{"asked": "x"}', b'{"jobs": [1]}'])
def test_a_damaged_answer_is_asked_for_again(site: Site, content: bytes) -> None:
    job = site.slurm.sbatch(["job.sh"])
    site.path.write_bytes(content)
    assert site.process().show_jobs([job])[job] is not None
    assert json.loads(site.path.read_bytes())["jobs"] == [f"{job}|PENDING|||Priority"]
    assert site.path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_was_killed_while_it_asked_is_not_waited_for(site: Site) -> None:
    job = site.slurm.sbatch(["job.sh"])
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    site.path.write_text(json.dumps({"asked": site.slurm.now - 10, "asker": f"{socket.gethostname()} {dead.pid}"}))
    before = site.slurm.now
    assert site.process().show_jobs([job])[job] is not None
    assert site.slurm.now == before


def test_a_process_that_asks_is_waited_for_but_not_for_ever(site: Site) -> None:
    """It may be stopped, or on another node that is down."""
    job = site.slurm.sbatch(["job.sh"])
    begun = site.slurm.now
    site.path.write_text(json.dumps({"asked": begun, "asker": "elsewhere 1 boot:1:1"}))
    with pytest.raises(SlurmError, match="has not answered elsewhere 1 yet"):
        site.process().show_jobs([job])
    assert site.slurm.now - begun < 11
    site.slurm.advance(60)
    assert site.process().show_jobs([job])[job] is not None
    assert site.calls == 1


def test_a_lock_that_is_never_released_blocks_nobody(site: Site) -> None:
    job = site.slurm.sbatch(["job.sh"])
    with site.path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert site.process().show_jobs([job])[job] is not None


def test_without_a_folder_to_write_each_process_asks_as_rarely(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing/queue.json"):
        site = Site(path)
        job, queue = site.slurm.sbatch(["job.sh"]), site.process()
        for _ in range(60):
            assert queue.show_jobs([job], every_s=30)[job] is not None
            site.slurm.advance(1)
        assert site.calls == 2


def _ask(path: Path, log: Path) -> None:
    class Slow(FakeSlurm):
        def user_jobs(self) -> list[JobStatus]:
            with log.open("a") as file:
                file.write("x")
            time.sleep(0.3)
            return []

    assert SharedQueue(Slow(), path).show_jobs(["1"], every_s=30) == {"1": None}


def test_processes_that_ask_at_the_same_moment_make_one_call(tmp_path: Path) -> None:
    """Real processes on a real file."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_ask, args=(tmp_path / "q.json", tmp_path / "log")) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "x"


def test_the_killed_asker_of_a_real_call_hinders_no_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    asker = context.Process(target=_ask, args=(tmp_path / "q.json", tmp_path / "log"))
    asker.start()
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    os.kill(asker.pid, signal.SIGKILL)
    asker.join()
    assert SharedQueue(FakeSlurm(), tmp_path / "q.json").show_jobs(["1"], every_s=0) == {"1": None}


QUOTED = '"c1" # the second'


def test_clusters_and_users_have_answers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for number in range(2):
        conf = tmp_path / f"{number}.conf"
        conf.write_text(f"# ClusterName=none\nClusterName={'c0' if number == 0 else QUOTED}\n")
        monkeypatch.setenv("SLURM_CONF", str(conf))
        names.add(shared_queue._cluster(os.environ))
    monkeypatch.delenv("SLURM_CONF")
    names.add(shared_queue._cluster(os.environ))
    assert len(names) == 3
    assert cluster_name.name_in_config({"SLURM_CONF": str(tmp_path / "1.conf")}) == "c1"


def test_the_cache_folder_is_private_and_one_that_others_may_change_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert cache_dir() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    assert cache_dir() is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "jobs with a higher priority come first (Priority)"),
        ("QOSMaxGRESPerUser", "a limit of its QOS is reached: GPUs, of each user (QOSMaxGRESPerUser)"),
        ("QOSGrpCpuLimit", "a limit of its QOS is reached: CPUs, of everybody in it together (QOSGrpCpuLimit)"),
        ("AssocGrpCPUMinutesLimit", "a limit of its account is reached: CPUs over time, of everybody in it together"),
        ("AssocMaxJobsLimit", "a limit of its account is reached: jobs (AssocMaxJobsLimit)"),
        ("ReqNodeNotAvail, UnavailableNodes:node1", "down, drained or reserved (ReqNodeNotAvail, UnavailableNodes:"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in", "the nodes that it needs are down"),
        ("launch failed requeued held", "launch failed requeued held"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reasons_are_told_in_words(reason: str, words: str) -> None:
    assert words in describe_reason(reason)


def test_an_expected_start_is_a_time_of_day_or_a_date() -> None:
    now = 1_800_000_000.0
    assert expected_start(now + 60, now) == time.strftime("%H:%M", time.localtime(now + 60))
    assert len(expected_start(now + 86400, now)) > 10
    assert expected_start(None, now) == expected_start(now - 1, now) == ""


def test_an_answer_from_a_clock_that_was_ahead_is_asked_anew(tmp_path: Path) -> None:
    site = Site(tmp_path / "queue.json")
    job = site.slurm.sbatch(["job.sh"])
    site.slurm.advance(7200)
    site.process().show_jobs([job])
    site.slurm.now -= 7200
    before = site.calls
    site.process().show_jobs([job])
    assert site.calls == before + 1
