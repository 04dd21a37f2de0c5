"""The values of a sweep: lists, ranges, spans, and samples of them."""

import pytest

from toolkit.base.errors import RequestError
from toolkit.plugins.sweep import axes
from toolkit.plugins.sweep.axes import Discrete


def texts(text: str) -> list[str]:
    axis = axes.parse("optim.lr", text)
    assert isinstance(axis, Discrete)
    return [axis.at(index) for index in range(len(axis))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4,1e-3", ["1e-4", "1e-3"]),
        ("range(64,512,64)", ["64", "128", "192", "256", "320", "384", "448"]),
        ("0..4", ["0", "1", "2", "3", "4"]),
        ("-1..1,5", ["-1", "0", "1", "5"]),
        ("log(1e-5,1e-1,5)", ["1e-05", "0.0001", "0.001", "0.01", "0.1"]),
        ("linear(0,1,3)", ["0", "0.5", "1"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("a,a,b", ["a", "b"]),
    ],
)
def test_values_are_read_as_written(text: str, expected: list[str]) -> None:
    assert texts(text) == expected


@pytest.mark.parametrize("text", ["0.1", "[1, 2]", "log", "a..b", "/data/x..y"])
def test_a_single_value_is_no_axis(text: str) -> None:
    assert axes.parse("optim.lr", text) is None


@pytest.mark.parametrize(
    "text",
    ["range(5,5,1)", "range(1,2,0)", "range(a,b)", "4..0", "log(1,1)", "log(0,1,3)", "log(1)", "linear(0,1,0)", "1,,2",
     "log(1e-5,1e-1),3", "linear(0,inf)", "log(1e-5,1e-1,2.5)"],
)  # fmt: skip
def test_an_empty_or_unreadable_axis_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(RequestError, match=r"^optim\.lr: "):
        axes.parse("optim.lr", text)


def test_a_billion_points_are_refused_at_once_with_their_number() -> None:
    axis = axes.parse("train.seed", "0..999")
    assert axis is not None
    with pytest.raises(RequestError, match="1,000,000,000 points"):
        axes.grid({"a": axis, "b": axis, "c": axis})
    with pytest.raises(RequestError, match="1,000,000,000 points"):
        axes.parse("train.seed", "1,range(0,999999999)")
    with pytest.raises(RequestError, match="1,000,000,000 points"):
        axes.parse("train.seed", "log(1,2,1000000000)")


def test_a_larger_sample_begins_with_the_points_of_a_smaller_one() -> None:
    parsed = {"lr": axes.parse("lr", "log(1e-5,1e-1)"), "seed": axes.parse("seed", "0..999")}
    found = {key: axis for key, axis in parsed.items() if axis is not None}
    few, many = (list(axes.sample(found, count, 7)) for count in (20, 50))
    assert many[:20] == few
    assert len({tuple(point.items()) for point in many}) == 50
    assert all(1e-5 <= float(point["lr"]) <= 1e-1 for point in many)
    assert list(axes.sample(found, 5, 1)) != list(axes.sample(found, 5, 2))


def test_a_sample_of_few_combinations_has_each_once() -> None:
    axis = axes.parse("seed", "0..3")
    assert axis is not None
    assert {point["seed"] for point in axes.sample({"seed": axis}, 100, 0)} == set("0123")
