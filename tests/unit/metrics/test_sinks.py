"""Sinks as TensorBoard's own EventAccumulator and the JSON reader see them, over kills and resumes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServerAccumulator
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from tests.process_limits import ChangeLimits
from tests.unit.disks import SmallDisk
from toolkit.metrics.sinks import FanOut, JsonlSink, Sink, TensorBoardSink, build_sinks

NOW = 1_700_000_000.0


class Clock:
    """A wall clock that is wrong by `ahead_s`."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.now = NOW + ahead_s

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def seen_by_tensorboard(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the step and value of each point, as TensorBoard reads them.

    Its API for scripts and its server's own reader must agree.
    """
    found = [(event.step, event.value) for event in seen_by_tensorboard(folder).Scalars(tag)]
    server = ServerAccumulator(str(folder), size_guidance={"tensors": 0}, tensor_size_guidance={"scalars": 0}).Reload()
    assert [(event.step, float(make_ndarray(event.tensor_proto))) for event in server.Tensors(tag)] == found
    return found


def log_steps(sink: Sink, first: int, last: int, value: float) -> None:
    for step in range(first, last + 1):
        sink.scalars(step, {"train/loss": value, "train/lr": 0.5})


@pytest.mark.parametrize("ahead_s", [0.0, 30.0, -30.0])
def test_each_step_has_one_value_after_a_resume_whatever_the_clocks_say(tmp_path: Path, ahead_s: float) -> None:
    killed = TensorBoardSink(tmp_path, 0, Clock(ahead_s))
    log_steps(killed, 1, 60, 1.0)  # checkpoint at step 20, killed at 60
    resumed = TensorBoardSink(tmp_path, 21, Clock())
    log_steps(resumed, 21, 80, 2.0)
    resumed.close()
    expected = [(step, 1.0 if step <= 20 else 2.0) for step in range(1, 81)]
    assert points(tmp_path, "train/loss") == expected
    assert points(tmp_path, "train/lr") == [(step, 0.5) for step, _ in expected]


def test_three_attempts_on_nodes_whose_clocks_run_further_and_further_behind(tmp_path: Path) -> None:
    for attempt, (resumed_step, last) in enumerate([(0, 30), (10, 40), (20, 50)]):
        sink = TensorBoardSink(tmp_path, resumed_step + 1, Clock(-30.0 * attempt))
        log_steps(sink, resumed_step + 1, last, float(attempt))
    assert points(tmp_path, "train/loss") == [(s, float(s > 10) + float(s > 20)) for s in range(1, 51)]
    times = [event.wall_time for event in seen_by_tensorboard(tmp_path).Scalars("train/loss")]
    assert times == sorted(times)
    assert len(list(tmp_path.glob("events*"))) == 3


def test_without_the_purge_the_oracle_does_see_duplicates(tmp_path: Path) -> None:
    for first, last in ((1, 30), (21, 40)):
        with SummaryWriter(tmp_path) as writer:
            for step in range(first, last + 1):
                writer.add_scalar("train/loss", 1.0, step)
    assert len(points(tmp_path, "train/loss")) == 50


def test_a_new_start_without_a_checkpoint_drops_everything_before_it(tmp_path: Path) -> None:
    log_steps(build_sinks(tmp_path, True, None), 0, 30, 1.0)
    sink = build_sinks(tmp_path, True, None)
    log_steps(sink, 0, 10, 2.0)
    sink.close()
    assert points(tmp_path / "tensorboard", "train/loss") == [(step, 2.0) for step in range(11)]
    assert [line["train/loss"] for line in lines(tmp_path / "tensorboard" / "metrics.jsonl")] == [2.0] * 11


def test_hparams_text_and_images_are_in_the_one_run_and_not_repeated_on_resume(tmp_path: Path) -> None:
    for purge_step in (0, 21):
        sink = TensorBoardSink(tmp_path, purge_step, Clock())
        sink.hparams({"optim.lr": 0.1, "model.name": "mlp", "train.compile": False}, ["eval/accuracy"])
        sink.text("config", "name: *digits*\nseed: 0")
        sink.images("samples", torch.rand(10, 1, 8, 8))
        sink.scalars(purge_step, {"eval/accuracy": 0.9})
        sink.completed(30)
        sink.close()
    accumulator = seen_by_tensorboard(tmp_path)
    contents = accumulator.PluginTagToContent("hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    assert start.session_start_info.hparams["optim.lr"].number_value == pytest.approx(0.1)
    assert start.session_start_info.hparams["model.name"].string_value == "mlp"
    end = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_end_info"])
    assert api_pb2.Status.Name(end.session_end_info.status) == "STATUS_SUCCESS"
    experiment = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/experiment"])
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == ["eval/accuracy"]
    text = accumulator.Tensors("config/text_summary")
    assert [event.step for event in text] == [0]
    assert text[0].tensor_proto.string_val[0] == b"    name: *digits*\n    seed: 0\n"
    images = accumulator.Images("samples")
    assert [(event.step, event.encoded_image_string[1:4]) for event in images] == [(0, b"PNG")]
    assert [path for path in tmp_path.rglob("*") if path.is_dir()] == []  # no second run


def test_flushed_events_are_readable_while_the_sink_is_open(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, 0, Clock())
    log_steps(sink, 1, 3, 1.0)
    sink.flush()
    assert len(points(tmp_path, "train/loss")) == 3


loads = json.loads


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_one_line_per_step_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    killed = JsonlSink(path, None, Clock())
    log_steps(killed, 1, 60, 1.0)
    with path.open("a") as file:
        file.write('{"step": 61, "train/lo')  # cut off by the kill
    resumed = JsonlSink(path, 20, Clock())
    log_steps(resumed, 21, 80, 2.0)
    resumed.close()
    assert [(line["step"], line["train/loss"]) for line in lines(path)] == [(s, 1.0 + (s > 20)) for s in range(1, 81)]
    assert NOW < lines(path)[0]["wall_time"] < NOW + 60


def test_a_resume_reads_the_end_of_a_long_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """To read a million lines and write them again took 50 s and 4.5 GB."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 10_001)) + '{"step": 10001, "tr')
    parsed = list[bytes]()
    change_limits(metrics_read_whole_bytes=0)
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    before = path.stat().st_ino
    sink = JsonlSink(path, 9_990, Clock())
    sink.scalars(9_991, {"train/loss": 1.0})
    sink.close()
    assert len(parsed) < 20
    assert path.stat().st_ino == before
    assert [loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 9_992))


