"""A new run starts from the given weights, and a resumed one from its own. The log tells which did not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from toolkit.base.errors import ConfigError
from toolkit.config import ModelConfig
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session
from toolkit.strategies.models import to_training_mode
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
    return Session(rank, 2, rank, torch.device("cpu"), folder, 1, store or HashStore(), Reporter(), nobody)


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


def test_without_an_origin_a_model_is_as_it_was_built(tmp_path: Path) -> None:
    net = Net()
    assert initialised(lambda: net, ModelConfig(), session_of(tmp_path)) is net


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
    for model in (to_training_mode(ours), theirs):
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
