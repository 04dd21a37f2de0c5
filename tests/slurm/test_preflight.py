"""`toolkit doctor` on sick nodes: it names the right node and reason, and no other."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from tests.slurm.site import END_S, Site
from tests.slurm.test_stop import completed, slow_project, submit

pytestmark = [pytest.mark.slurm, pytest.mark.sample(2)]

SICK = "node3"
TEMP = "/var/tmp"
#: Adds 90 s to the time of day of every program called python. Nobody else's clock: munge has its own opinion of those.
CLOCK = """
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int lead(void) { return strncmp(program_invocation_short_name, "python", 6) ? 0 : 90; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += lead();
    return failed;
}
"""


@contextmanager
def undone(site: Site, *argv: str) -> Iterator[None]:
    """What was done to the sick node has this to undo it."""
    try:
        yield
    finally:
        site.box.run(argv, node=SICK)


@contextmanager
def clock_off(site: Site) -> Iterator[None]:
    compiler = shutil.which("cc")
    assert compiler is not None, "a node with another clock takes a C compiler: apt-get install gcc libc6-dev"
    library = site.box.shared / "clock.so"
    build = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library)]
    subprocess.run(build, input=CLOCK, text=True, check=True)
    site.box.run(["tee", "/etc/ld.so.preload"], input=f"{library}\n", node=SICK)
    with undone(site, "rm", "/etc/ld.so.preload"):
        yield


@contextmanager
def temp_full(site: Site) -> Iterator[None]:
    site.box.run(["mount", "-t", "tmpfs", "-o", "size=200k,mode=1777", "tmpfs", TEMP], node=SICK)
    with undone(site, "umount", TEMP):
        site.box.run(["dd", "if=/dev/zero", f"of={TEMP}/big"], node=SICK, check=False)
        yield


@contextmanager
def folder_read_only(site: Site) -> Iterator[None]:
    site.box.run(["mount", "--bind", str(site.folder), str(site.folder)], node=SICK)
    with undone(site, "umount", "--lazy", str(site.folder)):  # the job's agent there has yet to leave
        site.box.run(["mount", "-o", "remount,bind,ro", str(site.folder)], node=SICK)
        yield


@contextmanager
def folder_stale(site: Site) -> Iterator[None]:
    site.box.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(site.folder)], node=SICK)
    with undone(site, "umount", str(site.folder)):
        yield


@contextmanager
def cut_off(site: Site, node: str, *peers: str) -> Iterator[None]:
    """``node`` sends nothing to its peers, and answers nothing that comes from them. Slurm still reaches all."""
    with ExitStack() as stack:
        for address in (site.box.spec.addresses[peer] for peer in peers):
            site.box.run(["ip", "route", "add", "blackhole", address], node=node)
            stack.callback(site.box.run, ["ip", "route", "del", "blackhole", address], node=node)
        yield


@contextmanager
def without_python(site: Site) -> Iterator[None]:
    """Its environment is not mounted, as on a node that has missed its file server."""
    site.box.run(["mount", "-t", "tmpfs", "tmpfs", f"{sys.prefix}/bin"], node=SICK)
    with undone(site, "umount", f"{sys.prefix}/bin"):
        yield


def doctor(site: Site, *arguments: str) -> dict[str, Any]:
    """What it prints as JSON, with its exit code."""
    argv = ["toolkit", "doctor", "--json", *arguments]
    env = {"TOOLKIT_RUNS": str(site.runs), "TMPDIR": TEMP}
    done = site.box.run(argv, env=env, user=site.user, cwd=site.folder, check=False)
    assert done.stdout, done.stderr
    return {"code": done.returncode, **json.loads(done.stdout)}


def test_healthy_nodes_have_no_word_said_of_them(site: Site) -> None:
    report = doctor(site, "--nodes=4", "cluster.tasks_per_node=2")
    nodes = report["nodes"]
    assert {name: node["verdict"] for name, node in nodes.items()} == dict.fromkeys(site.box.spec.node_names, "ok")
    assert (report["code"], report["common"]) == (0, [])
    assert {"cpus", "clock", "shared folder", "network"} <= {f["check"] for f in nodes["node1"]["findings"]}
    assert not list(site.folder.glob(".preflight-*"))


@pytest.mark.parametrize(
    ("illness", "words"),
    [
        (clock_off, r"its clock is (89\.[5-9]|90(\.[0-5])?) s ahead"),  # as exactly as a busy machine lets it be told
        (temp_full, "/var/tmp has 0 B"),
        (folder_read_only, "Read-only file system"),
        (folder_stale, "is another folder here than on the batch host, or a stale one"),
        (without_python, "No such file or directory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_sick_node_is_named_with_the_reason_and_no_other(
    site: Site, illness: Callable[[Site], AbstractContextManager[None]], words: str
) -> None:
    with illness(site):
        report = doctor(site, "--nodes=4")
    verdicts = {name: node["verdict"] for name, node in report["nodes"].items()}
    assert verdicts == {name: "bad" if name == SICK else "ok" for name in site.box.spec.node_names}, report
    assert re.search(words, report["nodes"][SICK]["bad"])
    assert (report["code"], report["common"]) == (1, [])


def test_inside_a_job_its_nodes_are_checked_beside_its_running_ranks(site: Site) -> None:
    """The ranks, two on each of four nodes, hold all of the job meanwhile. Uneven requests are left to Slurm."""
    script = site.folder / "job.sh"
    script.write_text(
        "#!/bin/bash\nsrun --ntasks=8 --cpus-per-task=1 sleep 600.5 & sleep_pid=$!\n"
        "until [ $(squeue --steps --noheader --jobs=$SLURM_JOB_ID --format=%j | grep -c sleep) = 1 ]; do :; done\n"
        f"toolkit doctor --json >{site.folder}/report.json\nkill $sleep_pid\nexit 0\n"
    )
    job = site.sbatch("--nodes=4", "--ntasks-per-node=2", f"--chdir={site.folder}", str(script))
    site.box.wait_job(job, END_S)
    report = json.loads((site.folder / "report.json").read_text())
    assert report["fine"], report
    assert list(report["nodes"]) == site.box.spec.node_names
    cpus = [f["figure"] for node in report["nodes"].values() for f in node["findings"] if f["check"] == "cpus"]
    assert len(cpus) == 4
    assert all(float(figure) >= 2 for figure in cpus), cpus


def test_a_job_swaps_a_sick_node_for_a_spare_before_its_ranks_start(site: Site) -> None:
    with folder_read_only(site):
        run = submit(site, slow_project(site, 0.0), "train.max_steps=30", "cluster.nodes=3", "cluster.spare_nodes=1")
        completed(site, run)
    (only,) = run.attempts()
    assert only.nodes == ("node1", "node2", "node4")
    assert "Read-only file system" in run.status().bad_nodes[SICK]
    assert f"bad node: {SICK}" in site.run("toolkit", "why", run.id)


def test_a_job_without_spares_is_requeued_without_its_sick_node(site: Site) -> None:
    with folder_read_only(site):
        run = submit(site, slow_project(site, 0.0), "train.max_steps=30", "cluster.nodes=3")
        completed(site, run)
    first, last = run.attempts()
    assert (first.cause, first.decision, first.step_end) == ("node_failure", "requeue", None)
    assert f"{SICK}: " in first.line
    assert "Read-only file system" in first.line
    assert last.nodes == ("node1", "node2", "node4")
    assert site.box.job(site.job_of(run))["ExcNodeList"] == SICK


CONNECTED = ["train.max_steps=30", "cluster.nodes=3", "cluster.spare_nodes=1"]


def test_a_job_goes_on_without_a_node_that_cannot_connect_to_the_others(site: Site) -> None:
    """No check tells of it: the first connections between the ranks do. Once may be chance."""
    with cut_off(site, SICK, "node2", "node4"):
        run = submit(site, slow_project(site, 0.0), *CONNECTED)
        completed(site, run)
    *failed, last = run.attempts()
    assert [attempt.suspect for attempt in failed] == [SICK, SICK]
    assert f"rank 2 on {SICK}: RuntimeError" in failed[0].line
    assert last.nodes == ("node1", "node2", "node4")


def test_a_job_goes_on_without_a_connection_that_is_never_answered(site: Site) -> None:
    """Nobody has an error. The hang names ranks, and the nodes' open connections both ends of the link."""
    with cut_off(site, "node2", SICK):
        run = submit(site, slow_project(site, 0.0), *CONNECTED, "dist.timeout_s=80")
        completed(site, run)
    *failed, last = run.attempts()
    assert {attempt.suspect for attempt in failed} == {SICK}
    assert f"no connection from {SICK} to node2" in failed[0].line
    assert last.nodes == ("node1", "node2", "node4")
