"""Ranks that do not have the same data set: told before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.dist.ranks import run_ranks
from toolkit.base.errors import ConfigError
from toolkit.config import CheckpointConfig
from toolkit.ranks.session import Session
from toolkit.train.run_checkpoints import Checkpoints

pytestmark = pytest.mark.dist


def include(session: Session, found: list[list[str]]) -> list[str]:
    told = []
    for data in found:
        loader: Any = SimpleNamespace(fingerprint=lambda data=data: data[session.rank])
        checkpoints = Checkpoints(CheckpointConfig(), session, SimpleNamespace(), {})
        try:
            checkpoints.include(loader)
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    return told


def test_ranks_with_other_data_than_most_are_named_on_every_rank() -> None:
    cases = [
        ["100 samples, aa", "100 samples, aa", "97 samples, bb"],
        ["100 samples, aa", "100 samples, cc", "100 samples, aa"],
        ["100 samples, aa"] * 3,
    ]
    for fewer, others, same in run_ranks(3, include, cases):
        begin = "data: the ranks have different data sets: rank"
        assert fewer.startswith(f"{begin} 2 has 97 samples; most ranks have 100 samples. See that all nodes")
        assert others.startswith(f"{begin} 1 has 100 samples, but others; most ranks have 100 samples.")
        assert same == ""
