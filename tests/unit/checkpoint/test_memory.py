"""What ranks keep in memory, as threads around torch's own HashStore; the files are memfds of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import on_ranks
from toolkit.checkpoint import memory
from toolkit.checkpoint.memory import Memory
from toolkit.checkpoint.reader import Loaded
from toolkit.dist.state import PerRank, Replicated, Sharded, State
from toolkit.errors import ConfigError

RANKS = 2


@dataclass
class Node:
    """Holds two files for each rank, as its agent does."""

    files: list[int] = field(default_factory=lambda: [os.memfd_create("state") for _ in range(2 * RANKS)])

    def memory(self, rank: int, attempt: int = 1, world_size: int = RANKS) -> Memory:
        """What a rank makes of it that has just started."""
        numbers = [*self.files[2 * rank : 2 * rank + 2], *(self.files[:2] if rank else ())]
        return Memory(rank, world_size, attempt, RANKS, [f"/proc/self/fd/{number}" for number in numbers])

    def write(self, rank: int, step: int, attempt: int = 1) -> None:
        written = self.memory(rank, attempt)
        written.write(step, state(rank, float(step)), {"reached": step})
        written.wait()

    def load(self, newer_than: int | None = None, world_size: int = RANKS) -> list[Any]:
        """What two new ranks load: the step and, of each, the values that were filled."""

        def body(rank: int, kv: HashStore) -> tuple[Loaded | None, State]:
            places = state(rank, 0.0)
            return self.memory(rank, 2, world_size).load(places, kv, newer_than), places

        return on_ranks(RANKS, body)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    for number in node.files:
        os.close(number)


def state(rank: int, number: float) -> dict[str, Any]:
    """A rank's: a replicated matrix, its half of a vector, its own scalar of another type, and numbers."""
    return {
        "weights": Replicated(torch.full((3, 4), number)),
        "turned": Replicated(torch.full((5, 2), number).t()),
        "half": Sharded(torch.full((3,), number + rank), (6,), (3 * rank,)),
        f"own/rank{rank}": PerRank(torch.tensor(int(number) + rank, dtype=torch.int16)),
        f"seen/rank{rank}": PerRank({"samples": [int(number), rank]}),
        "rate": Replicated(number / 2),
    }


def test_each_rank_finds_again_what_it_had(node: Node) -> None:
    for rank in range(RANKS):
        node.write(rank, 7)
    for rank, (loaded, places) in enumerate(node.load()):
        assert (loaded.step, loaded.meta) == (7, {"reached": 7})
        assert loaded.values == {f"seen/rank{rank}": {"samples": [7, rank]}, "rate": 3.5}
        expected = state(rank, 7.0)
        for name, entry in places.items():
            if isinstance(entry.value, torch.Tensor):
                assert torch.equal(entry.value, expected[name].value), name


def test_the_newest_step_that_all_have_counts(node: Node) -> None:
    for rank, steps in enumerate(([5, 6, 7], [5, 6])):
        for step in steps:
            node.write(rank, step)
    assert [loaded.step for loaded, _ in node.load()] == [6, 6]


def test_a_rank_that_dies_while_it_writes_has_the_step_before(node: Node) -> None:
    for rank in range(RANKS):
        for step in (5, 6):
            node.write(rank, step)
    dying = node.memory(1)
    min(dying._own, key=lambda file: file.moment() or (0, 0)).open(4096)
    assert [loaded.step for loaded, _ in node.load()] == [6, 6]


def test_a_step_of_an_attempt_and_the_same_of_another_are_two(node: Node) -> None:
    node.write(0, 6, attempt=1)
    node.write(1, 6, attempt=2)
    assert [loaded for loaded, _ in node.load()] == [None, None]


def test_what_is_no_newer_than_the_disks_is_left_alone(node: Node) -> None:
    for rank in range(RANKS):
        node.write(rank, 6)
    assert [loaded for loaded, _ in node.load(newer_than=6)] == [None, None]
    assert [loaded.step for loaded, _ in node.load(newer_than=5)] == [6, 6]


def test_a_damaged_copy_of_one_rank_is_used_by_none(node: Node) -> None:
    for rank in range(RANKS):
        node.write(rank, 6)
    (written,) = (number for number in node.files[2:] if os.fstat(number).st_size)
    os.pwrite(written, b"\xff", 64)
    assert [loaded for loaded, _ in node.load()] == [None, None]


def test_another_number_of_ranks_finds_nothing(node: Node) -> None:
    for rank in range(RANKS):
        written = node.memory(rank, world_size=3)
        written.write(6, state(rank, 6.0), {})
        written.wait()
    assert [loaded for loaded, _ in node.load()] == [None, None]


def test_empty_files_hold_nothing(node: Node) -> None:
    assert [loaded for loaded, _ in node.load()] == [None, None]


def test_what_changes_after_the_copy_is_not_in_it(node: Node) -> None:
    """The digests are made while the training goes on."""
    for rank in range(RANKS):
        written, live = node.memory(rank), state(rank, 7.0)
        written.write(7, live, {})
        live["weights"].value.zero_()
        written.wait()
    for loaded, places in node.load():
        assert loaded.step == 7
        assert torch.equal(places["weights"].value, torch.full((3, 4), 7.0))


def test_copies_that_do_not_fit_are_refused_with_the_sum(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"two copies of the state of 2 ranks take .* GB .*cluster\.mem_gb"):
        node.memory(0).write(1, state(0, 1.0), {})


def test_a_rank_that_no_agent_has_started_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert Memory.of_this_rank(0, 1, 1, {}) is None
    assert "memory_every_steps is not used" in caplog.text


def test_a_control_groups_limit_counts(tmp_path: Any) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "groups/job/step").mkdir(parents=True)
    for group, limit in (("job", "3000000"), ("job/step", "max")):
        (tmp_path / "groups" / group / "memory.max").write_text(limit + "\n")
        (tmp_path / "groups" / group / "memory.current").write_text("1000000\n")
    assert memory._free_bytes(tmp_path / "proc", tmp_path / "groups") == 2_000_000
