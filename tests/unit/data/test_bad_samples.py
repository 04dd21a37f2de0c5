"""The list of a run's bad samples: what stands in it, and when it is too long."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from toolkit.base import fsio
from toolkit.base.errors import ConfigError
from toolkit.data.bad_samples import NAMED, BadSamples
from toolkit.ranks.batch import BadSample, Batch


class Run:
    """The two ranks of a run; ``again`` gives those of the next attempt."""

    def __init__(self, folder: Path, most: int = 100) -> None:
        self.folder = folder
        self.most = most
        self.attempt = 0
        self.ends: list[BadSamples] = []

    def again(self) -> Run:
        store = HashStore()
        self.attempt += 1
        sessions: list[Any] = [
            SimpleNamespace(run_dir=self.folder, attempt=self.attempt, store=store, is_main=rank == 0)
            for rank in (0, 1)
        ]
        self.ends = [BadSamples(session, self.most) for session in sessions]
        return self

    def meet(self, rank: int, *bad: tuple[int, int]) -> None:
        """Let ``rank`` meet bad samples: the index and position of each."""
        found = tuple(BadSample(index, position, f"OSError: {index}") for index, position in bad)
        nothing = torch.empty(0)
        self.ends[rank].note(Batch((nothing, nothing), nothing, 4, found))

    def collect(self) -> None:
        for end in self.ends:
            end.collect()

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "bad_samples.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def listed(self) -> list[tuple[int, int]]:
        return [(line["index"], line["position"]) for line in self.lines()]


def test_bad_samples_of_all_ranks_are_listed_once_where_they_were_met_first(tmp_path: Path) -> None:
    run = Run(tmp_path).again()
    run.collect()
    assert not (tmp_path / "bad_samples.jsonl").exists()
    run.meet(1, (5, 7), (6, 3))
    run.meet(0, (5, 2))
    run.collect()
    run.meet(0, (6, 11), (8, 12))
    run.meet(1, (5, 17))
    run.collect()
    assert run.listed() == [(5, 2), (6, 3), (8, 12)]
    assert run.lines()[0] == {"index": 5, "position": 2, "error": "OSError: 5"}


def test_a_resumed_run_lists_only_what_the_list_does_not_hold(tmp_path: Path) -> None:
    run = Run(tmp_path).again()
    run.meet(1, (5, 2), (6, 30))
    run.collect()
    run.meet(1, (7, 40))  # a crash comes before it is collected
    run.again()
    run.meet(0, (6, 30), (7, 40))
    run.collect()
    assert run.listed() == [(5, 2), (6, 30), (7, 40)]


def test_a_list_whose_last_line_a_crash_cut_off_goes_on_without_it(tmp_path: Path) -> None:
    run = Run(tmp_path).again()
    run.meet(0, (5, 2))
    run.collect()
    with (tmp_path / "bad_samples.jsonl").open("a") as file:
        file.write('{"index": 6, "posi')
    run.again()
    run.meet(0, (6, 3))
    run.collect()
    lines = (tmp_path / "bad_samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [5, 6]


def test_the_curve_counts_bad_samples_up_to_its_step_also_when_later_ones_are_known(tmp_path: Path) -> None:
    run = Run(tmp_path).again()
    run.meet(0, (5, 2), (6, 3), (7, 20))
    assert run.ends[0].figures(24) == {"data/bad_samples": 3}
    run.again()
    assert [run.ends[0].figures(position) for position in (3, 8)] == [
        {"data/bad_samples": 1},
        {"data/bad_samples": 2},
    ]


def test_one_bad_sample_too_many_ends_the_run_and_every_later_start_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path, most=2).again()
    run.meet(0, (5, 2))
    run.meet(1, (6, 3))
    run.collect()
    run.meet(1, (7, 9))
    with pytest.raises(ConfigError, match=r"data.max_bad_samples: 3 samples .*more than 2: sample 5 .*OSError: 7") as e:
        run.collect()
    assert str(tmp_path / "bad_samples.jsonl") in str(e.value)
    assert len(run.listed()) == 3
    with pytest.raises(ConfigError, match="3 samples"):
        run.again()
    Run(tmp_path, most=3).again()


def test_the_first_ten_are_named_in_the_log_and_then_they_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path).again()
    with caplog.at_level(logging.WARNING, logger="toolkit"):
        run.meet(0, *((index, index) for index in range(8)))
        run.collect()
        run.meet(1, *((index, index) for index in range(8, 20)))
        run.collect()
        run.collect()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" of ")[0] for message in messages[:NAMED]] == [f"sample {index}" for index in range(NAMED)]
    assert [message.split(" cannot")[0] for message in messages[NAMED:]] == ["20 samples"]


def test_a_full_disk_delays_the_list_and_does_not_end_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    run = Run(tmp_path).again()
    with monkeypatch.context() as patched:
        patched.setattr(fsio, "append_json_line", _full)
        run.meet(0, (5, 2))
        run.collect()
    assert run.listed() == []
    run.meet(1, (6, 3))
    run.collect()
    assert run.listed() == [(5, 2), (6, 3)]


def _full(path: Path, value: Any) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")
