"""`toolkit shell` on a real Slurm: the nodes, the environment and the sources of a run, and nothing left over."""

import re
import shlex
from collections import Counter

import pytest

from tests.slurm.site import Site

pytestmark = [pytest.mark.slurm, pytest.mark.sample(1)]

SETUP = 'cluster.setup=["export FROM_SETUP=\'a b\'", "umask 027"]'
#: What a debugger asks first.
LOOK = (
    "hostname; pwd; echo setup=$FROM_SETUP; python -c 'import jobs.mine as m; print(m.__file__)'; srun hostname | sort"
)


def test_a_shell_has_the_nodes_the_environment_and_the_sources_of_a_run(site: Site) -> None:
    project = site.project(mine="def main(config): print(config)\n")
    (project / "mine.yaml").write_text("name: mine\njob: jobs.mine\n")
    site.give(project)
    size = ["cluster.nodes=2", "cluster.tasks_per_node=2", "cluster.time_min=5", SETUP]
    site.run("toolkit", "submit", "mine.yaml", *size, cwd=project)
    run = site.only_run()
    site.run("toolkit", "cancel", run.id)
    (project / "jobs/mine.py").write_text("raise SystemExit('the project has changed since')\n")
    before = sorted((run.path / ".code").rglob("*"))

    said = site.run("toolkit", "shell", run.id, "--", "bash", "-c", LOOK, cwd=site.folder)
    lines = said.splitlines()
    (first, most), (_, least) = Counter(line for line in lines if re.fullmatch(r"node\d", line)).most_common()
    assert (first, most, least) == (lines[0], 3, 2), "the shell is on the first node, and two tasks are on each"
    assert str(project) in lines
    assert "setup=a b" in lines
    assert str(run.code / "jobs/mine.py") in lines

    # At a terminal, with another size: what is typed is carried out on the node.
    typed = "echo on $(hostname) in $PWD; srun hostname | sort | uniq -c; echo prompt: $PS1; exit\n"
    shell = shlex.join(["toolkit", "shell", run.id, "cluster.nodes=1"])
    command = f"printf %s {shlex.quote(typed)} | script -qec {shlex.quote(shell)} /dev/null"
    seen = site.run("bash", "-c", command, cwd=site.folder).replace("\r", "")
    assert re.search(rf"(?m)^on node\d in {re.escape(str(project))}$", seen), seen
    assert re.search(r"(?m)^ +2 node\d$", seen), seen
    assert f"\nprompt: (mine {run.id[-8:]}) " in seen

    assert site.run("squeue", "-h").strip() == "", "the allocation ends with the shell"
    assert sorted((run.path / ".code").rglob("*")) == before, "the sources are not touched"


def test_the_shell_of_a_config_begins_here_and_its_request_is_that_of_a_job(site: Site) -> None:
    (site.folder / "jobs").mkdir()
    for name in ("__init__", "x"):
        (site.folder / f"jobs/{name}.py").write_text("def main(config): print(config)\n")
    (site.folder / "small.yaml").write_text("name: small\njob: jobs.x\ncluster: {nodes: 1, time_min: 7}\n")
    show = "scontrol show job $SLURM_JOB_ID -o; pwd"
    said = site.run("toolkit", "shell", "small.yaml", "--", "bash", "-c", show, cwd=site.folder)
    assert "JobName=small" in said
    assert "TimeLimit=00:07:00" in said
    assert str(site.folder) in said.splitlines()
