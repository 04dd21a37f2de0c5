"""Checkpoints in ranks' memory. The ranks are threads around torch's HashStore, the files memfds of this process."""

import json
import mmap
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import on_ranks
from tests.unit.checkpoint.test_page_locked import Cuda, cuda  # noqa: F401
from toolkit.base import this_node
from toolkit.checkpoint.manifest import CorruptCheckpointError
from toolkit.checkpoint.reader import Loaded
from toolkit.nodes.agent.state_memory import NodeFiles, paths_of
from toolkit.plugins.memory.copies import CopyClock, PeerMemory, steps_between_copies
from toolkit.plugins.memory.files import MemoryFile, MemorySlot, PartWriter, Role
from toolkit.plugins.memory.load import MemoryReport, Receiver, RestorePlan, Sender, Transfer, plan_restore
from toolkit.ranks.state import PerRank, Replicated, Sharded, State
from toolkit.train.saver import MAX_OVERHEAD

#: How many ranks each node has.
ONE_NODE, TWO_NODES, FOUR_RANKS = (2,), (1, 1), (2, 2)


class Nodes:
    """Nodes with an agent each, which holds the files, and attempts of ranks on them."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.world_size = sum(sizes)
        self.agents = [NodeFiles() for _ in sizes]
        self.held = [self.start(node) for node in range(len(sizes))]
        self.attempt = 0

    def start(self, node: int) -> list[str]:
        """Have the node's agent hold files for its ranks, once. The agent is not safe with threads."""
        return paths_of(self.agents[node].hold(self.sizes[node]))

    def lose(self, *nodes: int) -> None:
        """Lose these nodes. Spares take their places."""
        for node in nodes:
            self.end(node)
            self.agents[node] = NodeFiles()
            self.held[node] = self.start(node)

    def end(self, node: int) -> None:
        """End the node's agent; its files go with it."""
        for path in paths_of(self.agents[node].hold(0)):
            os.close(int(Path(path).name))

    def slot(self, rank: int) -> MemorySlot:
        places = [(node, local) for node, size in enumerate(self.sizes) for local in range(size)]
        node, local_rank = places[rank]
        return MemorySlot(rank, self.world_size, local_rank, self.sizes[node], self.held[node])

    def memory(self, rank: int) -> PeerMemory:
        """Return the copies as a rank that has just started sees them."""
        return PeerMemory(self.slot(rank), self.attempt, "127.0.0.1" if len(self.sizes) > 1 else None)

    def run(
        self, steps: Mapping[int, Sequence[int]] | Sequence[int] = (), newer_than: int | None = None
    ) -> list[tuple[Loaded | None, State]]:
        """Run an attempt; return what each rank loaded and filled. Then each writes ``steps``, or those of its rank."""
        self.attempt += 1

        def body(rank: int, kv: HashStore) -> tuple[Loaded | None, State]:
            places, own = state(rank, 0.0, self.world_size), self.memory(rank)
            with closing(own):
                loaded = own.load(places, kv, newer_than)
                for step in steps[rank] if isinstance(steps, Mapping) else steps:
                    own.wait()
                    own.write(step, state(rank, float(step), self.world_size), {"reached": step})
                own.wait()
                on_all_done(kv, rank, self.world_size, f"{self.attempt}/written")
            return loaded, places

        results = on_ranks(self.world_size, body)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def loads(self, newer_than: int | None = None) -> list[int | None]:
        """Return the step that each rank of a new attempt loads. Every loaded value is verified."""
        results = self.run(newer_than=newer_than)
        for rank, (loaded, places) in enumerate(results):
            if loaded is not None:
                assert loaded.meta == {"reached": loaded.step}
                assert loaded.values == {
                    f"seen/rank{rank}": {"samples": [loaded.step, rank]},
                    "rate": loaded.step / 2,
                }
                expected = state(rank, float(loaded.step), self.world_size)
                for name, entry in places.items():
                    if isinstance(entry.value, torch.Tensor):
                        assert torch.equal(entry.value, expected[name].value), name
        return [None if loaded is None else loaded.step for loaded, _ in results]

    def files(self, rank: int) -> list[str]:
        return [*self.slot(rank).own]


