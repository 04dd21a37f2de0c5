"""Nodes that run from their copies of the environment, also after a killed copy process."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.dist.test_staging import small_environment
from tests.slurm.site import END_S, START_S, Site
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

SCRIPT = """
import json, marker, os, sys, torch, toolkit
place = {"marker": marker.__file__, "prefix": sys.prefix, "data": str(toolkit.staged("DATA"))}
print(json.dumps({**place, "is_there": os.path.exists(marker.__file__), "node": os.environ["SLURMD_NODENAME"]}))
"""
KEYS = ("cluster.nodes=2", "cluster.spare_nodes=1", "cluster.stage=always", "cluster.time_min=5", "cluster.mem_gb=1")


def copying_on(site: Site, node: str) -> int | None:
    """The process on the node that unpacks at this moment."""
    unpacked = site.box.run(["sh", "-c", "ls /tmp/toolkit-stage-*/*/copy/lib"], node=node, check=False).stdout
    pids = [pid for pid, command in site.box.processes(node) if "toolkit.plugins.staging.copying" in command]
    return pids[0] if unpacked and pids else None


def test_ranks_import_from_their_node_although_the_copying_was_killed(site: Site) -> None:
    python = small_environment(site.folder / "venv")
    package = next((site.folder / "venv").glob("lib/*/site-packages")) / "many"
    package.mkdir()
    for number in range(8000):
        (package / f"module{number}.py").write_text("")
    data = site.folder / "data.bin"
    data.write_bytes(os.urandom(1 << 20))
    (site.folder / "script.py").write_text(SCRIPT.replace("DATA", str(data)))
    keys = [*KEYS, f"data.stage=[{data}]", "name=staged"]
    command = [str(python), "-m", "toolkit", "exec", *keys, "--", str(python), "script.py"]
    site.run(*command, cwd=site.folder)
    pid = wait_for(lambda: copying_on(site, "node2"), START_S, "a process that unpacks")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: site.find("staged").result(), END_S, "the end of the run")
    run = site.find("staged")
    assert site.result("staged").state == "completed"
    for rank, node in enumerate(("node1", "node2")):
        told = json.loads(run.rank_log(1, rank).read_text().splitlines()[0])
        assert told["node"] == node
        assert Path(told["prefix"]).is_relative_to("/tmp")
        assert Path(told["marker"]).is_relative_to(told["prefix"])
        assert Path(told["data"]).is_relative_to("/tmp")
        assert told["is_there"]
        # /tmp is the node's own: the test's machine has no such file
        assert not Path(told["data"]).exists()
        wait_for(lambda node=node: not [p for p in site.box.processes(node) if "infinity" in p[1]], 20, "free copies")  # type: ignore[misc]
    assert "has ended without an answer: trying again" in (run.logs / "agent-node2.log").read_text()
    # the spare has copies as well
    kept = site.box.run(["sh", "-c", "ls /tmp/toolkit-stage-*/*/whole.json"], node="node3").stdout
    assert len(kept.split()) == 2
    assert "nodes with a copy: 2 of 2" in site.run("toolkit", "why", "staged")
