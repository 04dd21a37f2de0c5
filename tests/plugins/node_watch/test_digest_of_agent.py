"""What an agent says of the stacks of its ranks."""

from pathlib import Path

from tests.unit.nodes.test_agents import Site, reporting, until
from toolkit import hang
from toolkit.nodes.agent.messages import RanksReporting
from toolkit.nodes.agent.reports import RankProgress
from toolkit.plugins.node_watch import investigation


def test_a_node_says_in_a_digest_what_its_ranks_do_by_their_stacks(tmp_path: Path) -> None:
    """Rank 0 has reported and waits. Rank 1 works on something, and rank 2 has not started."""
    site = Site(tmp_path, ranks=3)
    site.start(reporting(tmp_path, 'rank == 0 and report("in a step", 7)\ntime.sleep(600)'))
    until(site, RanksReporting)
    folder = site.run.attempt_logs(1)
    frame = 'Thread 0x1 (most recent call first):\n  File "{}", line 1 in {}\n'
    for rank, (file, name) in enumerate(
        [("/x/site-packages/torch/distributed/c10d.py", "barrier"), ("/x/mine.py", "load")]
    ):
        hang.stack_path(folder, rank).write_text(frame.format(file, name) + hang.ANSWERED)
    unknown = {"here": [RankProgress(rank, None, None, 40.0, False) for rank in range(3)]}
    groups = investigation.collect_stacks(site.agents, site.run, 1, unknown, {})
    assert [(each.ranks, each.doing, each.has_answered) for each in groups] == [
        ((0,), "in barrier", True),
        ((1,), "has not joined the others (mine.py:1)", True),
        ((2,), "has not started", False),
    ]
    assert groups[0].place[1] == 8
    site.close()
