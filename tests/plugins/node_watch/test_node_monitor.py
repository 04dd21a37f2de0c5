"""The monitor beside a real agent on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.unit.nodes.test_agents import Site
from tests.unit.nodes.test_steps import await_true, gone
from toolkit.nodes.start import agent_starters
from toolkit.nodes.start.launcher import AllRanksEnded

SICK_AGENT = """
import sys
from toolkit.nodes.agent import node
from toolkit.plugins.node_watch import node_monitor
SICK = '''echo a driver says something; echo 3; echo '{{"sick": "hot"}}'; echo '{{"sick": "full"}}' '''
node_monitor.MONITOR_COMMAND = ("sh", "-c", "echo $$ > {note}; " + SICK + "; exec sleep 600")
node_monitor.MONITOR_AFTER_S = 0.0
node.main(sys.argv[1:])
"""


def test_a_nodes_sickness_reaches_the_supervisor_and_its_watch_ends_with_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pid"
    command = [sys.executable, "-P", "-c", SICK_AGENT.format(note=note)]
    usual = agent_starters._command
    monkeypatch.setattr(agent_starters, "_command", lambda *arguments: [*command, *usual(*arguments)[4:]])
    site = Site(tmp_path)
    site.start("exit 0")
    await_true(lambda: site.agents.sick_hosts == {"here": "hot, full"})
    assert site.next() == AllRanksEnded(0)
    site.store.close()  # the last of the node's processes: what they have left is ended now
    watch = int(note.read_text())
    site.start("exit 3")
    site.next()
    assert not gone(watch)
    site.close()
    await_true(lambda: gone(watch))
