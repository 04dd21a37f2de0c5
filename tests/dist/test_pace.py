"""Own step times on real ranks: the rank with a slow forward pass is named.

All other ranks wait for it in each step.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.dist.ranks import run_ranks
from tests.dist.test_trainer import CONFIG, logged, plain_model, train
from toolkit.plugins.report import stragglers
from toolkit.plugins.report.stragglers import Stragglers
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session

pytestmark = pytest.mark.dist

RANKS, SLOW, USUAL_S, SLOW_S = 4, 2, 0.020, 0.060


class Sleepy(nn.Module):
    """Takes its time, as a throttled device would."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._model = plain_model()

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return self._model(inputs)


class Noting(Reporter):
    """Keeps the last progress."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def progress(self, **fields: Any) -> None:
        self.last |= fields


def train_beside_a_slow_rank(session: Session, run_dir: Path) -> Any:
    """The stragglers in this rank's last report; three windows are long enough here."""
    vars(stragglers)["Stragglers"] = lambda host_of: Stragglers(host_of, windows=3, span_s=0.0)
    os.environ["SLURMD_NODENAME"] = "node7"
    seconds = SLOW_S if session.rank == SLOW else USUAL_S
    reporter = Noting()
    config = replace(CONFIG, log_every=2)
    train(replace(session, reporter=reporter), run_dir, config, lambda: Sleepy(seconds))
    return reporter.last["stragglers"]


def test_the_slow_rank_is_named_and_the_others_own_time_does_not_grow_by_waiting(tmp_path: Path) -> None:
    told, *others = run_ranks(RANKS, train_beside_a_slow_rank, tmp_path)
    assert others == [[]] * (RANKS - 1)
    all_s = [[*logged(tmp_path, f"world_own_step_s/rank_{rank}").values()] for rank in range(RANKS)]
    own_s = [min(times) for times in all_s]
    print(all_s, json.dumps(told))
    ((host, ranks, ratio, until),) = [(t["host"], t["ranks"], t["ratio"], t["until"]) for t in told]
    assert (host, ranks, until) == ("node7", [SLOW], None)
    assert 1.5 < ratio < 1.01 * max(all_s[SLOW]) / min(own_s)  # on a busy machine any of them is slower at times
    assert SLOW_S < own_s[SLOW] < 1.5 * SLOW_S
    for rank in {*range(RANKS)} - {SLOW}:
        assert USUAL_S < own_s[rank] < 2 * USUAL_S  # a step took them SLOW_S, most of it waiting


def test_tensorboard_gets_each_rank_the_slowest_and_how_much_slower_it_is(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, replace(CONFIG, log_every=4))
    line = json.loads((tmp_path / "tensorboard" / "metrics.jsonl").read_text().splitlines()[-1])
    zero, one = line["world_own_step_s/rank_0"], line["world_own_step_s/rank_1"]
    assert line["world/own_step_s"] == min(zero, one)
    assert line["world/slowest_rank"] == int(one > zero)
    assert line["world/slowest_ratio"] == pytest.approx(max(zero, one) / min(zero, one))


def test_a_single_rank_is_compared_with_nobody(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path)
    text = (tmp_path / "tensorboard" / "metrics.jsonl").read_text()
    assert "train/loss" in text
    assert "world" not in text
