"""State of any object becomes JSON and tensors, without pickle. It comes back equal, of the same types."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.train.plain_state import decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.floats(width=32).map(np.float32)
    | st.sampled_from([torch.bfloat16, torch.int8])
    | st.lists(st.integers(-5, 5)).map(lambda items: np.array(items, dtype=np.int16))
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.booleans())


def kinds_of_sequence(items: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from([tuple(items), deque(items)])


TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


class Halves(torch.Tensor):
    """A tensor of two, by torch's protocol, as torchao's states of 8 bits are codes and scales."""

    def __new__(cls, one: torch.Tensor, two: torch.Tensor, name: str) -> Halves:
        made: Halves = cls._make_wrapper_subclass(cls, (2, *one.shape), dtype=one.dtype)
        return made

    def __init__(self, one: torch.Tensor, two: torch.Tensor, name: str) -> None:
        self.one, self.two, self.label = one, two, name

    def __tensor_flatten__(self) -> tuple[list[str], list[str]]:
        return ["one", "two"], [self.label]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: list[str], size: Any, stride: Any) -> Halves:
        return cls(parts["one"], parts["two"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def through_a_checkpoint(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, "it", tensors), allow_nan=False)
    return decode(json.loads(text), [tensor.clone() for tensor in tensors])


def is_same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(is_same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(two) and all(map(is_same, one, two))
    return one == two or (isinstance(one, float) and math.isnan(one) and math.isnan(two))


@given(TREES)
def test_any_tree_of_plain_values_comes_back_the_same(tree: Any) -> None:
    assert is_same(through_a_checkpoint(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": 0},
        {"a": {"$float": "1"}},
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({3: 2, 1: 1}),
        {1, 2, 3},
        frozenset({"a"}),
        bytearray(b"\xff\x00"),
        deque([1, 2], maxlen=2),
        torch.Size([2, 3]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(1.5, dtype=torch.bfloat16),
        np.random.RandomState(1).get_state(legacy=False)["state"]["key"],
    ],
)
def test_what_json_has_no_word_for_comes_back_too(value: Any) -> None:
    again = through_a_checkpoint(value)
    assert is_same(again, value)
    if isinstance(value, deque):
        assert again.maxlen == value.maxlen


class Tagged(Tensor):
    """A subclass of which nothing is known but its name."""


def circle() -> list[Any]:
    """Return a list that holds itself, in a dictionary."""
    made: list[Any] = []
    made.append({"again": made})
    return made


#: Made within the test: torch warns of quantized tensors.
UNSAVABLE: dict[str, Callable[[], Any]] = {
    "function": lambda: print,
    "object": object,
    "complex number": lambda: 1j,
    "array of texts": lambda: np.array(["text"]),
    "other byte order": lambda: np.arange(3, dtype=np.dtype("<i4").newbyteorder()),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
}


@pytest.mark.parametrize("kind", UNSAVABLE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_stored_is_refused_by_its_place(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.resumable: scheduler\.steps\[1\] is"):
        encode({"steps": [0, UNSAVABLE[kind]()]}, "scheduler", [])


def test_a_container_that_holds_itself_is_refused_by_its_place() -> None:
    shared = [1]
    assert encode([shared, shared], "progress", []) == [[1], [1]]
    with pytest.raises(ConfigError, match=r"run\.resumable: progress\.steps\[0\]\.again is one of the containers"):
        encode({"steps": circle()}, "progress", [])


def test_a_tensor_of_several_tensors_comes_back_from_what_is_imported_only() -> None:
    tensors: list[torch.Tensor] = []
    saved: Any = json.loads(json.dumps(encode({"a": Halves(torch.ones(3), torch.zeros(3), "odd")}, "it", tensors)))
    assert [type(tensor) for tensor in tensors] == [torch.Tensor] * 2
    found = decode(saved, tensors)["a"]
    assert type(found) is Halves
    assert (found.one.tolist(), found.two.tolist(), found.label, found.shape) == ([1.0] * 3, [0.0] * 3, "odd", (2, 3))
    for other in ("antigravity", "json"):  # one that is not imported, one without such a class
        saved["a"]["$subclass"]["class"][0] = other
        with pytest.raises(ConfigError, match=rf"a tensor of {other}\.Halves, which is not imported here"):
            decode(saved, tensors)
