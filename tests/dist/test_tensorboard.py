"""A run that was killed five times, as each reader of TensorBoard shows it."""

import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard import context
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.data import server_ingester
from tensorboard.data.provider import RunTagFilter
from tensorboard.util import grpc_util
from tensorboard.util.tensor_util import make_ndarray

from tests.dist.ranks import run_ranks
from tests.dist.test_trainer import BATCH, CONFIG, train
from tests.waiting import wait_for
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig
from toolkit.data.loader import Loader
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.metrics import sinks
from toolkit.metrics.goodput import PARTS
from toolkit.ranks.session import Session

pytestmark = pytest.mark.dist

#: 30 steps; background saves would leave open which one a killed attempt has got done.
LONGER = replace(CONFIG, epochs=12, eval_every=5)
EVERY_4 = CheckpointConfig(4, background=False)
STEPS = 30
#: After which step each attempt is killed. The third one does not get to a checkpoint of its own, and not as far as the
#: second; the fourth one runs on a node whose clock is 30 s behind.
KILLS = (6, 11, 9, 18, 19)
BEHIND = {4: -30.0}
#: The attempt whose values count, by step: each one resumes from a multiple of 4.
MADE_BY = [1] * 4 + [2] * 4 + [4] * 8 + [6] * 14

Points = Mapping[str, list[tuple[int, float]]]


def attempt(session: Session, run_dir: Path, number: int, kill_after: int | None) -> None:
    """Make one attempt of the real trainer. All its ranks get a SIGKILL in mid-step."""
    plain_sink, plain_at = sinks.TensorBoardSink, Loader.at

    def with_clock(folder: Path, purge_step: int, **more: Any) -> sinks.TensorBoardSink:
        return plain_sink(folder, purge_step, lambda: time.time() + BEHIND.get(number, 0.0), **more)

    def at(self: Loader, step: int) -> Any:
        if step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain_at(self, step)

    sinks.TensorBoardSink = with_clock  # type: ignore[assignment, misc]
    Loader.at = at
    train(replace(session, attempt=number), run_dir, LONGER, checkpoint=EVERY_4)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run, with the lines that its supervisor would have written."""
    run = RunDir(tmp_path_factory.mktemp("killed"))
    assert LONGER.epochs * 50 // BATCH == STEPS
    for number, kill in enumerate(KILLS, 1):
        first = newest_step(run.checkpoints) or 0
        # All ranks kill themselves, so none can return a result.
        with pytest.raises(AssertionError, match="ended without an answer"):
            run_ranks(2, attempt, run.path, number, kill)
        times = {"started": "2026-11-20T15:00:00.000+00:00", "ended": "2026-11-20T15:01:00.000+00:00"}
        end = {
            "cause": "crashed",
            "decision": "restart",
            "line": f"rank {number}: killed by SIGKILL",
            "nodes": "here",
        }
        run.add_attempt(
            AttemptRecord.from_json({"attempt": number, "step_start": first, "step_end": kill, **times, **end})
        )
    run_ranks(2, attempt, run.path, len(KILLS) + 1, None)
    return run


def for_scripts(folder: Path) -> Points:
    """TensorBoard's documented API for reading event files."""
    read = EventAccumulator(str(folder), STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def python_server(folder: Path) -> Points:
    """What it serves from with `--load_fast=false`."""
    server = EventMultiplexer(tensor_size_guidance={"scalars": 0}).AddRun(str(folder), "run").Reload()
    tags = server.PluginRunToTagToContent("scalars")["run"]
    events = {tag: server.Tensors("run", tag) for tag in tags}
    return {tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in found] for tag, found in events.items()}


@contextmanager
def data_server(folder: Path) -> Iterator[Any]:
    """What it serves from else: a program of its own, in Rust."""
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    server = server_ingester.SubprocessServerDataIngester(
        server_binary=server_ingester.get_server_binary(),
        logdir=str(folder),
        reload_interval=1,
        channel_creds_type=grpc_util.ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": 0},
    )
    server.start()
    try:
        yield server.data_provider
    finally:
        server._stdin_handle.close()  # which ends it


def served(provider: Any) -> Points:
    where = {"experiment_id": "", "plugin_name": "scalars", "run_tag_filter": RunTagFilter()}
    runs = provider.read_scalars(context.RequestContext(), downsample=10_000, **where)
    assert len(runs) <= 1, "one run, not a second one beside it"
    return {tag: [(p.step, p.value) for p in points] for run in runs.values() for tag, points in run.items()}


def check(points: Points) -> None:
    """Every tag has each of its steps once and in order."""
    every_step, evaluated = list(range(1, STEPS + 1)), list(range(5, STEPS + 1, 5))
    own = {"train/loss", "train/lr", "run/attempt", *(f"goodput/{part}" for part in PARTS)}
    assert own < points.keys()
    for tag, found in points.items():
        assert [step for step, _ in found] == (evaluated if tag.startswith("eval/") else every_step), tag
    assert [value for _, value in points["run/attempt"]] == MADE_BY


def test_readers_for_scripts_and_the_python_server_see_each_step_of_each_tag_once(killed: RunDir) -> None:
    assert len(list(killed.tensorboard.glob("events*"))) == len(KILLS) + 1
    found = for_scripts(killed.tensorboard)
    check(found)
    assert python_server(killed.tensorboard) == found


def test_the_data_server_sees_each_step_of_each_tag_once(killed: RunDir) -> None:
    with data_server(killed.tensorboard) as provider:
        wait_for(lambda: (STEPS, 6.0) in served(provider).get("run/attempt", []), 20, "all files to be read")
        found = served(provider)
    check(found)
    assert found == for_scripts(killed.tensorboard)


def test_the_curve_is_that_of_a_run_that_nobody_killed(killed: RunDir, tmp_path: Path) -> None:
    run_ranks(2, attempt, tmp_path, 1, None)
    undisturbed, found = for_scripts(tmp_path / "tensorboard"), for_scripts(killed.tensorboard)
    for tag in ("train/loss", "train/lr", "eval/loss", "eval/accuracy"):
        assert found[tag] == undisturbed[tag]


def test_at_the_first_step_of_each_attempt_that_counts_a_table_tells_of_the_restarts(killed: RunDir) -> None:
    """By both servers. (The API for scripts purges no texts, whoever wrote them.)"""
    tag, first_steps = "run/restarts/text_summary", [5, 9, 17]
    server = EventMultiplexer().AddRun(str(killed.tensorboard), "run").Reload()
    tables = server.Tensors("run", tag)
    assert [event.step for event in tables] == first_steps
    rows = [row.split(" | ") for row in tables[-1].tensor_proto.string_val[0].decode().splitlines()[2:]]
    assert [row[:2] for row in rows] == [["| 2", "4"], ["| 3", "8"], ["| 4", "8"], ["| 5", "16"], ["| 6", "16"]]
    assert [row[3] for row in rows] == [f"crashed: rank {number}: killed by SIGKILL" for number in range(1, 6)]
    assert [row[4] for row in rows] == ["2 |", "3 |", "1 |", "2 |", "3 |"]
    with data_server(killed.tensorboard) as provider:
        wait_for(lambda: texts(provider, tag)[-1:] == first_steps[-1:], 20, "all files to be read")
        assert texts(provider, tag) == first_steps


def texts(provider: Any, tag: str) -> list[int]:
    """The steps that have one."""
    where = {"experiment_id": "", "plugin_name": "text", "run_tag_filter": RunTagFilter(tags=[tag])}
    runs = provider.read_tensors(context.RequestContext(), downsample=100, **where)
    return [point.step for tags in runs.values() for point in tags[tag]]
