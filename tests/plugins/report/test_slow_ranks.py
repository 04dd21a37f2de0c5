"""`toolkit why` of a run with a slow rank."""

from __future__ import annotations

from tests.command import Command
from tests.unit.cli.test_slow import NOW, RECOVERED, SLOW, run, stands, told  # noqa: F401
from toolkit.files.rundir import RunDir


def test_why_names_who_was_slow_and_what_to_do(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    assert told(command, "why", run.id) == [
        "slow: node01 (rank 2) was 3.0 times slower than the others for 90 s",
        "slow: node03 (ranks 12-15) is 1.6 times slower than the others for 12 min",
        "  all ranks wait for the slowest: see what else runs there, and how hot it is; "
        "to leave it out: cluster.exclude=node[01,03]",
    ]


def test_after_the_end_nobody_is_slow_any_more(run: RunDir, command: Command) -> None:
    stands(run, SLOW, state="failed", ended=NOW - 120.0)
    assert told(command, "status") == []
    assert told(command, "why", run.id)[0] == (
        "slow: node03 (ranks 12-15) was 1.6 times slower than the others for 10 min"
    )


def test_the_only_node_of_a_run_cannot_be_left_out(run: RunDir, command: Command) -> None:
    stands(run, SLOW, nodes=["node03"])
    assert not [line for line in told(command, "why", run.id) if "exclude" in line]
