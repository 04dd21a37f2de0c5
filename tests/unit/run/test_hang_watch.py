"""What the watch for hangs asks of the part that watches a silent script."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.config import JobConfig
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import RunningRanks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.supervise.attempt_loop import HangWatch
from toolkit.run.supervise.supervisor_components import Context

FOUND = RankFailure(1, "node1", "silent", 0.0)


class Investigator:
    """Knows of no silence before the script is stuck."""

    silent_s: tuple[float, ...] = ()

    def is_stuck(self) -> bool:
        return bool(self.silent_s)

    def silence_s(self) -> float:
        return min(self.silent_s)

    def find_cause(self, reports: object) -> RankFailure:
        return FOUND


def test_a_script_that_worked_at_first_is_ended_once_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    investigator = Investigator()
    monkeypatch.setattr("toolkit.plugins.node_watch.investigation.Investigation", lambda *_: investigator)
    context = cast(Context, SimpleNamespace(is_script=True, agents=None, config=JobConfig()))
    attempt = Attempt(1, 0.0, Allocation(("node1",), (2,), 1))
    ranks: Any = None
    watch = HangWatch(context, attempt, cast(RunningRanks, ranks))
    watch.look()
    assert attempt.hang is None
    investigator.silent_s = (40.0, 30.0)
    watch.look()
    assert attempt.hang is FOUND
    assert attempt.kill_at is not None
