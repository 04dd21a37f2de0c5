"""Results of benches as files, and what a comparison of two calls a change."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench import compare, draw, record
from tests.bench.compare import changes


def rows(*ratios: float, more: bool = False) -> dict[str, object]:
    """Return a file's content with one row, whose peer took 1 s in each round."""
    return {"rows": [record.row("a step", ratios, to=[1.0] * len(ratios), peer="torch", more=more)], "date": "today"}


def test_a_row_has_the_median_and_extremes_of_the_ratios_of_each_round() -> None:
    row = record.row("a step", [2.0, 6.0, 3.0], "ms", to=[1.0, 2.0, 3.0], peer="torch")
    assert (row["median"], row["least"], row["most"], row["rounds"]) == (3.0, 2.0, 6.0, 3)
    assert row["ratio"] == {
        "to": "torch",
        "more_is_better": False,
        "median": 2.0,
        "least": 1.0,
        "most": 3.0,
        "rounds": 3,
    }


@pytest.mark.parametrize(
    ("now", "more", "expected"),
    [
        ((1.2,), False, []),
        ((1.31,), False, []),  # 5 % beyond the greatest, which is 1.25
        ((1.32,), False, [(True, "a step: 1.32 times torch, was 1.2 (1 to 1.25): 6% worse than that")]),
        ((1.0, 9.0, 1.1), False, []),  # medians are compared
        ((0.96,), False, []),
        ((0.9,), False, [(False, "a step: 0.9 times torch, was 1.2 (1 to 1.25): 10% better than that")]),
        ((0.9,), True, [(True, "a step: 0.9 times torch, was 1.2 (1 to 1.25): 10% worse than that")]),
        ((1.5,), True, [(False, "a step: 1.5 times torch, was 1.2 (1 to 1.25): 20% better than that")]),
    ],
)
def test_what_is_5_percent_beyond_the_kept_spread_is_a_change(
    now: tuple[float, ...], more: bool, expected: list[tuple[bool, str]]
) -> None:
    assert list(changes(rows(1.0, 1.2, 1.25, more=more), rows(*now, more=more))) == expected


def test_what_is_not_measured_any_more_is_worse_and_seconds_alone_are_not_compared() -> None:
    assert list(changes(rows(1.0), {"rows": []})) == [(True, "a step: not measured any more")]
    alone = {"rows": [record.row("a kill", [1.0])]}
    assert list(changes(alone, {"rows": []})) == []


def test_a_file_says_by_which_command_on_which_machine_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept" / "steps.json"
    monkeypatch.setattr(sys, "argv", ["/somewhere/tests/bench/steps.py", "--rounds", "3", "--json", str(file)])
    made = record.row("a step", [1.0])
    record.write(file, [made])
    told = json.loads(file.read_text())
    assert told["command"] == "python -m tests.bench.steps --rounds 3"
    assert told["versions"]["python"] == platform.python_version()
    assert told["machine"]["cores"] >= 1
    assert str(tmp_path) not in file.read_text()
    assert record.rows_of(file) == {"a step": made}
    assert record.rows_of(tmp_path / "none.json") == record.rows_of(None) == {}


def test_a_comparison_ends_with_1_where_something_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    for folder, ratio in ((kept, 1.0), (fresh, 2.0)):
        folder.mkdir()
        (folder / "steps.json").write_text(json.dumps(rows(ratio)))
    monkeypatch.setattr(compare, "KEPT", kept)
    for folder, code in ((fresh, 1), (kept, 0)):
        monkeypatch.setattr(sys, "argv", ["compare", "steps", "--fresh", str(folder)])
        assert compare.main() == code
    assert capsys.readouterr().out.splitlines() == [
        "steps",
        "  a step: 2 times torch, was 1 (1 to 1): 100% worse than that",
        "steps: as on today",
    ]


def test_a_picture_has_a_bar_as_long_as_its_row_and_says_what_does_not_come_back(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    back = {"name": "rank, ours", "back": True, "restarted": True, "seconds": 5.0, "lost": 1}
    gone = {"name": "rank, <others>", "back": False, "end": "the job has ended"}
    record.write(file, [record.row("a step", [10.0], "ms"), back, gone])
    draw.draw(file)
    root = ElementTree.parse(file.with_suffix(".svg")).getroot()
    bars = [float(part.get("width", "")) for part in root.iterfind("{*}rect")]
    assert bars[1] == bars[0] / 2
    words = [part.text for part in root.iterfind("{*}text")][1:]
    assert words == ["a step", "10 ms", "rank, ours", "5 s, 1 steps again", "rank, <others>", words[-1]]
    assert words[-1] == "does not come back: the job has ended"
