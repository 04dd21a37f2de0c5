"""Copies by the agent of a node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.nodes.test_agents import Site, check, opened
from tests.unit.nodes.test_steps import await_true
from toolkit.base import staged
from toolkit.config import JobConfig
from toolkit.nodes.start import agent_starters
from toolkit.nodes.start.launcher import (
    AllRanksEnded,
)
from toolkit.plugins.staging import package
from toolkit.plugins.staging.copying import CopyRequest
from toolkit.plugins.staging.package import Package, PackageSource, PackRequest
from toolkit.plugins.staging.supervisor_side import NodeStaging


class Copying(NodeStaging):
    """Keeps the agents' messages about their copies. The test decides what is copied."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.run, JobConfig(), site.allocation, site.launcher, lambda text: None)
        site.agents.listeners = (self,)
        self.staged: list[Any] = []

    def take_message(self, host: str, message: Any) -> None:
        if message["is"] == "staged":
            self.staged.append(message)


#: Stands for the agent's program, on a node where no process can be forked for a helper.
FORKLESS_AGENT = """
import errno, pathlib, sys
from toolkit.nodes.agent import helpers, node
from toolkit.devices import on_node as gpus
def fail(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
helpers.start_child = fail
gpus.DRIVER = pathlib.Path("/")
node.MONITOR_AFTER_S = 0.0
node.main(sys.argv[1:])
"""


def test_an_agent_whose_helpers_cannot_be_started_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = agent_starters._command
    command = [sys.executable, "-P", "-c", FORKLESS_AGENT]  # replaces the first 4 words of the usual command
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    site = Site(tmp_path)
    copying = Copying(site)
    opened(site)
    copying.order(CopyRequest((Package("/set", "key", "/set.tar", 0, 0, True, 0, 0),)), wait_s=60.0)
    stacks_order = {"do": "stacks", "attempt": 1, "command": ["stack-reader"], "standings": []}
    site.agents.request({"here": stacks_order}, site.events)
    log = site.run.path / "logs"
    await_true(lambda: any("monitor has ended" in file.read_text() for file in log.rglob("agent-*.log")))
    await_true(lambda: copying.staged)
    assert "Resource temporarily unavailable" in copying.staged[0]["problems"][0]
    check(site, ["true"])
    assert "cannot be started" in site.next().message["text"]
    (said,) = (file.read_text() for file in log.rglob("agent-*.log"))
    for text in ("on_node import main; main() cannot be started", "stack-reader cannot be started"):
        assert text in said
    site.close()


#: An agent that looks at its copies before each attempt.
CHECKING_AGENT = """import sys
from toolkit.nodes.agent import node
from toolkit.plugins.staging import node_side as copies
copies.SEEN_FOR_S = 0.0
node.main(sys.argv[1:])
"""


def test_an_attempt_does_not_use_a_copy_that_has_lost_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = agent_starters._command
    command = [sys.executable, "-P", "-c", CHECKING_AGENT]
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    sources = [tmp_path / "set", tmp_path / "file"]
    sources[0].mkdir()
    for path in (sources[0] / "part", sources[1]):
        path.write_text("content")
    packages = [package.pack(PackageSource(str(each)), PackRequest(str(tmp_path / "cache"), ())) for each in sources]
    (tmp_path / "node").mkdir()
    site = Site(tmp_path)
    copying = Copying(site)
    opened(site)
    copying.order(CopyRequest(tuple(packages), str(tmp_path / "node")), wait_s=60.0)
    await_true(lambda: copying.staged)
    copies = copying.staged[0]["copies"]
    assert [*copies] == [str(each) for each in sources]

    def attempt() -> Any:
        site.start(f"echo ${staged.VARIABLE}")
        assert site.next() == AllRanksEnded(0)
        site.store.close()
        return json.loads(site.log(0))

    assert attempt() == copies
    (Path(copies[str(sources[0])]) / "part").unlink()  # as a cleaner of the node's disk does
    assert attempt() == {str(sources[1]): copies[str(sources[1])]}
    assert "set: files of its copy were removed from this node's disk" in copying.staged[1]["problems"][0]
    site.close()
