"""State of any object becomes JSON and tensors, without pickle. It comes back equal, of the same types."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import ConfigError
from toolkit.train.plain_state import decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.floats(width=32).map(np.float32)
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


@pytest.mark.parametrize("value", [print, object(), 1j, np.array(["text"])])
def test_what_cannot_be_stored_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.resumable: scheduler\.steps\[1\] is"):
        encode({"steps": [0, value]}, "scheduler", [])
