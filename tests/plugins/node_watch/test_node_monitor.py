"""The monitor beside a real agent on this machine."""

import sys
from pathlib import Path

import pytest

from tests.unit.nodes.test_agents import Site
from tests.unit.nodes.test_steps import await_true, gone
from toolkit.nodes.agent.helpers import HelperLines
from toolkit.nodes.agent.messages import ScriptRankStatus
from toolkit.nodes.start import agent_starters
from toolkit.nodes.start.launcher import AllRanksEnded

SICK_AGENT = """
import sys
from toolkit.nodes.agent import node
from toolkit.plugins.node_watch import node_monitor
OTHERS = '''echo a driver says something; echo 3; echo '{{"usage": 5}}'; echo '{{"usage": {{"until": 1}}}}' '''
SICK = OTHERS + '''; echo '{{"sick": 3}}'; echo '{{"sick": "hot"}}'; echo '{{"sick": "full"}}' '''
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
    log = (site.run.logs / "agent-here.log").read_text()
    for line in ("a driver says something", "3", '{"usage": 5}', '{"usage": {"until": 1}}', '{"sick": 3}'):
        assert f"the node's monitor has printed: {line}\n" in log
    site.store.close()  # the last of the node's processes: what they have left is ended now
    watch = int(note.read_text())
    site.start("exit 3")
    site.next()
    assert not gone(watch)
    site.close()
    await_true(lambda: gone(watch))


@pytest.mark.parametrize(
    "line",
    [
        '{"rank": 0}',
        '{"attempt": 1, "rank": 0, "state": 5, "still_s": 1}',
        '{"attempt": 1, "rank": -1, "state": "silent", "still_s": 1}',
        "[" * 10**5,
    ],
)
def test_output_of_a_library_does_not_end_the_watch_for_silent_ranks(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = HelperLines("watch for silent ranks", ScriptRankStatus)
    assert lines.feed(f'{line}\n{{"attempt": 2, "rank": 1, "state": "silent",'.encode()) == []
    assert lines.feed(b' "still_s": 2.5}\nmore') == [ScriptRankStatus(2, 1, "silent", 2.5)]
    assert f"the node's watch for silent ranks has printed: {line[:100]}" in caplog.text