@pytest.mark.parametrize("whole", [True, False])
def test_a_line_whose_break_alone_is_missing_is_kept(tmp_path: Path, change_limits: ChangeLimits, whole: bool) -> None:
    change_limits(metrics_read_whole_bytes=1000 if whole else 0)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonlSink(path, 2, Clock()).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("rest", ['{"step": 2' + "\0" * 40, "null"])
def test_an_end_that_no_kill_leaves_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + rest)
    JsonlSink(path, 2, Clock()).close()
    assert path.read_text() == '{"step": 1}\n'
    assert f"{path} has lines that cannot be read" in caplog.text


def test_an_evaluation_at_a_logged_step_joins_its_line_also_across_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, None, Clock())
    sink.scalars(1, {"train/loss": 3.0})
    sink.scalars(2, {"train/loss": 2.0})
    sink.flush()
    sink.scalars(2, {"eval/loss": 1.0})
    sink.close()
    # the line of the resumed step itself is still open for more values
    sink = JsonlSink(path, 2, Clock())
    sink.scalars(2, {"eval/accuracy": 0.5})
    sink.scalars(3, {"train/loss": float("nan")})
    sink.close()
    found = [{k: v for k, v in line.items() if k != "wall_time"} for line in lines(path)]
    assert found == [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 2.0, "eval/loss": 1.0, "eval/accuracy": 0.5},
        {"step": 3, "train/loss": None},
    ]


def test_files_are_0600_and_the_folder_0700(tmp_path: Path) -> None:
    sink = build_sinks(tmp_path, True, None)
    assert isinstance(sink, FanOut)
    sink.close()
    folder = tmp_path / "tensorboard"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_other_ranks_write_nothing_and_do_not_pay_for_tensorboard(tmp_path: Path) -> None:
    assert type(build_sinks(tmp_path, False, 3)) is Sink
    code = (
        "import sys, pathlib; from toolkit.metrics.sinks import build_sinks;"
        f"build_sinks(pathlib.Path({str(tmp_path)!r}), False, None).scalars(1, {{'a': 1.0}});"
        "print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", [0, 1, 40, 300])
