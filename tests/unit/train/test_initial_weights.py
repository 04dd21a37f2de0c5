"""The weights that a new run starts from are the same on all ranks."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import alone, blank, on_ranks, weights
from tests.unit.train.test_initial import Net, session_of, trained
from toolkit.base.errors import CheckpointError, ConfigError, ToolkitError
from toolkit.checkpoint.folder import CheckpointFolder, Keep
from toolkit.config import ModelConfig
from toolkit.ranks.state import Replicated
from toolkit.train.initial import initialised


def test_a_fresh_run_starts_from_the_file_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = trained(classes=5)
    torch.save({"state_dict": {**given, "old.weight": torch.ones(1)}}, tmp_path / "w.pt")
    with caplog.at_level("INFO"):
        model = initialised(Net, ModelConfig(init_from=str(tmp_path / "w.pt")), session_of(tmp_path / "run"))
    assert torch.equal(model.state_dict()["norm.running_mean"], given["norm.running_mean"])
    (said,) = caplog.messages
    assert said == (
        f"initial weights from {tmp_path}/w.pt: 7 tensors; of another shape, and left as made (2): "
        "head.weight (3, 2), in the file (5, 2), head.bias (3,), in the file (5,); only in the file (1): old.weight"
    )


@pytest.mark.parametrize(("averaged", "expected"), [(None, 2.0), (True, 2.0), (False, 1.0)])
def test_of_a_run_with_an_average_it_starts_from_that_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, averaged: bool | None, expected: float
) -> None:
    (tmp_path / "config.yaml").write_text("")
    state = {f"{kind}/weight": Replicated(torch.full((2, 2), value)) for kind, value in (("model", 1.0), ("ema", 2.0))}
    alone(CheckpointFolder(tmp_path / "checkpoints"), 10, state)
    config = ModelConfig(init_from=str(tmp_path), init_from_average=averaged)
    with caplog.at_level("INFO"):
        model = initialised(lambda: nn.Linear(2, 2, bias=False), config, session_of(tmp_path / "run"))
    assert (model.get_parameter("weight") == expected).all()
    assert f"initial weights ({'raw' if averaged is False else 'the moving average'}) from" in caplog.text
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "w.pt")
    config.init_from, config.init_from_average = str(tmp_path / "w.pt"), True
    with pytest.raises(ConfigError, match=r"model\.init_from_average: true: .*w\.pt: there is no moving average"):
        initialised(lambda: nn.Linear(2, 2, bias=False), config, session_of(tmp_path / "run"))


def test_a_file_of_which_nothing_fits_is_refused_and_all_of_it_listed(tmp_path: Path) -> None:
    torch.save({f"layer{i}.w": torch.ones(1) for i in range(20)}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"model\.init_from: nothing in .*w\.pt fits this model") as caught:
        initialised(Net, ModelConfig(init_from=str(tmp_path / "w.pt")), session_of(tmp_path / "run"))
    assert [f"layer{i}.w" for i in range(20) if f"layer{i}.w" not in str(caught.value)] == []
    assert [name for name in trained() if name not in str(caught.value)] == []


def test_a_run_that_has_a_checkpoint_does_not_even_look_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    alone(CheckpointFolder(tmp_path / "run/checkpoints"), 10, weights(1.0))
    model = initialised(Net, ModelConfig(init_from=str(tmp_path / "gone.pt")), session_of(tmp_path / "run"))
    assert isinstance(model, Net)


def source_run(folder: Path) -> CheckpointFolder:
    (folder / "config.yaml").write_text("")
    checkpoints = CheckpointFolder(folder / "checkpoints", Keep(9))
    alone(checkpoints, 10, weights(10.0))
    return checkpoints


def linear() -> nn.Module:
    return nn.Linear(4, 3, bias=False)


def test_all_ranks_start_from_the_checkpoint_that_rank_0_found(tmp_path: Path) -> None:
    checkpoints = source_run(tmp_path)

    def start(rank: int, kv: HashStore) -> float:
        if rank:  # the run that is read saves once more as soon as rank 0 has looked
            kv.wait(["toolkit/model.init_from/1"])
            alone(checkpoints, 10 + rank, weights(10.0 + rank))
        model = initialised(linear, ModelConfig(init_from=str(tmp_path)), session_of(tmp_path / "run", rank, kv))
        return float(model.state_dict()["weight"].mean())

    assert on_ranks(3, start) == [10.0] * 3


def test_rank_0_decides_for_all_whether_the_run_has_a_checkpoint(tmp_path: Path) -> None:
    source_run(tmp_path)

    def start(rank: int, kv: HashStore) -> float:
        run = tmp_path / f"run-as-rank-{rank}-sees-it"
        if rank == 0:
            run.mkdir()
            alone(CheckpointFolder(run / "checkpoints"), 5, weights(5.0))
        model = initialised(linear, ModelConfig(init_from=str(tmp_path)), session_of(run, rank, kv))
        return float(model.state_dict()["weight"].mean())

    assert 10.0 not in on_ranks(2, start)


def test_no_rank_reads_weights_from_a_place_that_the_config_does_not_name(tmp_path: Path) -> None:
    """The other ranks hear of the place over the store.

    The store takes messages from any process that reaches its port.
    """
    for name in ("named", "strangers"):
        (tmp_path / name).mkdir()
    elsewhere, kv = source_run(tmp_path / "strangers").path(10), HashStore()
    kv.set("toolkit/model.init_from/1", json.dumps({"kind": "checkpoint", "path": str(elsewhere)}))
    with pytest.raises(ConfigError, match=r"rank 0 cannot have read .*strangers"):
        initialised(linear, ModelConfig(init_from=str(tmp_path / "named")), session_of(tmp_path / "run", 1, kv))


def test_no_rank_waits_for_a_rank_0_that_cannot_read(tmp_path: Path) -> None:
    blank(source_run(tmp_path).path(10) / "rank-00000.safetensors")

    def start(rank: int, kv: HashStore) -> nn.Module:
        return initialised(linear, ModelConfig(init_from=str(tmp_path)), session_of(tmp_path / "run", rank, kv))

    first, second = on_ranks(2, start)
    assert isinstance(first, CheckpointError)
    assert "none of 1 checkpoints is usable" in str(first)
    assert isinstance(second, ToolkitError)
    assert "model.init_from: rank 0 could not provide it" in str(second)
