"""What a config may ask of the strategy tensor."""

from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import load_config, validate
from toolkit.config.strategy import PipelineConfig
from toolkit.plugins.model_parallel.checks import micro_batches
from toolkit.ranks.state import Json
from toolkit.train.run_checkpoints import refuse_other_identity

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["strategy.mesh={replicas: 2, shards: 2, tensor: 3}"],
            "strategy.mesh: 2 replicas x 2 shards x 3 tensor = 12, and there are 8 ranks: the product must be",
        ),
        (["strategy.mesh.tensor=3"], "strategy.mesh: 3 tensor = 3, and there are 8 ranks: 3 must divide their number"),
        (["strategy.name=ddp", "strategy.sequence_parallel=false"], "strategy.mesh.tensor: strategy.name ddp has no"),
        (["strategy.name=ddp", "strategy.sequence_parallel=true"], "strategy.sequence_parallel: this goes with"),
        (["strategy.tensor_plan={head: colwize}"], "strategy.tensor_plan: head: unknown value 'colwize'; did you mean"),
        (["strategy.cpu_offload=true"], "strategy.cpu_offload: this goes with strategy.name fsdp only, not tensor"),
        (["strategy.prefetch_blocks=2"], "strategy.prefetch_blocks: this goes with strategy.name fsdp or zero only"),
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


@pytest.mark.parametrize(
    ("schedule", "stages", "samples", "least", "expected"),
    [
        ("1f1b", 4, 64, 1, 16),
        ("1f1b", 4, 64, 24, 24),  # train.accumulate asks for more
        ("1f1b", 4, 18, 1, 9),  # two samples in each
        ("1f1b", 4, 5, 1, 4),  # and never fewer than there are ranks
        ("interleaved", 4, 22, 1, 8),
        ("gpipe", 1, 10, 1, 4),
    ],
)
def test_micro_batches_are_four_for_each_rank_where_so_many_fit(
    schedule: str, stages: int, samples: int, least: int, expected: int
) -> None:
    assert micro_batches(PipelineConfig(schedule), stages, samples, least=least) == expected


PIPELINE = "configs/gpt_pipeline.yaml"  # 4 ranks: 2 stages, 2 replicas


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["strategy.mesh.stages=3"], "strategy.mesh: 2 replicas x 3 stages = 6, and there are 4 ranks"),
        (["strategy.mesh.replicas=null", "strategy.mesh.stages=3"], "strategy.mesh: 3 stages = 3, and there are 4"),
        (
            ["strategy.pipeline.micro_batches=20"],
            "data.global_batch_size: 32 samples cannot be shared by 2 x 2 ranks in 2 x 20 micro-batches",
        ),
        (["data.global_batch_size=3"], "data.global_batch_size: 3 samples cannot be shared by 2 x 2 ranks in 2 x 2"),
        (["strategy.pipeline.micro_batches=1"], "strategy.pipeline.micro_batches: 1 do not fill a pipeline of 2 ranks"),
        (
            ["strategy.pipeline.micro_batches=5", "strategy.pipeline.schedule=interleaved"],
            "strategy.pipeline.micro_batches: interleaved goes through the 2 ranks of a pipeline in rounds",
        ),
        (
            ["strategy.pipeline.micro_batches=4", "train.accumulate=8"],
            "train.accumulate: 8 parts are more than strategy.pipeline.micro_batches: 4",
        ),
        (["strategy.pipeline.split=[blocks.1,blocks.2]"], "strategy.pipeline.split: 2 layers begin a stage, and 2 sta"),
        (
            ["strategy.pipeline.split=[norm]", "strategy.pipeline.schedule=interleaved"],
            "strategy.pipeline.split: 1 layers begin a stage, and 4 stages need 3 of them",
        ),
        (["strategy.pipeline.schedule=1b1f"], "strategy.pipeline.schedule: unknown value '1b1f'; did you mean '1f1b'?"),
        (
            ["train.pruning.amount=0.5", "train.pruning.end_step=9", "train.pruning.structured=true"],
            "train.pruning.structured: with strategy.name pipeline each rank would leave the outputs of its own last",
        ),
        (["optim.layer_decay=0.9"], "optim.layer_decay: needs all blocks of one model"),
        (["strategy.name=ddp"], "strategy.mesh.stages: strategy.name ddp has no such dimension"),
    ],
)
def test_what_the_ranks_cannot_do_is_refused_before_anything_is_queued(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(PIPELINE, overrides, site=False))
    assert says in str(caught.value)


def test_a_pipeline_goes_with_the_number_of_ranks_that_an_allocation_really_has() -> None:
    config = load_config(PIPELINE, ["strategy.mesh.replicas=null"], site=False)
    validate(config, ranks=6)
    with pytest.raises(ConfigError, match="2 stages = 2, and there are 5 ranks"):
        validate(config, ranks=5)