def test_metrics_logged_while_the_disk_was_full_are_there_when_it_no_longer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """From step 3 on the disk takes ``room`` bytes. Some of these values are smaller than one record of either file."""
    disk = SmallDisk()
    monkeypatch.setattr(os, "pwrite", disk)
    sink = build_sinks(tmp_path, True, None)
    log_steps(sink, 1, 2, 1.0)
    disk.room = room
    log_steps(sink, 3, 5, 1.0)
    sink.flush()
    folder = tmp_path / "tensorboard"
    assert len(whole_lines(folder / "metrics.jsonl")) < 5
    disk.room = None
    log_steps(sink, 6, 6, 1.0)
    sink.close()
    assert points(folder, "train/loss") == [(step, 1.0) for step in range(1, 7)]
    assert points(folder, "train/lr") == [(step, 0.5) for step in range(1, 7)]
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_joins_a_line_that_a_full_disk_has_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk = tmp_path / "metrics.jsonl", SmallDisk()
    monkeypatch.setattr(os, "pwrite", disk)
    sink = JsonlSink(path, None, Clock())
    sink.scalars(1, {"train/loss": 3.0})
    disk.room = 10
    sink.scalars(2, {"train/loss": 2.0})
    assert len(path.read_bytes().split(b"\n")[-1]) == 10
    disk.room = None
    sink.scalars(2, {"eval/loss": 1.0})
    sink.close()
    assert [set(line) for line in lines(path)] == [
        {"step", "wall_time", "train/loss"},
        {"step", "wall_time", "train/loss", "eval/loss"},
    ]


def test_after_a_kill_on_a_full_disk_the_next_attempt_reads_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk()
    monkeypatch.setattr(os, "pwrite", disk)
    killed = build_sinks(tmp_path, True, None)
    log_steps(killed, 1, 4, 1.0)
    disk.room = 50
    log_steps(killed, 5, 9, 1.0)
    disk.room = None
    resumed = build_sinks(tmp_path, True, 3)  # the first one is never closed: its process is dead
    log_steps(resumed, 4, 6, 2.0)
    resumed.close()
    expected = [(step, 1.0 if step <= 3 else 2.0) for step in range(1, 7)]
    assert points(tmp_path / "tensorboard", "train/loss") == expected
    found = [(line["step"], line["train/loss"]) for line in lines(tmp_path / "tensorboard" / "metrics.jsonl")]
    assert found == expected


def test_an_evaluation_after_the_save_is_there_once_when_a_resume_makes_it_again(tmp_path: Path) -> None:
    for resumed_step in (None, 3):
        sink = build_sinks(tmp_path, True, resumed_step)
        if resumed_step is None:
            log_steps(sink, 1, 3, 1.0)
        sink.scalars(3, {"eval/accuracy": 0.5})
    sink.scalars(3, {"eval/loss": 2.0})
    sink.close()
    for tag, value in (("eval/accuracy", 0.5), ("eval/loss", 2.0)):
        assert points(tmp_path / "tensorboard", tag) == [(3, value)]


def test_a_resume_cuts_a_whole_file_without_writing_it_again(tmp_path: Path) -> None:
    """A disk that is almost full has no room for a second copy."""
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlSink(path, None, Clock()), 1, 9, 1.0)
    before = path.stat().st_ino
    JsonlSink(path, 5, Clock()).close()
    assert path.stat().st_ino == before
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


def whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def test_a_histogram_has_a_bin_per_whole_number_and_is_in_the_line_of_its_step(tmp_path: Path) -> None:
    sink = FanOut([TensorBoardSink(tmp_path / "events"), JsonlSink(tmp_path / "metrics.jsonl", None)])
    sink.histogram(10, "staleness/tickets", torch.tensor([2, 0, 2, 4]))
    sink.scalars(10, {"train/loss": 1.0})
    sink.close()
    (event,) = seen_by_tensorboard(tmp_path / "events").Histograms("staleness/tickets")
    counts = {
        limit: n for limit, n in zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True) if n
    }
    assert (event.step, counts) == (10, {0.5: 1, 2.5: 2, 4.5: 1})
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (line["staleness/tickets"], line["train/loss"]) == ({"0": 1, "2": 2, "4": 1}, 1.0)


@pytest.mark.parametrize(
    ("values", "bins", "largest"),
    [
        (torch.linspace(0, 1, 100), 30, 1.0),
        (torch.linspace(-8, -2, 100, dtype=torch.bfloat16, requires_grad=True), 30, -2.0),
        (torch.tensor([float("nan"), float("inf"), 2.0, 1.0]), 2, 2.0),
        (torch.tensor([3e7, 0.0]), 2, 3e7),
    ],
    ids=["probabilities", "negative logits", "not finite", "large"],
)
def test_a_histogram_takes_any_numbers(tmp_path: Path, values: torch.Tensor, bins: int, largest: float) -> None:
    sink = FanOut([TensorBoardSink(tmp_path / "events"), JsonlSink(tmp_path / "metrics.jsonl", None)])
    sink.histogram(1, "scores", values)
    sink.histogram(1, "none", values[:0])
    sink.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    (event,) = seen_by_tensorboard(tmp_path / "events").Histograms("scores")
    assert (len(line["scores"]), line["none"]) == (bins, {})
    assert sum(line["scores"].values()) == event.histogram_value.num == int(values.isfinite().sum())
    assert event.histogram_value.max == largest
