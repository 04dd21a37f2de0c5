"""The contract of every tracker, and a run to send. For the fake here, and for the real ones in tests/soak."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import TrackerError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState
from toolkit.metrics.lines import MetricsLine
from toolkit.metrics.sinks import JsonlSink
from toolkit.plugins.trackers import RunIdentity, Tracker
from toolkit.plugins.trackers.upload import RunSync, identity

Points = Mapping[tuple[int, str], float]


class FakeTracker:
    """A tracker in memory. ``server`` outlives it, as a server outlives the process that sends."""

    place = "a fake at nowhere"
    lines_at_once = 7

    def __init__(self, server: dict[str, dict[tuple[int, str], float]], only_appends: bool = False) -> None:
        self.server, self.only_appends = server, only_appends
        self.ends_after: float = math.inf  #: the number of values taken before it fails
        self.states: list[RunState | None] = []
        self._id = ""

    def open(self, remote: str | None) -> tuple[str, bool]:
        self._refuse_if_away()
        self._id = remote if remote in self.server else max(self.server, default="")
        if self._id:
            return self._id, True
        return self.clear(), False

    def tag(self, tag: str) -> str:
        return tag.replace("%", "_")

    def received(self, since: int) -> Points | int:
        copy = self.server[self._id]
        if self.only_appends:
            return max((step for step, _ in copy), default=-1)
        return {key: value for key, value in copy.items() if key[0] >= since}

    def send(self, lines: Sequence[MetricsLine]) -> None:
        copy = self.server[self._id]
        for line in lines:
            if self.only_appends:
                assert line.step > max((step for step, _ in copy), default=-1)
            for tag, value in line.values.items():
                if self.ends_after <= 0 and not self.only_appends:
                    raise TrackerError("away")
                assert (line.step, self.tag(tag)) not in copy, "a point was sent twice"
                copy[line.step, self.tag(tag)] = value
                self.ends_after -= 1
            if self.ends_after <= 0:
                raise TrackerError("away")

    def clear(self) -> str:
        self.server.pop(self._id, None)
        self._id = f"copy {len(self._id) + 1}"
        self.server[self._id] = {}
        return self._id

    def close(self, state: RunState | None) -> None:
        self.states.append(state)

    def _refuse_if_away(self) -> None:
        if self.ends_after <= 0:
            raise TrackerError("away")


class Story:
    """A run whose files are written as its ranks and its supervisor write them.

    It has steps, checkpoints, kills and an end.
    """

    def __init__(self, name: str = "digits") -> None:
        self.run = rundir.create(name)
        fsio.write_atomic(self.run.config, configs.dump_config(JobConfig(name="digits")))
        self.time = 1.8e9
        self.sink: JsonlSink | None = None

    @property
    def path(self) -> Path:
        return self.run.tensorboard / "metrics.jsonl"

    def _clock(self) -> float:
        self.time += 0.25
        return self.time

    def start(self, resumed_step: int | None = None) -> None:
        self.sink = JsonlSink(self.path, resumed_step, self._clock)

    def steps(self, first: int, last: int, salt: float = 0.0) -> None:
        """Log these steps. Another ``salt`` gives other values."""
        for step in range(first, last + 1):
            value = math.nan if step % 11 == 0 else math.sin(step + salt)
            self.sink.scalars(step, {"train/loss": value, "train/a b%": 1e-17 * step + salt})
            if step % 5 == 0:
                self.sink.scalars(step, {"eval/accuracy": step / 1000})

    def checkpoint(self, step: int) -> None:
        folder = fsio.make_dir(self.run.checkpoints / f"step-{step:08d}")
        (folder / "manifest.json").write_text("{}")

    def end(self, state: str = "completed") -> None:
        self.run.write_result(RunResult.from_json({"state": state}))

    def points(self, name: Callable[[str], str]) -> Points:
        """Return the points in the file, read without the toolkit."""
        found: dict[tuple[int, str], float] = {}
        for text in self.path.read_text().splitlines():
            line = json.loads(text)
            step = line.pop("step")
            del line["wall_time"]
            found |= {(step, name(tag)): math.nan if value is None else value for tag, value in line.items()}
        return found


def same(one: Points, two: Points) -> bool:
    """True if both have the same points and values, bit for bit. NaN equals NaN."""
    return {key: repr(value) for key, value in one.items()} == {key: repr(value) for key, value in two.items()}


def check_contract(build: Callable[[RunIdentity], Tracker], read: Callable[[str], Points]) -> None:
    """Check that a copy equals the file, after all that can happen to a run.

    That is kills, resumes, a lost record, an older checkpoint, and the end.

    ``read`` returns the values of the copy with this id, without the tracker.
    """
    story = Story()
    run, place = story.run, identity(story.run, "project-of-the-contract")

    def sent(everything: bool = False) -> tuple[Tracker, int]:
        tracker = build(place)
        return tracker, RunSync(run, "fake", tracker).send(everything).points_sent

    def copy() -> Points:
        [path] = run.trackers.glob("*.json")
        return read(json.loads(path.read_text())["remote"])

    story.start()
    story.steps(1, 47)
    story.checkpoint(20)
    tracker, count = sent()
    assert count == 19 * 2 + 3, "only what a resume from step 20 would not make again"
    assert {step for step, _ in copy()} == set(range(1, 20))
    # Five kills: the steps after the checkpoint are repeated, with other values.
    for kill in range(1, 6):
        story.start(resumed_step=20 * kill)
        story.steps(20 * kill + 1, 20 * kill + 39, salt=kill)
        story.checkpoint(20 * kill + 20)
        sent()
    final = {key: value for key, value in story.points(tracker.tag).items() if key[0] < 120}
    assert same(copy(), final)
    assert sent()[1] == 0, "nothing is sent twice"
    # The record is lost: what is there is found, and nothing is doubled.
    for path in run.trackers.glob("*.json"):
        path.unlink()
    sent()
    assert same(copy(), final)
    # The two newest checkpoints cannot be read, so steps that were sent are repeated.
    story.start(resumed_step=80)
    story.steps(81, 130, salt=9)
    sent()
    assert same(copy(), {key: value for key, value in story.points(tracker.tag).items() if key[0] < 120})
    # It fails at a step after its checkpoint, is sent whole all the same, and resumed.
    story.end("failed")
    sent(everything=True)
    assert same(copy(), story.points(tracker.tag))
    (run.path / "result.json").unlink()
    story.start(resumed_step=120)
    story.steps(121, 140, salt=10)
    story.end()
    sent()
    assert same(copy(), story.points(tracker.tag))
