"""What local_sgd refuses before anything is queued."""

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import load_config, validate

STRUCTURED = ["train.pruning.amount=0.5", "train.pruning.end_step=9", "train.pruning.structured=true"]


@pytest.mark.parametrize("key", ["checkpoint.every_steps=100", "checkpoint.every_steps=auto", "checkpoint.every_min=5"])
def test_fewer_nodes_with_local_sgd_need_checkpoints_at_the_ends_of_rounds(key: str) -> None:
    fewer = ["retry.allow_fewer_nodes=true"]
    validate(load_config("configs/digits_local_sgd.yaml", fewer, site=False))
    with pytest.raises(ConfigError, match=r"retry\.allow_fewer_nodes: .* checkpoint\.every_steps to a multiple of 8"):
        validate(load_config("configs/digits_local_sgd.yaml", [*fewer, key], site=False))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.ema_decay=0.9"], ["train.ema_decay", "local_sgd"]),
        (STRUCTURED, ["train.pruning", "local_sgd"]),
        (["strategy.local_sgd.round_steps=0"], ["strategy.local_sgd.round_steps", "1 or more"]),
        (["strategy.local_sgd.outer=diloko"], ["strategy.local_sgd.outer", "did you mean 'diloco'?"]),
        (["strategy.local_sgd.outer_momentum=1"], ["strategy.local_sgd.outer_momentum", "less than 1"]),
    ],
)
def test_what_it_cannot_do_is_refused_with_key_and_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config("configs/digits_local_sgd.yaml", overrides, site=False))
    for word in words:
        assert word in str(caught.value)


def test_each_rank_may_clip_its_own_gradient() -> None:
    validate(load_config("configs/digits_local_sgd.yaml", ["train.clip_norm=1"], site=False))
