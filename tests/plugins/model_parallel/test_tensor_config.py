"""What a config may ask of the strategy tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit import config as configs
from toolkit.base.errors import ConfigError
from toolkit.config import MeshConfig, StrategyConfig, load_config, validate
from toolkit.ranks.state import Json
from toolkit.train.checkpoints import refuse_other_identity

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1, 8)),
        ({"tensor": 2}, (4, 1, 2)),
        ({"tensor": 2, "shards": 4}, (1, 4, 2)),
        ({"shards": 2}, (1, 2, 4)),
    ],
)
def test_what_a_mesh_leaves_open_is_computed_together(given: dict[str, int], expected: tuple[int, int, int]) -> None:
    found = configs.mesh_of(StrategyConfig("tensor", mesh=MeshConfig(**given)), 8)
    assert (found.replicas, found.shards, found.tensor) == expected


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["strategy.mesh={replicas: 2, shards: 2, tensor: 3}"],
            "strategy.mesh: 2 replicas x 2 shards x 3 tensor = 12, and there are 8 ranks: the product must be",
        ),
        (["strategy.mesh.tensor=3"], "strategy.mesh: 3 tensor = 3, and there are 8 ranks: 3 must divide their number"),
        (
            ["strategy.name=ddp", "strategy.sequence_parallel=false"],
            "strategy.mesh.tensor: strategy.name ddp has no such",
        ),
        (
            ["strategy.name=ddp", "strategy.sequence_parallel=true"],
            "strategy.sequence_parallel: only strategy.name ten",
        ),
        (["strategy.tensor_plan={head: colwize}"], "strategy.tensor_plan: head: there is no 'colwize'; did you mean"),
        (["strategy.cpu_offload=true"], "strategy.cpu_offload: only fsdp"),
        (["strategy.prefetch_blocks=2"], "strategy.prefetch_blocks: only fsdp and zero gather weights"),
        (["data.global_batch_size=3"], "data.global_batch_size: 3 samples cannot be shared by 4 groups of 2 ranks"),
        (["train.compile=true", "train.accumulate=5"], "train.compile: with torch 2.15 compiled layers that are cut"),
        (["train.accumulate=9"], "train.accumulate: 9 parts of a share of 8 samples"),
    ],
)
def test_a_mesh_or_a_plan_that_cannot_be_is_refused_before_anything_is_queued(overrides: list[str], says: str) -> None:
    config = load_config(
        ROOT / "configs/gpt_tensor.yaml", ["data.name=digits", "strategy.mesh.replicas=null", *overrides]
    )
    with pytest.raises(ConfigError) as caught:
        validate(config, ranks=8)
    assert says in str(caught.value)


def test_cut_layers_have_no_optimizer_that_leaves_out_a_bad_step_by_itself() -> None:
    config = load_config(ROOT / "configs/gpt_tensor.yaml", ["optim.name=sgd", "train.skip_bad_steps=true"])
    with pytest.raises(ConfigError, match=r"train\.skip_bad_steps.*adamw"):
        validate(config)


def test_a_run_of_ddp_goes_on_with_cut_layers() -> None:
    saved: dict[str, Json] = {"strategy.name": "ddp", "strategy.mesh": {}}
    refuse_other_identity(saved, {"strategy.name": "tensor", "strategy.mesh": {"replicas": 2}}, Path("here"))
