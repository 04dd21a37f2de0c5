"""What the processes of a script get when it ends: the tables of docs/launchers.md, cell by cell."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.slurm.conftest import BoxFactory, visit
from tests.slurm.site import END_S, START_S, Site, attempts_of
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

#: Saves when it is told to end, in the time that the test gives it. When it is started again it has nothing to do.
SAVES = """
import os, signal, sys, time

def save(number, frame):
    with open("told", "a") as told:
        told.write(f"{number}\\n")
    while not os.path.exists("go"):
        time.sleep(0.01)
    open("saved", "w").close()
    sys.exit(0)

if os.path.exists("saved"):
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open("up-" + os.environ["SLURMD_NODENAME"], "w").close()
while True:
    time.sleep(0.01)
"""
#: As `conda run` does it, which is not among the requirements: Python starts a script of bash that starts the command.
CONDA = "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', ' '.join(sys.argv[1:]) + '; exit $?']))"
LEADERS = {
    "python": ["python", "save.py"],
    "bash": ["bash", "train.sh"],
    "exec": ["bash", "-c", "exec python save.py"],
    "pipe": ["bash", "-c", "python save.py | tee log; touch next"],
    "conda run": [sys.executable, "-c", CONDA, "python", "save.py"],
    "uv run": ["uv", "run", "--no-project", "--", "python", "save.py"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node=1", "--no-python", "python", "save.py"],
}


def batch_script(site: Site, words: str, *options: str) -> str:
    script = site.folder / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {site.folder}\n{words}\n")
    return site.sbatch(*options, str(script))


def salloc(site: Site, command: str, *options: str) -> None:
    allocated = shlex.join(["salloc", *options, "srun", "--interactive", "--preserve-env", "bash", "-c", command])
    site.run("bash", "-c", f"{allocated} < /dev/null > salloc.log 2>&1 &", cwd=site.folder)


STARTS: dict[str, Callable[..., object]] = {
    "batch script": lambda site, command, *options: batch_script(site, f"exec {command}", *options),
    "no exec": batch_script,
    "wrap": lambda site, command, *options: site.sbatch(f"--chdir={site.folder}", *options, f"--wrap={command}"),
    "one task": lambda site, command, *options: batch_script(site, f"srun --ntasks=1 {command}", *options),
    "salloc": salloc,
}


def stop(site: Site) -> None:
    site.run("toolkit", "stop", site.only_run().id)


ENDS: dict[str, tuple[Callable[[Site], object], str, Sequence[str]]] = {
    "stop": (stop, "stopped", ()),
    "grace": (Site.preempt, "preempted", ()),
    "no grace": (Site.preempt, "preempted", ["--partition=cancel"]),
    "limit": (lambda site: None, "timeout", ["--time=1"]),
}
CELLS = [(start, leader, end) for start in STARTS for leader in LEADERS for end in ENDS]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("start", "leader", "end"), CELLS)
def test_a_script_saves_in_the_time_that_there_is(site: Site, start: str, leader: str, end: str) -> None:
    act, cause, options = ENDS[end]
    (site.folder / "save.py").write_text(SAVES)
    (site.folder / "train.sh").write_text("python save.py\ntouch next\n")
    site.give(site.folder)
    command = shlex.join(["toolkit", "exec", "--name=cell", "cluster.save_before_limit_s=20", "--", *LEADERS[leader]])
    STARTS[start](site, command, "--nodes=1", "--ntasks=1", "--nodelist=node2", *options)
    wait_for(lambda: list(site.folder.glob("up-*")), START_S, "the script")
    act(site)
    told = site.folder / "told"
    wait_for(lambda: told.exists() and told.read_text(), END_S, "the signal")
    assert site.only_run().attempts() == []
    (site.folder / "go").touch()
    wait_for((site.folder / "saved").exists, START_S, "what it saves")
    assert attempts_of(site.only_run(), 1)[0].cause == cause
    assert not (site.folder / "next").exists()
    is_told_twice = not site.box.spec.strict and end in ("grace", "no grace")  # by Slurm, which signals all, and by uv
    assert told.read_text() == "15\n" or is_told_twice


@pytest.fixture
def strict_site(make_box: BoxFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    yield from visit(make_box(profile="strict"), request)


@pytest.mark.sample(1)
@pytest.mark.parametrize("start", ["batch script", "no exec", "wrap"])
def test_a_script_saves_also_where_the_supervisor_dies_with_its_shell(strict_site: Site, start: str) -> None:
    """Slurm's SIGTERM ends the shell, and with proctrack/cgroup Slurm then kills what is left of the batch step."""
    site = strict_site
    (site.folder / "save.py").write_text(SAVES)
    site.give(site.folder)
    options = ("--nodes=1", "--ntasks=1", "--nodelist=node2", "--partition=cancel")
    STARTS[start](site, "toolkit exec --name=cell -- python save.py", *options)
    wait_for(lambda: list(site.folder.glob("up-*")), START_S, "the script")
    is_left = start == "batch script"
    site.preempt()
    wait_for((site.folder / "told").exists, END_S, "the signal")

    def supervisors() -> list[str]:
        return [words for _, words in site.box.processes("node2") if "toolkit exec" in words]

    wait_for(lambda: is_left or not supervisors(), START_S, "the end of the supervisor")
    (site.folder / "go").touch()
    wait_for((site.folder / "saved").exists, START_S, "what it saves")
    assert bool(supervisors()) is is_left