def on_all_done(kv: HashStore, rank: int, world_size: int, topic: str) -> None:
    """Wait for all ranks. A rank that leaves early would take its receiver with it."""
    kv.set(f"{topic}/{rank}", "1")
    kv.wait([f"{topic}/{other}" for other in range(world_size)])


def state(rank: int, number: float, world_size: int) -> dict[str, Any]:
    """Return a rank's state: replicated matrices, a part of a vector, a scalar, plain numbers."""
    return {
        "weights": Replicated(torch.full((3, 4), number)),
        "turned": Replicated(torch.full((5, 2), number).t()),
        "part": Sharded(torch.full((3,), number + rank), (3 * world_size,), (3 * rank,)),
        f"own/rank{rank}": PerRank(torch.tensor(int(number) + rank, dtype=torch.int16)),
        f"seen/rank{rank}": PerRank({"samples": [int(number), rank]}),
        "rate": Replicated(number / 2),
    }


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(*getattr(request, "param", ONE_NODE))
    yield nodes
    for node in range(len(nodes.sizes)):
        nodes.end(node)


def on(*cases: tuple[int, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("nodes", cases, indirect=True, ids=lambda sizes: "+".join(map(str, sizes)))


@on(ONE_NODE, TWO_NODES, FOUR_RANKS)
def test_each_rank_finds_again_what_it_had(nodes: Nodes) -> None:
    nodes.run([7])
    assert nodes.loads() == [7] * nodes.world_size


def test_the_newest_step_that_all_have_counts(nodes: Nodes) -> None:
    nodes.run({0: [5, 6, 7], 1: [5, 6]})
    assert nodes.loads() == [6, 6]


def test_a_rank_that_dies_while_it_writes_has_the_step_before(nodes: Nodes) -> None:
    nodes.run([5, 6])
    nodes.memory(1)._files.own.next.allocate(4096)
    assert nodes.loads() == [6, 6]


def test_the_step_that_the_training_goes_on_from_is_overwritten_last(nodes: Nodes) -> None:
    """Rank 0 has a newer step that rank 1 lacks. It is worth nothing, and is overwritten first."""
    nodes.run({0: [5, 6, 7], 1: [5, 6]})
    nodes.run({0: [7], 1: []})
    assert nodes.loads() == [6, 6]


def test_a_step_of_an_attempt_and_the_same_of_another_are_two(nodes: Nodes) -> None:
    nodes.run({0: [6], 1: []})
    nodes.run({0: [], 1: [6]})
    assert nodes.loads() == [None, None]


def test_what_is_no_newer_than_the_disks_is_left_alone(nodes: Nodes) -> None:
    nodes.run([6])
    assert nodes.loads(newer_than=6) == [None, None]
    assert nodes.loads(newer_than=5) == [6, 6]


def test_a_damaged_copy_of_one_rank_is_used_by_none(nodes: Nodes) -> None:
    nodes.run([6])
    (written,) = (path for path in nodes.files(1) if Path(path).stat().st_size)
    damage(written)
    with pytest.raises(CorruptCheckpointError, match="cannot be loaded"):
        nodes.loads()
    assert nodes.loads() == [None, None]


@on(TWO_NODES)
def test_after_a_damaged_copy_the_one_before_it_is_offered(nodes: Nodes) -> None:
    nodes.run([5, 6])
    (written,) = (path for path in nodes.files(1) if step_in(path) == 6)
    damage(written)
    with pytest.raises(CorruptCheckpointError):
        nodes.loads()
    assert nodes.loads() == [5, 5]


def step_in(path: str) -> int | None:
    with closing(MemoryFile(path)) as file:
        label = file.label()
    return None if label is None else label.moment[1]


def damage(path: str) -> None:
    """Damage one byte of the first tensor."""
    with Path(path).open("r+b", buffering=0) as file:
        file.seek(64)
        file.write(b"\xff")


def test_another_number_of_ranks_finds_nothing(nodes: Nodes) -> None:
    nodes.run([6])
    nodes.sizes, nodes.world_size = (1,), 1
    assert nodes.loads() == [None]


@on(ONE_NODE, TWO_NODES)
def test_empty_files_hold_nothing(nodes: Nodes) -> None:
    assert nodes.loads() == [None, None]


def test_what_changes_after_the_copy_is_not_in_it(nodes: Nodes) -> None:
    """The digests are computed while the training continues."""
    for rank in range(2):
        written, live = nodes.memory(rank), state(rank, 7.0, 2)
        written.write(7, live, {"reached": 7})
        live["weights"].value.zero_()
        written.close()
    assert nodes.loads() == [7, 7]


@on(TWO_NODES, FOUR_RANKS, (1, 1, 1, 1))
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_starts_from_what_the_other_nodes_hold(nodes: Nodes, lost: int) -> None:
    nodes.run([5, 6])
    nodes.lose(lost)
    assert nodes.loads() == [6] * nodes.world_size


@on(TWO_NODES, FOUR_RANKS)
def test_one_node_after_the_other_may_be_lost(nodes: Nodes) -> None:
    nodes.run([5])
    for number, lost in enumerate([1, 0, 0, 1]):
        nodes.lose(lost)
        results = nodes.run([6 + number])
        assert {loaded.step for loaded, _ in results if loaded} == {5 + number}
    assert nodes.loads() == [9] * nodes.world_size


@on(TWO_NODES, FOUR_RANKS)
def test_a_node_may_be_lost_after_a_restart_from_which_no_part_had_to_be_sent(nodes: Nodes) -> None:
    nodes.run([5, 6])
    nodes.run([7, 8, 9])
    nodes.lose(1)
    assert nodes.loads() == [9] * nodes.world_size


@on((1, 1, 1, 1))
def test_two_nodes_that_are_no_neighbours_may_be_lost_and_neighbours_may_not(nodes: Nodes) -> None:
    nodes.run([5])
    nodes.lose(0, 2)
    assert [loaded.step for loaded, _ in nodes.run([6]) if loaded] == [5] * 4
    nodes.lose(1, 2)
    assert nodes.loads() == [None] * 4


@on((1, 1, 1), FOUR_RANKS)
def test_ranks_that_stand_elsewhere_than_before_get_their_parts(nodes: Nodes) -> None:
    nodes.run([5, 6])
    nodes.agents = [*nodes.agents[1:], nodes.agents[0]]
    assert nodes.loads() == [6] * nodes.world_size


@on(TWO_NODES)
def test_a_partners_torn_copy_is_none(nodes: Nodes) -> None:
    nodes.run([5, 6])
    torn = nodes.memory(1)._files.partner
    torn.turn()  # to the newest
    torn.next.allocate(4096)  # rank 0 died while it sent
    nodes.lose(0)
    assert nodes.loads() == [5, 5]


@on(TWO_NODES)
def test_a_partners_damaged_copy_is_used_by_none(nodes: Nodes) -> None:
    nodes.run([6])
    (written,) = (path for path in nodes.slot(1).partner if Path(path).stat().st_size)
    damage(written)
    nodes.lose(0)
    with pytest.raises(CorruptCheckpointError):
        nodes.loads()


@on(TWO_NODES)
def test_a_copy_that_fails_is_named_with_its_step_and_the_one_before_is_loaded(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seal = PartWriter.seal

    def fails(part: PartWriter) -> None:
        if json.loads(part._about)["step"] == 7:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        seal(part)

    monkeypatch.setattr(PartWriter, "seal", fails)
    nodes.run([6, 7])
    assert "the state after step 7 is not complete in the node's memory: RuntimeError('CUDA error" in caplog.text
    assert nodes.loads() == [6] * nodes.world_size


def test_a_partner_that_is_gone_costs_a_line_in_the_log(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = nodes.memory(0)
    alone._partner_address = {"host": "127.0.0.1", "port": port, "token": "00" * 32}  # where nothing listens any more
    for step in (6, 7):
        alone.wait()
        alone.write(step, state(0, float(step), 2), {"reached": step})
    alone.wait()
    alone.close()
    assert caplog.text.count("no copy of this rank's state") == 1
    assert "from step 6 on another node" in caplog.text


@on(FOUR_RANKS)
def test_a_part_that_cannot_be_sent_is_waited_for_by_none(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.run([6])
    nodes.lose(1)

    def fail(*_: object) -> None:
        raise OSError("the network is away")

    monkeypatch.setattr(Sender, "send", fail)
    assert nodes.loads() == [None] * 4
    assert "the state in memory is not used: rank 0: OSError: the network is away" in caplog.text


def test_a_stranger_changes_nothing(nodes: Nodes) -> None:
    nodes.run([6])
    paths = nodes.slot(0).own
    receiver = Receiver("127.0.0.1", lambda role: pytest.fail("a stranger's file"), lambda role: None)
    address = receiver.address
    (complete,) = (file for file in map(MemoryFile, paths) if file.label() is not None)
    stranger = Sender({**address, "token": "ab" * 32})
    with pytest.raises((EOFError, OSError)):
        stranger.send(complete, Role.PARTNER)
    stranger.close()
    receiver.close()
    assert nodes.loads() == [6, 6]


def held(node: int, *parts: tuple[int, int | None], size: int = 1) -> MemoryReport:
    """Return the report of a node's first rank: these (step, part) of attempt 1. The node has ``size`` ranks."""
    return MemoryReport(node, size, held=[(1, step, of) for step, of in parts])


def test_a_step_counts_if_each_part_is_somewhere() -> None:
    reports = {0: held(0, (5, None), (5, 0), (6, None), (6, 0)), 1: held(1, (5, 1), (6, 0))}
    assert plan_restore(reports, 0).moment == (1, 5)
    assert plan_restore(reports, 5).moment is None


def test_a_step_without_the_common_part_or_the_part_of_one_rank_is_none() -> None:
    assert plan_restore({0: held(0, (5, 0), (5, 1)), 1: held(1)}, 0) == RestorePlan(has_partners=True)
    assert plan_restore({0: held(0, (5, None), (5, 0)), 1: held(1)}, 0) == RestorePlan(has_partners=True)


def test_only_what_a_node_lacks_is_sent() -> None:
    everything: list[tuple[int, int | None]] = [(5, None), *[(5, rank) for rank in range(4)]]
    reports = {0: held(0, *everything, size=2), 1: MemoryReport(0, 2), 2: held(2, size=2), 3: MemoryReport(2, 2)}
    assert plan_restore(reports, 0).transfers == (Transfer(0, 2, None), Transfer(0, 2, 2), Transfer(1, 3, 3))


def test_the_common_part_comes_from_each_holder_in_turn() -> None:
    reports = {rank: held(rank, (5, None), *[(5, of) for of in range(6)]) for rank in (0, 1)}
    reports |= {rank: held(rank, (5, rank)) for rank in range(2, 6)}
    assert [transfer.source for transfer in plan_restore(reports, 0).transfers] == [0, 1, 0, 1]


def test_a_plan_is_told_whole() -> None:
    told = RestorePlan((2, 5), (), (Transfer(0, 1, None), Transfer(0, 1, 1)), True)
    assert RestorePlan.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_nodes_of_different_size_have_no_partners() -> None:
    reports = {0: held(0, size=2), 1: MemoryReport(0, 2), 2: held(2)}
    assert not plan_restore(reports, 0).has_partners


def test_without_files_on_one_rank_no_rank_keeps_anything(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(1, 1)
    nodes.attempt = 1
    environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def body(rank: int, kv: HashStore) -> bool:
        own = PeerMemory.from_environment(rank, 2, 1, environ) if rank else nodes.memory(rank)
        assert own.load(state(rank, 0.0, 2), kv, None) is None
        own.close()
        return own.is_usable

    assert on_ranks(2, body) == [False, False]
    assert "memory_every_steps is not used: no agent" in caplog.text
    assert "memory_every_steps is not used: no files for rank 1" in caplog.text


def test_copies_that_do_not_fit_are_told_with_the_sum(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_node, "available_memory_bytes", lambda: 1000)
    text = nodes.memory(0).shortage(state(0, 1.0, 2))
    assert text is not None
    assert "take 0.0 GB more of this node's memory (2 x 0.0 and 2 x 2 x 0.0)" in text
    assert "cluster.mem_gb" in text


def test_memory_that_is_held_already_is_not_counted_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    large: State = {"weights": Replicated(torch.ones(1 << 18)), "own/rank0": PerRank(torch.ones(1 << 18))}
    monkeypatch.setattr(this_node, "available_memory_bytes", lambda: 7 << 20)
    assert nodes.memory(0).shortage(large) is None
    own = nodes.memory(0)
    for step in (1, 2):
        own.wait()
        own.write(step, large, {})
    own.wait()
    monkeypatch.setattr(this_node, "available_memory_bytes", lambda: 3 << 20)
    assert nodes.memory(0).shortage(large) is None
    assert Nodes(2).memory(0).shortage(large) is not None


def test_an_agent_without_enough_descriptors_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert NodeFiles().hold(1_000_000) == ""
    assert "no state is kept in memory" in caplog.text


def test_a_copy_in_memory_never_costs_more_than_its_share() -> None:
    for copy_s, step_s in ((0.5, 0.1), (0.003, 1.0), (2.0, 0.07)):
        steps = steps_between_copies(copy_s, 0.0, step_s)
        assert copy_s <= MAX_OVERHEAD * steps * step_s
        assert steps == 1 or copy_s > MAX_OVERHEAD * (steps - 1) * step_s


def test_a_copy_in_memory_waits_for_the_one_before() -> None:
    assert steps_between_copies(0.0, 5.0, 1.0) == 10


def test_a_copy_that_costs_nothing_is_made_after_each_step() -> None:
    assert steps_between_copies(0.0, 0.0, 1.0) == 1
    assert steps_between_copies(0.5, 0.5, 0.0) == 1  # nothing is known yet


def copies(clock: CopyClock, ranks: list[dict[str, float]], steps: int) -> list[int]:
    """Return the steps after which these ranks copy.

    One clock plays all of them: it gets the sums over their figures.
    """
    made, now_s = list[int](), 0.0
    for step in range(1, steps + 1):
        now_s += ranks[0]["step_s"]
        if not clock.is_due(step):
            continue
        first = clock.figures(step, now_s, ranks[0]["background_s"] if made else 0.0)
        others = [dict.fromkeys(first, 0.0) if not made else rank for rank in ranks[1:]]
        clock.agree(step, {name: first[name] + sum(rank[name] for rank in others) for name in first})
        now_s += ranks[0]["copy_s"]
        clock.copied(step, ranks[0]["copy_s"], now_s)
        made.append(step)
    return made


@pytest.mark.parametrize(
    ("every", "costs", "steps", "made"),
    [
        ("auto", [(0.095, 2.0)], 40, [1, 2, 12, 22, 32]),
        ("auto", [(0.05, 0.0), (0.14, 0.0)], 30, [1, 2, 12, 22]),
        (4, [(5.0, 50.0)], 12, [4, 8, 12]),
    ],
    ids=["settles after two copies", "minds the other ranks", "a number stays what it is"],
)
def test_copies_are_made_as_often_as_they_may_cost(
    every: int | str, costs: list[tuple[float, float]], steps: int, made: list[int]
) -> None:
    """``costs`` are the seconds of a copy of each rank, in the foreground and in the background. A step takes 1 s."""
    ranks = [{"copy_s": copy_s, "background_s": background_s, "step_s": 1.0} for copy_s, background_s in costs]
    assert copies(CopyClock(every), ranks, steps) == made


def test_a_file_in_memory_that_grows_is_page_locked_anew(cuda: Cuda, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.touch()
    file = MemoryFile(str(path))
    file.allocate(mmap.PAGESIZE, pinned=True)
    file.allocate(3 * mmap.PAGESIZE, pinned=True)
    assert list(cuda.locked.values()) == [3 * mmap.PAGESIZE]
    assert cuda.holds(file.bytes_at(0, 3 * mmap.PAGESIZE))
    file.close()
