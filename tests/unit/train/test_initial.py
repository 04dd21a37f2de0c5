"""A new run starts from the given weights, and a resumed one from its own. The log tells which did not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import alone, blank, on_ranks, weights
from toolkit.base.errors import CheckpointError, ConfigError, ToolkitError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.policy import Keep
from toolkit.config import ModelConfig
from toolkit.ranks.report import NullReporter
from toolkit.ranks.session import Session
from toolkit.ranks.state import Replicated
from toolkit.strategies.models import in_training
from toolkit.train.initial import fill, freeze, initialised, pair


class Net(nn.Module):
    """A backbone with buffers, and a head for ``classes`` classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, classes)


def trained(classes: int = 3) -> dict[str, Tensor]:
    """Return a state in which no tensor equals that of a fresh model."""
    return {name: torch.full_like(value, 7) for name, value in Net(classes).state_dict().items()}


def session_of(folder: Path, rank: int = 0, store: Any = None) -> Session:
    nobody: Any = None  # asks the gate
    return Session(rank, 2, rank, torch.device("cpu"), folder, 1, store or HashStore(), NullReporter(), nobody)


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ("a.weight", "a.weight"),
        ("a.weight", "module.a.weight"),
        ("a.weight", "_orig_mod.module.a.weight"),
        ("a.weight", "model.a._orig_mod.weight"),
        ("model.a.weight", "a.weight"),
        ("model.a.weight", "module.model.a.weight"),
        ("module.model.a.weight", "model.module.a.weight"),
    ],
)
def test_wrappers_names_do_not_matter(own: str, others: str) -> None:
    assert pair([own], [others]) == {own: others}


def test_an_equal_name_wins_over_one_without_wrappers_and_no_tensor_is_used_twice() -> None:
    assert pair(["a", "model.a"], ["model.a", "module.a"]) == {"a": "module.a", "model.a": "model.a"}
    assert pair(["a", "model.a"], ["a"]) == {"a": "a"}
    assert pair(["modelled.a", "b"], ["a", "c"]) == {}


def test_what_fits_is_copied_in_place_and_the_rest_is_told() -> None:
    model, given = Net(classes=5), trained(classes=3)
    del given["conv.bias"]
    given["ema.decay"] = torch.ones(())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    place = model.conv.weight.data_ptr()
    # a prefix and another dtype, as files of wrapped models have them
    match = fill(model, {f"module.{name}": value.double() for name, value in given.items()})
    assert match.missing == ["conv.bias"]
    assert match.extra == ["module.ema.decay"]
    assert match.misshapen == [
        "head.weight (5, 2), in the file (3, 2)",
        "head.bias (5,), in the file (3,)",
    ]
    for name, value in model.state_dict().items():
        expected = given[name] if name in match.filled else before[name]
        assert (torch.equal(value, expected), value.dtype) == (True, before[name].dtype), name
    assert match.filled == [name for name in before if name not in ("conv.bias", "head.weight", "head.bias")]
    assert model.conv.weight.data_ptr() == place
    assert model.conv.weight.requires_grad
    assert model.conv.weight.grad_fn is None


def test_a_tied_weight_that_the_file_has_once_is_not_missing() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    match = fill(model, {"embedding.weight": torch.ones(4, 2)})
    assert (match.filled, match.missing) == (["embedding.weight"], [])


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


@pytest.mark.parametrize(("which", "expected"), [(None, 2.0), ("average", 2.0), ("raw", 1.0)])
def test_of_a_run_with_an_average_it_starts_from_that_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str | None, expected: float
) -> None:
    (tmp_path / "config.yaml").write_text("")
    state = {f"{kind}/weight": Replicated(torch.full((2, 2), value)) for kind, value in (("model", 1.0), ("ema", 2.0))}
    alone(CheckpointFolder(tmp_path / "checkpoints"), 10, state)
    config = ModelConfig(init_from=str(tmp_path), init_weights=which)
    with caplog.at_level("INFO"):
        model = initialised(lambda: nn.Linear(2, 2, bias=False), config, session_of(tmp_path / "run"))
    assert (model.get_parameter("weight") == expected).all()
    assert f"initial weights ({'raw' if which == 'raw' else 'the moving average'}) from" in caplog.text
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "w.pt")
    config.init_from, config.init_weights = str(tmp_path / "w.pt"), "average"
    with pytest.raises(ConfigError, match=r"model\.init_weights: average: .*w\.pt: there is no moving average"):
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


def test_without_an_origin_a_model_is_as_it_was_built(tmp_path: Path) -> None:
    net = Net()
    assert initialised(lambda: net, ModelConfig(), session_of(tmp_path)) is net


def source_run(folder: Path) -> CheckpointFolder:
    (folder / "config.yaml").write_text("")
    checkpoints = CheckpointFolder(folder / "checkpoints", Keep(9))
    alone(checkpoints, 10, weights(10.0))
    return checkpoints


def linear() -> nn.Module:
    return nn.Linear(4, 3, bias=False)


def test_all_ranks_start_from_the_checkpoint_that_rank_0_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = source_run(tmp_path)

    def start(rank: int, kv: HashStore) -> float:
        if rank:  # the run that is read saves once more as soon as rank 0 has looked
            kv.wait(["toolkit/model.init_from/1"])
            alone(checkpoints, 10 + rank, weights(10.0 + rank))
        model = initialised(linear, ModelConfig(init_from=str(tmp_path)), session_of(tmp_path / "run", rank, kv))
        return float(model.state_dict()["weight"].mean())

    assert on_ranks(3, start) == [10.0] * 3


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
    assert "none of 1 checkpoints is good" in str(first)
    assert isinstance(second, ToolkitError)
    assert "model.init_from: rank 0 could not say" in str(second)


def test_frozen_parts_train_as_in_a_loop_by_hand(tmp_path: Path) -> None:
    """Neither their weights nor their statistics move. The others move as with torch alone."""

    def backbone_and_head() -> nn.Sequential:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(body, nn.BatchNorm1d(4), nn.Linear(4, 3))

    ours = initialised(backbone_and_head, ModelConfig(freeze=["0.*"]), session_of(tmp_path))
    theirs = backbone_and_head().train()
    # in training mode a frozen batch norm would still change its statistics
    theirs[0].requires_grad_(False).eval()
    for model in (in_training(ours), theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(images), torch.arange(6) % 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    fresh = backbone_and_head().state_dict()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
        assert torch.equal(value, fresh[name]) == name.startswith("0."), name


def test_a_layer_of_which_one_parameter_is_frozen_still_trains() -> None:
    model = Net()
    freeze(model, ["conv.*", "norm.bias"])
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        *("norm.weight", "head.weight", "head.bias")
    ]
    assert (model.training, model.conv.training, model.norm.training) == (True, False, True)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["haed.*"], r"model\.freeze: 'haed\.\*' matches no parameter .* did you mean 'head\.\*'"),
        (["*"], r"model\.freeze: \* leaves no parameter to train"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        freeze(Net(), patterns)
