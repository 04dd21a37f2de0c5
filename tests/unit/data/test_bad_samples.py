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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.unit.data.samples import Damaged, Noisy
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import DataConfig
from toolkit.data.bad_samples import NAMED, BadSampleList
from toolkit.data.loader import Loader, build_loader, eval_batches
from toolkit.data.permutation import order
from toolkit.data.workers import TRIES
from toolkit.ranks.batch import BadSample, Batch, Share


class Run:
    """The two ranks of a run; ``again`` gives those of the next attempt."""

    def __init__(self, folder: Path, most: int = 100) -> None:
        self.folder = folder
        self.most = most
        self.attempt = 0
        self.ends: list[BadSampleList] = []

    def again(self) -> Run:
        store = HashStore()
        self.attempt += 1
        sessions: list[Any] = [
            SimpleNamespace(run_dir=self.folder, attempt=self.attempt, store=store, is_main=rank == 0)
            for rank in (0, 1)
        ]
        self.ends = [BadSampleList(session, self.most) for session in sessions]
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


def batch_at(dataset: Any, step: int = 0, *, batch: int = 9, share: Share = Share(0, 1)) -> Batch:  # noqa: B008
    loader = Loader(dataset, global_batch_size=batch, seed=3, share=share, max_bad_samples=100)
    found = loader.at(step)
    assert found is not None
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 5), st.data())
def test_which_sample_takes_the_place_of_a_bad_one_does_not_depend_on_the_world_size(
    n: int, b: int, w: int, step: int, data: st.DataObject
) -> None:
    dataset = Damaged(n, data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2)))
    alone = batch_at(dataset, step, batch=b)
    shared = [batch_at(dataset, step, batch=b, share=Share(index, w)) for index in range(w)]
    assert torch.equal(torch.cat([batch.inputs for batch in shared]), alone.inputs)
    assert [bad for batch in shared for bad in batch.bad] == list(alone.bad)
    assert (len(alone), alone.global_count) == (b, b)


def test_only_bad_samples_are_replaced_and_each_is_told_with_its_position() -> None:
    good, damaged = batch_at(Noisy(9)), batch_at(Damaged(9, {2, 5}))
    rows = range(9)
    different = [row for row in rows if not torch.equal(good.inputs[row], damaged.inputs[row])]
    at = {sample: order(9, 3, 0, 0, 9).tolist().index(sample) for sample in (2, 5)}
    assert different == sorted(at.values())
    assert {2, 5}.isdisjoint(damaged.targets.tolist())
    assert damaged.targets.tolist() == damaged.inputs[:, 0].long().tolist(), "the target is the replacement's"
    for sample, position in at.items():
        assert BadSample(sample, position, "OSError: truncated image") in damaged.bad
    assert {(bad.index, bad.position) for bad in damaged.bad} <= {(s, p) for s in at for p in at.values()}


def test_another_position_draws_another_replacement() -> None:
    """Otherwise one good sample would replace all bad ones of a run."""
    epoch = batch_at(Damaged(1000, range(500)), batch=1000)
    replaced = epoch.targets[sorted({bad.position for bad in epoch.bad})]
    assert len(replaced) == 500
    assert replaced.min() >= 500
    assert len(replaced.unique()) > 250  # of 500 draws out of 500, 316 are expected


def test_a_replacement_comes_from_the_same_epoch_of_the_jobs_order() -> None:
    """The samples that the order leaves out may be the evaluation's."""

    def fold(epoch: int) -> range:
        return range(10 * epoch, 10 * epoch + 10)

    dataset = Damaged(1000, {3, 8, 11, 12, 19})
    loader = Loader(dataset, global_batch_size=10, seed=3, share=Share(0, 1), max_bad_samples=100, order=fold)
    for epoch in range(2):
        batch = loader.at(epoch)
        assert batch.bad
        assert set(batch.targets.tolist()) <= {*fold(epoch)} - {*dataset.bad}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files")], ids=repr)
def test_a_machine_out_of_memory_or_files_is_no_bad_sample(error: Exception) -> None:
    with pytest.raises(JobFailedError, match=r"^sample 5 .*cannot be loaded"):
        batch_at(Damaged(9, {5}, error))


def test_storage_that_is_away_ends_the_run_instead_of_being_tried_for_ever() -> None:
    with pytest.raises(JobFailedError, match=rf"nor any of {TRIES - 1} drawn in its place.*whether the storage"):
        batch_at(Damaged(9, range(9)))


def test_an_evaluation_never_skips() -> None:
    with pytest.raises(JobFailedError, match="sample 5"):
        list(eval_batches(Damaged(9, {5}), Share(0, 1), 3))


@pytest.mark.parametrize(("policy", "most"), [("fail", None), ("skip", 7)])
def test_the_config_says_what_becomes_of_bad_samples(policy: str, most: int | None) -> None:
    config = DataConfig(global_batch_size=9, bad_samples=policy, max_bad_samples=7)
    loader = build_loader(Damaged(9, {5}), config, Share(0, 1), seed=3)
    assert loader.max_bad_samples == most
    if most is None:
        with pytest.raises(JobFailedError):
            loader.at(0)
    else:
        assert len(loader.at(0) or ()) == 9
