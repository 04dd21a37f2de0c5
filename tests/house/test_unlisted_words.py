"""A word that the schema lists but nothing builds is refused. It must not stand for another word."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from tests.dist.objectives import cross_entropy
from toolkit import strategies
from toolkit.base.errors import ConfigError
from toolkit.cli.keys import words_by_key
from toolkit.config import DataConfig, ImageConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.config.optim import OPTIMIZERS
from toolkit.config.strategy import TENSOR_STYLES, LocalSgdConfig, ParameterServerConfig
from toolkit.data.loader import build_loader
from toolkit.plugins.formats.images.photographs import training_transform
from toolkit.plugins.methods import local_sgd
from toolkit.plugins.methods.compression_schemes import build_scheme
from toolkit.plugins.methods.parameter_server import servers as parameter_server
from toolkit.plugins.model_parallel import pipeline
from toolkit.plugins.model_parallel.stage_module import Grid
from toolkit.plugins.model_parallel.tensor_plan import _torch_style
from toolkit.ranks.batch import Share
from toolkit.ranks.report import Reporter
from toolkit.ranks.session import Session
from toolkit.strategies import Custom, build_strategy, criterion_objective
from toolkit.strategies.layouts import autocast
from toolkit.strategies.spmd import Spmd
from toolkit.train.not_finite import NotFinite
from toolkit.train.optim import build_optimizer

CPU = torch.device("cpu")
NOBODY: Any = None  #: what no dispatch asks
WIRE: Any = SimpleNamespace(ranks=2, rank=0)
SESSION = Session(0, 2, 0, CPU, Path("nowhere"), 1, HashStore(), Reporter(), NOBODY)


def a_layout(name: str) -> object:
    return strategies.build_layout(name, StrategyConfig(name), SESSION, TrainConfig())


def a_strategy(name: str) -> object:
    """Return the strategy ``name``, not yet built. dp is for one process, and custom is made by a job."""
    if name == "custom":
        with pytest.raises(ConfigError, match="custom is for a job with a `train_step`"):
            build_strategy(StrategyConfig(name), SESSION)
        return Custom
    return build_strategy(StrategyConfig(name), replace(SESSION, world_size=1) if name == "dp" else SESSION)


def a_server(mode: str) -> object:
    config = StrategyConfig("parameter_server", parameter_server=ParameterServerConfig(mode=mode))
    return parameter_server.build(config, SESSION, TrainConfig())


def a_pipeline_schedule(schedule: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PipelineStage", "Schedule1F1B", "ScheduleGPipe"):  # torch's, which need other ranks
            patch.setattr(pipeline, name, lambda *_, **__: object())
        return pipeline.build_schedule(schedule, Grid(1, 1, 0, 1), NOBODY, [NOBODY], CPU, 2, NOBODY)


def a_meeting(outer: str) -> object:
    config = StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(outer=outer))
    made = local_sgd.build(config, SESSION, TrainConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spmd, "build", lambda self, *_: setattr(self, "_model", nn.Linear(1, 1)))
        made.build(nn.Module, NOBODY, criterion_objective(cross_entropy), None)
    return vars(made)["_meeting"]


def a_loader(**words: str) -> object:
    pairs = [(torch.ones(1), 0)] * 40
    return build_loader(pairs, DataConfig(global_batch_size=4, **words), Share(0, 2), seed=0)  # type: ignore[arg-type]


def a_transform(**words: str) -> object:
    return training_transform(ImageConfig(**words), 8)  # type: ignore[arg-type]


def an_optimizer(name: str) -> object:
    return build_optimizer(OptimConfig(name), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))


#: By key: what makes something of each of its words.
MAKERS: dict[str, Callable[[str], object]] = {
    "strategy.name": a_strategy,
    "strategy.compression": lambda kind: build_scheme(kind, [], WIRE, CPU),
    "strategy.parameter_server.mode": a_server,
    "strategy.pipeline.schedule": a_pipeline_schedule,
    "strategy.local_sgd.outer": a_meeting,
    "strategy.tensor_plan": lambda style: _torch_style(style, True, False),
    "optim.name": an_optimizer,
    "optim.schedule": lambda name: build_schedule(OptimConfig(schedule=name), 10),
    "train.precision": lambda name: autocast(CPU, name),
    "train.on_nan": lambda word: NotFinite(TrainConfig(on_nan=word), SESSION),
    "data.bad_samples": lambda word: a_loader(bad_samples=word),
    "data.balance": lambda word: a_loader(balance=word),
    "data.partition": lambda word: a_loader(partition=word),
    "data.images.policy": lambda word: a_transform(policy=word),
    "data.images.interpolation": lambda word: a_transform(interpolation=word),
}
#: torch refuses an unknown backend, the catalog an unknown data set, and a checkpoint has weights by these names. What
#: is made of cluster.stage is tested in tests/plugins/staging/test_staging.py, of train.float32_matmul in
#: tests/unit/train/test_gpu_settings.py.
ELSEWHERE = {"dist.backend", "data.name", "cluster.stage", "train.float32_matmul"}
#: What these keys take besides paths of classes, and layer by layer.
BY_NAME = {"optim.name": OPTIMIZERS, "strategy.tensor_plan": TENSOR_STYLES}
WORDS = {key: words for key, words in words_by_key().items() if words and "true" not in words} | BY_NAME
NOTHING_IS_MADE_OF = ("strategy.compression", "none")
MADE = [(key, word) for key in MAKERS for word in WORDS[key] if (key, word) != NOTHING_IS_MADE_OF]


def test_every_key_with_a_list_of_words_is_here() -> None:
    assert WORDS.keys() == MAKERS.keys() | ELSEWHERE


@pytest.mark.parametrize(("key", "word"), MADE)
def test_every_word_of_the_schema_makes_something(key: str, word: str) -> None:
    assert MAKERS[key](word) is not None


@pytest.mark.parametrize("key", MAKERS)
def test_a_word_that_nothing_is_made_of_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*newcomer"):
        MAKERS[key]("newcomer")
