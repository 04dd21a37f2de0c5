"""The supervisor's counts during an attempt. Each event of a large run costs the same."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.base import fsio
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt import error_files
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.supervise.conclude import add_error_files

NODES, RANKS_A_NODE = 250, 8
HOSTS = tuple(f"node{number}" for number in range(NODES))


class CountingList(list[str]):
    """A list that counts the items read from it."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.reads += len(self)
        return super().__iter__()


@pytest.fixture
def attempt() -> Attempt:
    return Attempt(1, time.time(), Allocation(HOSTS, (RANKS_A_NODE,) * NODES, 1))


def test_all_reachable_ranks_have_ended_once_only_lost_nodes_have_any_left(attempt: Attempt) -> None:
    ranks = range(NODES * RANKS_A_NODE)
    attempt.note_exited(ranks)
    assert not attempt.all_reachable_have_ended  # no node is lost: srun says when all have ended
    attempt = Attempt(1, 0.0, attempt.plan, lost_nodes={"node1"})
    attempt.note_exited(ranks[: 2 * RANKS_A_NODE])
    attempt.note_exited(ranks[2 * RANKS_A_NODE : -1])
    attempt.note_exited(ranks[:3])  # srun says some things twice
    assert not attempt.all_reachable_have_ended
    attempt.note_exited(ranks[-1:])
    assert attempt.all_reachable_have_ended


def test_the_end_of_a_rank_costs_the_same_in_a_large_run(attempt: Attempt) -> None:
    """Before, each end went through all ranks: 97 s of CPU at 10,000 nodes."""
    hosts = CountingList(attempt.rank_hosts)
    attempt.__dict__["rank_hosts"] = hosts
    attempt.lose(["node1"])
    for rank in range(len(hosts)):
        attempt.note_exited([rank])
        assert attempt.all_reachable_have_ended == (rank == len(hosts) - 1)
    assert hosts.reads <= 3 * len(hosts)


def test_each_error_file_is_looked_at_once_also_among_thousands(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the list of failures was built again for each file: 14 s for 16,000."""
    reads = 0

    class Failure(RankFailure):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += name in ("rank", "by_signal", "host")
            return super().__getattribute__(name)

    monkeypatch.setattr(error_files, "read_error_file", lambda path: Failure(int(path.stem[6:]), "node0", "E", 1.0))
    ranks = 500
    folder = fsio.make_dir(RunDir(tmp_path).attempt_logs(1))
    for rank in range(ranks):
        (folder / f"error-{rank}.json").touch()
    told = [
        RankFailure(1, "node0", "killed by SIGKILL", 0.5, by_signal=True),
        RankFailure(2, "node0", "exit code 1", 0),
    ]
    attempt.fail(*told)
    add_error_files(SimpleNamespace(run=RunDir(tmp_path), is_script=False), attempt)  # type: ignore[arg-type]
    assert len(attempt.failures) == ranks + 1
    assert attempt.failures[0] is told[0]  # srun reports the signal and the rank its error: both count
    assert reads <= 10 * ranks
