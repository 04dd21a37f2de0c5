"""What parameter servers refuse before anything is queued."""

from __future__ import annotations

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import load_config, validate

STRUCTURED = ["train.pruning.amount=0.5", "train.pruning.end_step=9", "train.pruning.structured=true"]


SERVERS = ["cluster.tasks_per_node=4", "strategy.parameter_server.servers=2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy.parameter_server.servers=3"], ["strategy.parameter_server.servers", "3 of 3 ranks"]),
        (["data.global_batch_size=1"], ["data.global_batch_size", "2 ranks"]),
        (["train.accumulate=33"], ["train.accumulate", "32"]),
        (["strategy.parameter_server.mode=asinc"], ["strategy.parameter_server.mode", "did you mean 'async'?"]),
        (["strategy.parameter_server.servers=0"], ["strategy.parameter_server.servers", "1 or more"]),
        ([*SERVERS, "optim.name=muon"], ["optim.name", "strategy.parameter_server.servers 2"]),
        ([*SERVERS, "train.skip_bad_steps=true"], ["train.skip_bad_steps", "workers", "ddp"]),
        ([*SERVERS, "train.ema_decay=0.9"], ["train.ema_decay", "workers", "ddp"]),
        ([*SERVERS, "train.clip_norm=1"], ["train.clip_norm", "strategy.parameter_server.servers to 1"]),
        ([*SERVERS, *STRUCTURED], ["train.pruning", "strategy.parameter_server.servers to 1"]),
        ([*SERVERS, "strategy.parameter_server.mode=async", *STRUCTURED], ["train.pruning", "mode async", "mode sync"]),
    ],
)
def test_what_it_cannot_do_is_refused_with_key_and_remedy(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config("configs/digits_parameter_server.yaml", overrides, site=False))
    for word in words:
        assert word in str(caught.value)
