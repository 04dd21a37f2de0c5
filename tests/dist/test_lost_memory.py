"""Ranks on two nodes, of which one is lost with its copies in memory.

The run continues from memory, bit for bit. Both nodes are this machine; each has an agent's files of its own.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.strategy_cases import SUBJECTS
from tests.dist.test_trainer import assert_same, die_after, logged, plain_model, train
from toolkit.base import this_node
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import newest_step
from toolkit.checkpoint.reader import Loaded
from toolkit.config import CheckpointConfig, MeshConfig, StrategyConfig
from toolkit.nodes.agent import state_memory
from toolkit.nodes.agent.state_memory import NodeFiles
from toolkit.plugins.memory.copies import PeerMemory
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json, State
from toolkit.train.run_checkpoints import Checkpoints

pytestmark = pytest.mark.dist

NODES, DIES_IN, STEPS = 2, 7, 10
#: Nothing is on the disk when a rank dies.
EACH_STEP = CheckpointConfig(1000, memory_every_steps=1)

#: What only one node holds, is on both, or is nothing.
CASES: dict[str, tuple[StrategyConfig, int]] = {
    "ddp": (StrategyConfig("ddp"), 2),
    "topk": (SUBJECTS["topk"][0], 2),
    "fsdp": (StrategyConfig("fsdp"), 4),
    "hsdp": (StrategyConfig("fsdp", mesh=MeshConfig(replicas=2)), 4),
    "tensor": (StrategyConfig("tensor"), 2),
    "pipeline": (StrategyConfig("pipeline"), 2),
    "zero": (StrategyConfig("zero"), 4),
}


@pytest.fixture
def agents() -> Iterator[list[NodeFiles]]:
    agents = [NodeFiles() for _ in range(NODES)]
    yield agents
    for agent in agents:
        agent.hold(0)


def sit(session: Session, files: Sequence[str]) -> None:
    """Be on one of the nodes."""
    node_size = session.world_size // NODES
    os.environ |= {
        "LOCAL_RANK": str(session.rank % node_size),
        "LOCAL_WORLD_SIZE": str(node_size),
        state_memory.VARIABLE: files[session.rank // node_size],
    }


def train_on_nodes(session: Session, files: Sequence[str], run_dir: Path, **options: Any) -> Any:
    """The step that the training continues from, and its outcome."""
    sit(session, files)
    resumed: list[int | None] = []
    plain_resume = Checkpoints.resume

    def resume(self: Checkpoints) -> Loaded | None:
        loaded = plain_resume(self)
        resumed.append(None if loaded is None else loaded.step)
        return loaded

    Checkpoints.resume = resume
    outcome = train(session, run_dir, checkpoint=EACH_STEP, **options)
    return resumed, *outcome


def die_on_nodes(session: Session, files: Sequence[str], run_dir: Path, step: int, **options: Any) -> None:
    sit(session, files)
    die_after(session, run_dir, step, EACH_STEP, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lost", [0, 1], ids=["first node", "second node"])
@pytest.mark.parametrize("case", CASES)
def test_a_lost_nodes_place_is_taken_by_a_spare_that_goes_on_from_memory(
    case: str, lost: int, agents: list[NodeFiles], tmp_path: Path
) -> None:
    strategy, ranks = CASES[case]
    options: dict[str, Any] = {"name": strategy, "model": plain_model}
    run_dir = tmp_path / "disturbed"
    files = [agent.hold(ranks // NODES) for agent in agents]
    run_ranks(ranks, partial(die_on_nodes, **options), files, run_dir, DIES_IN)
    agents[lost].hold(0)
    agents[lost] = NodeFiles()
    files[lost] = agents[lost].hold(ranks // NODES)
    assert newest_step(run_dir / "checkpoints") is None
    disturbed = run_ranks(ranks, partial(train_on_nodes, **options), files, run_dir)
    calm = partial(train, checkpoint=CheckpointConfig(1000), **options)
    undisturbed = run_ranks(ranks, calm, tmp_path / "undisturbed")
    steps = {step for resumed, _, _ in disturbed for step in resumed}
    assert steps in ({DIES_IN}, {DIES_IN - 1})  # the last copy may not have come to the partner
    for (_, result, state), (expected, expected_state) in zip(disturbed, undisturbed, strict=True):
        assert result == expected
        assert_same(state, expected_state)
    curve = logged(run_dir, "train/loss")
    assert list(curve) == list(range(1, STEPS + 1))  # no step was logged twice
    assert curve == logged(tmp_path / "undisturbed", "train/loss")


def copied_after(session: Session, files: Sequence[str], run_dir: Path, every: int | str, free: Sequence[int]) -> Any:
    """Return the steps after which this rank copies its state, or its refusal. ``free`` is memory by rank."""
    sit(session, files)
    steps: list[int] = []
    plain_write = PeerMemory.write

    def write(self: PeerMemory, step: int, state: State, meta: Mapping[str, Json]) -> float:
        steps.append(step)
        return plain_write(self, step, state, meta)

    PeerMemory.write = write
    this_node.available_memory_bytes = lambda *_: free[session.rank]
    checkpoint = CheckpointConfig(1000, memory_every_steps=every)
    try:
        result, _ = train(session, run_dir, checkpoint=checkpoint, model=plain_model)
    except ConfigError as error:
        return str(error)
    assert result.step == STEPS
    return steps


MUCH, LITTLE = 1 << 30, 1000


def test_auto_copies_in_the_same_steps_on_all_ranks(agents: list[NodeFiles], tmp_path: Path) -> None:
    files = [agent.hold(1) for agent in agents]
    first, second = run_ranks(2, copied_after, files, tmp_path, "auto", (MUCH, MUCH))
    assert first == second
    assert first[:2] == [1, 2]  # and then as often as this machine's speed allows


def test_auto_is_off_on_all_ranks_where_it_does_not_fit_on_one_node(agents: list[NodeFiles], tmp_path: Path) -> None:
    files = [agent.hold(1) for agent in agents]
    assert run_ranks(2, copied_after, files, tmp_path, "auto", (MUCH, LITTLE)) == [[], []]


def test_a_number_of_steps_whose_copies_do_not_fit_is_refused(agents: list[NodeFiles], tmp_path: Path) -> None:
    files = [agent.hold(1) for agent in agents]
    for text in run_ranks(2, copied_after, files, tmp_path, 2, (LITTLE, LITTLE)):
        assert "GB more of this node's memory" in text
        assert "cluster.mem_gb" in text
