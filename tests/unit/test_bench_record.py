"""Results of benches as files, and which differences between two count as a change."""

import json
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.bench import compare, draw, everything, failures, page, record
from tests.bench.compare import changes
from tests.bench.record import KEPT
from tests.pages import PAGES


def rows(*ratios: float, better: str = "less") -> dict[str, object]:
    """Return a file's content with one row, whose peer took 1 s in each round."""
    to = [1.0] * len(ratios)
    return {"rows": [record.row("a step", ratios, to=to, peer="torch", better=better)], "date": "today"}


def test_a_row_has_the_median_and_extremes_of_the_ratios_of_each_round() -> None:
    row = record.row("a step", [2.0, 6.0, 3.0], "ms", to=[1.0, 2.0, 3.0], peer="torch")
    assert (row["median"], row["least"], row["most"], row["rounds"]) == (3.0, 2.0, 6.0, 3)
    assert row["ratio"] == {
        "to": "torch",
        "median": 2.0,
        "least": 1.0,
        "most": 3.0,
        "rounds": 3,
    }


@pytest.mark.parametrize(
    ("now", "better", "expected"),
    [
        ((1.2,), "less", []),
        ((1.31,), "less", []),  # 5 % beyond the greatest, which is 1.25
        ((1.32,), "less", [(True, "a step: 1.32 times torch, was 1.2 (1 to 1.25): 6% worse than that")]),
        ((1.0, 9.0, 1.1), "less", []),  # medians are compared
        ((0.96,), "less", []),
        ((0.9,), "less", [(False, "a step: 0.9 times torch, was 1.2 (1 to 1.25): 10% better than that")]),
        ((0.9,), "more", [(True, "a step: 0.9 times torch, was 1.2 (1 to 1.25): 10% worse than that")]),
        ((1.5,), "more", [(False, "a step: 1.5 times torch, was 1.2 (1 to 1.25): 20% better than that")]),
    ],
)
def test_what_is_5_percent_beyond_the_kept_spread_is_a_change(
    now: tuple[float, ...], better: str, expected: list[tuple[bool, str]]
) -> None:
    assert list(changes(rows(1.0, 1.2, 1.25, better=better), rows(*now, better=better))) == expected


def test_what_is_not_measured_any_more_is_worse_and_seconds_alone_are_not_compared() -> None:
    assert list(changes(rows(1.0), {"rows": []})) == [(True, "a step: not measured any more")]
    alone = {"rows": [record.row("a kill", [1.0])]}
    assert list(changes(alone, {"rows": []})) == []


def test_a_peer_has_no_ratio_to_itself_and_its_seconds_are_not_compared() -> None:
    values = [1.0, 2.0]
    assert record.row("a step", values, to=values, peer="torch", better="more") == record.row("a step", values)


@pytest.mark.parametrize(("kept", "now", "is_worse"), [(0, 0, []), (100, 103, []), (0, 1, [True]), (100, 90, [True])])
def test_counts_are_compared_without_a_peer(kept: int, now: int, is_worse: list[bool]) -> None:
    old, new = ({"rows": [record.row("messages", [count], "", better="same")]} for count in (kept, now))
    assert [worse for worse, _ in changes(old, new)] == is_worse


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
    for folder, code in ((fresh, 1), (kept, 0)):
        monkeypatch.setattr(sys, "argv", ["compare", "steps", "--kept", str(kept), "--fresh", str(folder)])
        assert compare.main() == code
    assert capsys.readouterr().out.splitlines() == [
        "steps",
        "  a step: 2 times torch, was 1 (1 to 1): 100% worse than that",
        "steps: as on today",
    ]


def kept_file(folder: Path, *made: Mapping[str, Any]) -> Path:
    """Write rows as a bench does; return their file."""
    record.write(folder / "kept.json", made)
    return folder / "kept.json"


def test_the_table_of_a_page_has_the_rows_and_a_goal_that_is_missed(tmp_path: Path) -> None:
    goals = {"kept": {"a step": "ratio <= 1.5, most <= 9", "fsdp: kept": "median >= 3"}}
    cells = [record.row("ddp: kept", [4.0], "MiB"), record.row("fsdp: kept", [2.0], "MiB", to=[4.0], peer="ddp's")]
    kept_file(tmp_path, record.row("a step", [2.0, 6.0, 4.0], "ms", to=[1.0, 3.0, 2.0], peer="torch's"), *cells)
    text = page.filled("before\n<!-- results: kept -->\nafter\n", tmp_path, goals)
    assert text.startswith("before\n```console\n$ python -m tests.")
    assert text.endswith(
        "|  | kept, MiB (x: times ddp's) |\n| --- | --- |\n| ddp | 4 |\n| fsdp | 2; 0.5 x; ≥ 3: **missed** |\n\n"
        "| measure | median (least to most) | beside | goal |\n| --- | --- | --- | --- |\n"
        "| a step | 4 (2 to 6) ms | 2 times torch's | times ≤ 1.5; longest ≤ 9: **missed** |\nafter\n"
    )


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_each_mark_of_a_page_becomes_a_table(file: Path) -> None:
    text = page.filled(file.read_text())
    assert "<!--" not in text
    assert "Not measured yet." not in text


@pytest.mark.parametrize("file", draw.kept(), ids=lambda file: file.stem)
def test_a_kept_picture_is_of_its_results(file: Path) -> None:
    assert file.with_suffix(".svg").read_text() == draw.drawn(file), "run `python -m tests.bench.draw`"


def test_every_kept_result_is_written_by_one_command_and_shown_on_a_page() -> None:
    assert {file.stem for file in KEPT.glob("*.json")} <= everything.COMMANDS.keys()
    text = "".join(file.read_text() for file in PAGES)
    assert [name for name in everything.COMMANDS if f"<!-- results: {name} -->" not in text] == []


def test_a_round_that_does_not_come_back_is_counted() -> None:
    back = {"back": True, "restarted": True, "seconds": 5.0, "lost": 1}
    gone = {"back": False, "end": "the job has ended"}
    assert page.outcome([back, {**back, "seconds": 7.0, "lost": 3}]) == "6.0 s (5.0 to 7.0), 2 lost"
    assert page.outcome([back, gone]) == "1 of 2: 5.0 s, 1 lost"
    assert page.outcome([{**back, "restarted": False}]) == "continues (5.0 s)"
    assert page.outcome([gone]) == "no: the job has ended"
    row = failures.row("rank, ours", [back, gone])
    assert failures.in_order({"rank, ours": row, "other": row}) == [row]
    assert page.failures([row]) == "| fault | ours |\n| --- | --- |\n| rank | 1 of 2: 5.0 s, 1 lost |"


def test_the_versions_of_the_peers_are_those_of_their_python() -> None:
    assert failures.versions(sys.executable, ("torch", "none")) == {"torch": metadata.version("torch")}


def test_every_goal_is_one_of_a_row_that_was_measured() -> None:
    for file, goals in page.GOALS.items():
        assert goals.keys() <= record.rows_of(KEPT / f"{file}.json").keys(), file
