"""What the installed torch is too old for is refused by its key, where a run is submitted. torch is not imported."""

import sys
from collections.abc import Callable
from importlib import metadata

import pytest

from toolkit import config as configs
from toolkit.base import torch_version
from toolkit.base.errors import ConfigError

Install = Callable[[str | None], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(version: str | None) -> None:
        monkeypatch.setattr(torch_version, "installed", lambda: version)

    return install


@pytest.mark.parametrize(
    ("version", "keys", "refusal"),
    [
        ("2.5.1+cu121", [], "torch: needs torch 2.6 or newer, and .* has 2.5.1"),
        ("1.13.1", [], "torch: needs torch 2.6"),
        ("2.8.0+rocm6.4", ["optim.name=muon"], "optim.name: muon: needs torch 2.9 or newer, and .* has 2.8.0.rocm6.4"),
        ("2.8.0", ["optim.name=adamw"], None),
        ("2.6.0", ["strategy.name=pipeline"], None),
        ("2.6.0", ["strategy.name=tensor"], "strategy.name: tensor: needs torch 2.7"),
        ("2.7.1", ["strategy.name=tensor", "strategy.mesh.shards=2"], "weights that are sharded on CPUs .*: needs"),
        ("2.8.0", ["strategy.name=fsdp"], "weights that are sharded on CPUs .*: needs torch 2.9"),
        ("2.6.0", ["strategy.name=fsdp", "cluster.gpus_per_node=2"], None),
        ("2.10.0", ["optim.name=muon"], None),
        ("2.7.0a0+79aa17489c.nv25.04", [], None),  # as NVIDIA's containers have it
        ("parrot", [], None),
        (None, ["optim.name=muon"], None),  # the compute nodes may have one
        ("2.8.0", ["optim.name=muon", "cluster.container=pyxis:site/torch:2.15"], None),  # that torch is not this one
    ],
)
def test_a_torch_that_lacks_what_a_key_asks_for_is_named_with_the_key(
    install: Install,
    version: str | None,
    keys: list[str],
    refusal: str | None,
) -> None:
    install(version)
    config = configs.load_config(None, keys, site=False)
    if refusal is None:
        configs.check_places(config)
        return
    with pytest.raises(ConfigError, match=refusal):
        configs.check_places(config)
    with pytest.raises(ConfigError, match=refusal):
        configs.check_torch(config)


def test_the_version_is_that_of_the_package() -> None:
    assert torch_version.installed() == metadata.version("torch")


def test_a_python_without_torch_is_refused_where_its_ranks_would_run(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(torch_version, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"torch is not installed for .*python.* or install the toolkit in the Py"):
        torch_version.refuse_missing()
