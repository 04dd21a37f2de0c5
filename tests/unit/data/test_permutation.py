from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import ConfigError
from toolkit.data.permutation import SORTED_MAX, ShuffledOrder, hash64, mix, mix_array, order


def test_hash_is_splitmix64_as_published() -> None:
    # first outputs for seed 1234567, from Vigna's splitmix64.c: state += golden ratio, then the finaliser
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + step * golden) % 2**64 for step in (1, 2, 3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(state) for state in states] == published
    assert mix_array(np.array(states, dtype=np.uint64)).tolist() == published


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1797, SORTED_MAX, SORTED_MAX + 1, 2**17, 100_003])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for epoch in (0, 5):
        assert np.array_equal(np.sort(order(n, 7, epoch, 0, n)), np.arange(n))


def test_order_is_the_same_in_every_version() -> None:
    # a run resumed with a newer toolkit must go on in the order that it began in
    assert order(10, 0, 0, 0, 10).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert order(1437, 3, 2, 700, 705).tolist() == [627, 1048, 632, 317, 1422]
    assert order(1_281_167, 0, 0, 0, 5).tolist() == [1148581, 83359, 218988, 1211718, 88798]
    assert order(10**12, 1, 9, 10**11, 10**11 + 4).tolist() == [534650051946, 477648482398, 565416665310, 483711916037]
    assert hash64(1, -2, 3) == 13199215901169147697


@pytest.mark.parametrize("n", [1000, 100_003, 10**12])
def test_order_does_not_depend_on_the_block_asked_for(n: int) -> None:
    whole = order(n, 1, 4, 100, 400)
    assert order(n, 1, 4, 150, 151)[0] == whole[50]
    assert np.array_equal(np.concatenate([order(n, 1, 4, 100, 163), order(n, 1, 4, 163, 400)]), whole)


@pytest.mark.parametrize("n", [50_000, 1_000_003])
def test_epochs_and_seeds_give_unrelated_orders(n: int) -> None:
    base = order(n, 0, 0, 0, 5000).astype(float)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        other = order(n, seed, epoch, 0, 5000).astype(float)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06  # 4 standard deviations of an honest shuffle
        assert (base == other).sum() < 10


@pytest.mark.parametrize("n", [40_000, 200_000, 3_000_000])
def test_order_looks_random(n: int) -> None:
    values = order(n, 11, 3, 0, 20_000)
    counts = np.histogram(values, bins=20, range=(0, n))[0]
    # chi-square with 19 degrees of freedom: above 50 once in 7,000 honest shuffles
    assert ((counts - 1000) ** 2 / 1000).sum() < 50
    steps = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(steps) < 0.03
    assert abs(np.corrcoef(np.arange(20_000), values)[0, 1]) < 0.03


def test_positions_outside_an_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="within an epoch of 10 samples"):
        order(10, 0, 0, 5, 11)


def test_order_across_epochs_is_the_epochs_one_after_the_other() -> None:
    n = SORTED_MAX + 10
    endless = ShuffledOrder(n, 3)
    straddling = endless.at(np.arange(n - 4, n + 6))
    assert np.array_equal(straddling[:4], order(n, 3, 0, n - 4, n))
    assert np.array_equal(straddling[4:], order(n, 3, 1, 0, 6))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 300), max_size=90),
)
def test_order_gives_any_positions_in_whatever_sequence_they_are_asked(n: int, asked: list[int]) -> None:
    alone = [order(n, 1, p // n, p % n, p % n + 1)[0] for p in asked]
    assert ShuffledOrder(n, 1).at(np.array(asked, dtype=np.int64)).tolist() == alone


def test_large_orders_give_any_positions() -> None:
    n = 10**9
    asked = np.array([[0, 64, 5], [2 * n + 7, n - 3, n]])
    expected = [[order(n, 1, p // n, p % n, p % n + 1)[0] for p in row] for row in asked.tolist()]
    assert ShuffledOrder(n, 1).at(asked).tolist() == expected


def test_an_empty_training_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="the training set is empty"):
        ShuffledOrder(0, 1)
