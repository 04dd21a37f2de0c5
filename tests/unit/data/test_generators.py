"""The places in which users keep generators. What is found there is brought to its place at a resume."""

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial, wraps
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from toolkit.data.randomness import generators_in, generators_of

DRAWN = random.Random(1)
HELPERS = ModuleType("helpers_of_a_script")
exec("import random\ndrawn = random.Random(2)\ndef shift(x):\n    return x + drawn.random()", vars(HELPERS))


class Items:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(index)


class ByClass(Items):
    drawn = random.Random(3)

    def __getitem__(self, index: int) -> float:
        return index + self.drawn.random()


class Inherits(ByClass):
    def __getitem__(self, index: int) -> float:
        return 2 * super().__getitem__(index)


def jitter(x: float) -> float:
    return x + sum(DRAWN.random() for _ in range(2))


class CallsAFunction(Items):
    def __getitem__(self, index: int) -> float:
        return jitter(index)


class CallsAModule(Items):
    def __getitem__(self, index: int) -> float:
        return float(HELPERS.shift(index))


class NamesAClass(Items):
    def __getitem__(self, index: int) -> float:
        return index + ByClass.drawn.random()


class HasADefault(Items):
    def __getitem__(self, index: int, drawn: random.Random = random.Random(4)) -> float:  # noqa: B008
        return index + drawn.random()


class HasAStaticMethod(Items):
    @staticmethod
    def noise() -> float:
        return DRAWN.random()

    def __getitem__(self, index: int) -> float:
        return index + self.noise()


class HasAProperty(Items):
    @property
    def noise(self) -> float:
        return DRAWN.random()


class HasSlots(Items):
    __slots__ = ("drawn",)

    def __init__(self) -> None:
        self.drawn = random.Random(5)


def decorated(function: Callable[..., float]) -> Callable[..., float]:
    @wraps(function)
    def wrapper(*args: Any) -> float:
        return function(*args) + DRAWN.random()

    return wrapper


class IsDecorated(Items):
    __getitem__ = decorated(Items.__getitem__)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.Generator().manual_seed(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.drawn)


class HasAModule(Items):
    def __init__(self) -> None:
        self.transform = nn.Sequential(nn.Identity(), Noise())


class HasAQueue(Items):
    def __init__(self) -> None:
        self.transforms = deque([partial(random.Random.random, random.Random(7))])


@pytest.mark.parametrize(
    "kind",
    [
        *(ByClass, Inherits, CallsAFunction, CallsAModule, NamesAClass, HasADefault, HasAStaticMethod, HasAProperty),
        *(HasSlots, IsDecorated, HasAModule, HasAQueue),
    ],
)
def test_a_data_sets_generator_is_found(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HELPERS.__name__, HELPERS)
    assert len(generators_in(DataLoader(kind()))) == 1


class Layer(nn.Module):
    shared = np.random.default_rng(8)

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.noise = Noise()
        self.inner = Layer(depth - 1) if depth else nn.Identity()


def test_all_layers_of_a_deep_model_are_looked_at() -> None:
    """Torch's own attributes of each layer do not count against the limit."""
    assert len(generators_of(nn.Sequential(Layer(300)))) == 302


class Cached(Items):
    @cached_property
    def drawn(self) -> random.Random:
        return random.Random(9)


def test_nothing_is_made_or_run_to_find_a_generator() -> None:
    data = Cached()
    assert generators_in(data) == []
    assert "drawn" not in vars(data)