@pytest.mark.sample(1)
@pytest.mark.parametrize("leader", LEADERS)
def test_when_slurm_gives_a_node_up_the_ranks_on_the_others_save(site: Site, leader: str) -> None:
    (site.folder / "save.py").write_text(SAVES)
    (site.folder / "train.sh").write_text("python save.py\n")
    site.give(site.folder)
    command = shlex.join(["toolkit", "exec", "--name=cell", "--", *LEADERS[leader]])
    batch_script(site, f"exec {command}", "--nodes=2", "--ntasks=2")
    wait_for(lambda: len(list(site.folder.glob("up-*"))) == 2, START_S, "the script")
    node = max(path.name for path in site.folder.glob("up-*")).removeprefix("up-")
    (site.folder / "go").touch()
    site.box.kill_node(node)
    try:
        wait_for((site.folder / "saved").exists, END_S, "what it saves")
    finally:
        site.box.start_node(node)
        site.box.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)


@pytest.mark.parametrize("launcher", ["srun", "mpirun --allow-run-as-root --oversubscribe -n 2"])
def test_a_supervisor_for_each_task_is_refused_before_there_is_a_run(site: Site, launcher: str) -> None:
    job = batch_script(site, f"{launcher} toolkit exec -- true", "--nodes=1", "--ntasks=2")
    site.box.wait_job(job, END_S)
    (output,) = site.folder.glob("slurm-*.out")
    text = output.read_text()
    assert text.count("toolkit: error:") == 1
    assert f"leave {launcher.split()[0]} out, the toolkit starts the ranks itself" in text
    assert not site.runs.exists()


def test_a_shell_that_has_outlived_its_job_starts_nothing_and_blames_no_node(site: Site) -> None:
    job = batch_script(site, f"env -0 > {site.folder}/variables", "--nodes=1", "--ntasks=1")
    site.box.wait_job(job, END_S)
    text = (site.folder / "variables").read_text()
    variables: dict[str, Any] = dict(line.split("=", 1) for line in text.split("\0") if line.startswith("SLURM"))
    out = site.run("toolkit", "exec", "--", "true", check=False, **variables)
    assert f"job {variables['SLURM_JOB_ID']}, in which this shell was started, is over here (COMPLETED)" in out
    assert not site.runs.exists()


def test_limits_and_umask_of_the_setup_hold_for_the_ranks(site: Site) -> None:
    """The box gives each step the limits of its node's slurmd, as many sites do."""
    told = site.folder / "told"
    told.mkdir()
    site.give(told)
    setup = 'cluster.setup=["ulimit -Sn 2000 && ulimit -S -c 0", "umask 002"]'
    command = f"ulimit -n >{told}/$RANK; ulimit -c >>{told}/$RANK; umask >>{told}/$RANK"
    site.run("toolkit", "exec", "cluster.nodes=2", setup, "--wait", "--", "sh", "-c", command)
    assert [path.read_text().split() for path in told.iterdir()] == [["2000", "0", "0002"]] * 2
