"""A day from a laptop: `toolkit --on` over a real sshd on the box's login node, for a user with a home of their own."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.box.config import LOGIN
from tests.box.namespaces import enter_command
from tests.box.roots import USER
from tests.slurm.site import END_S, Site
from tests.sshd import LoginNode, laptop, make_environment
from tests.waiting import wait_for
from toolkit.base.errors import EXIT_FAILED, EXIT_REQUEST, EXIT_STOPPED

pytestmark = pytest.mark.slurm

#: Continues from what it wrote last, until it may end.
PLAIN = """
import pathlib, sys, time
last = pathlib.Path("last.txt")
step = int(last.read_text()) if last.exists() else 0
with open("starts.txt", "a") as starts:
    starts.write(f"{step}\\n")
while not pathlib.Path("go").exists():
    step += 1
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    pathlib.Path("new.txt").write_text(str(step))
    pathlib.Path("new.txt").rename(last)
    time.sleep(0.05)
sys.exit(int(pathlib.Path("go").read_text()))
"""


@pytest.fixture
def node(site: Site, tmp_path: Path) -> Iterator[LoginNode]:
    """The box's login node as the user's laptop reaches it. The home, and the environment in it, are on all nodes."""
    home, etc = site.folder / "home of another", site.folder / "etc"
    home.mkdir()
    etc.mkdir()
    make_environment(home / "my env")
    subprocess.run(["chown", "-R", "2000:2000", str(home)], check=True)
    for name in (LOGIN, *site.box.spec.node_names):
        site.box.run(["sed", "-i", f"s|:/home/{USER}:|:{home}:|", "/etc/passwd"], node=name)
    site.box.run(["mkdir", "-p", "/run/sshd"])
    sshd = enter_command(site.box._machine(LOGIN).pid, ["/usr/sbin/sshd"], env={}, cwd="/")
    try:
        with laptop(tmp_path, etc, USER, home, sshd) as node:
            node("site", "init", "--on", "login", "--env", "~/my env")
            yield node
    finally:
        site.box.run(["scancel", f"--user={USER}"])
        for name in (LOGIN, *site.box.spec.node_names):
            site.box.run(["sed", "-i", f"s|:{home}:|:/home/{USER}:|", "/etc/passwd"], node=name)


def test_an_unchanged_script_is_run_on_a_cluster_from_a_laptop(node: LoginNode, site: Site) -> None:
    (node.project / "train.py").write_text(PLAIN)
    size = ["cluster.nodes=1", "cluster.tasks_per_node=1"]
    following = node.popen("--on", "login", "exec", *size, "--name", "day", "--follow", "--", "python", "train.py")
    with following:
        wait_for(lambda: any(node.home.glob("toolkit/*/last.txt")), END_S, "the script's first checkpoint")
        line = next(line for line in following.stdout if line.startswith("step "))
        assert int((node.there / "last.txt").read_text()) < int(line.split()[1]) + 200, "shown as it is printed"
        (seen,) = json.loads(node("--on", "login", "status", "--json"))
        assert seen["state"] == "running"
        (job,) = site.box.run(["squeue", "--noheader", f"--user={USER}", "--format=%i"]).stdout.split()
        site.preempt()
        wait_for(lambda: len(starts(node)) == 2, END_S, "the script's second start")
        assert site.box.job(job)["Restarts"] == "1"
        node("--on", "login", "stop", "day")
        _, err = following.communicate()
    assert following.returncode == EXIT_STOPPED, err
    assert "stop" in node("--on", "login", "why", "day")
    node("--on", "login", "resume", "day")
    wait_for(lambda: len(starts(node)) == 3, END_S, "the script's third start")
    assert sorted(starts(node)) == starts(node)
    assert len(set(starts(node))) == 3, "each start has continued from what the one before it wrote"
    (node.there / "go").write_text("7")
    assert "exit code 7" in node("--on", "login", "follow", "day", code=EXIT_FAILED)
    assert "`toolkit --on login" in node("--on", "login", "why", "day")
    node("--on", "login", "stop", "nothing", code=EXIT_REQUEST)


def starts(node: LoginNode) -> list[int]:
    return [int(line) for line in (node.there / "starts.txt").read_text().split()]
