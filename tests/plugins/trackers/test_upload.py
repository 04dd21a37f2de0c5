"""`toolkit upload` sends each point once, whatever is killed when."""

import contextlib
import csv
import fcntl
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command import Command
from tests.plugins.trackers.contract import FakeTracker, Story, check_contract, same
from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, RequestError, TrackerError
from toolkit.cli import main as cli
from toolkit.files.run_files import RunState
from toolkit.plugins import trackers
from toolkit.plugins.trackers import upload as commands
from toolkit.plugins.trackers.upload import RunSync, SyncRecord, identity
from toolkit.plugins.trackers.wandb import Wandb

Server = dict[str, dict[tuple[int, str], float]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> Server:
    """Return the server behind the command's tracker."""
    copies: Server = {}
    monkeypatch.setattr(commands, "build_tracker", lambda name, run: FakeTracker(copies))
    change_limits(upload_every_s=0.01)
    return copies


@pytest.fixture
def story() -> Story:
    story = Story()
    story.start()
    story.steps(1, 40)
    return story


def is_whole(server: Server, story: Story) -> bool:
    """True if there is one copy, with all points of the run."""
    [copy] = server.values()
    return same(copy, story.points(FakeTracker(server).tag))


@pytest.mark.parametrize("only_appends", [False, True])
def test_the_copy_equals_the_file_after_kills_and_resumes(only_appends: bool) -> None:
    server: Server = {}
    check_contract(lambda run: FakeTracker(server, only_appends), server.__getitem__)


@pytest.mark.parametrize("only_appends", [False, True])
@pytest.mark.parametrize("kill_after", range(1, 90, 4))
def test_a_send_that_is_cut_short_anywhere_neither_loses_nor_doubles(
    story: Story, kill_after: int, only_appends: bool
) -> None:
    """The fake refuses a point that it has. The one that only appends refuses steps that are not new."""
    story.end()
    server: Server = {}
    tracker = FakeTracker(server, only_appends)
    tracker.ends_after = kill_after
    try:
        RunSync(story.run, "fake", tracker).send()
    except TrackerError:
        RunSync(story.run, "fake", FakeTracker(server, only_appends)).send()
    assert [*server] == ["copy 1"], "it continues, and does not begin anew"
    assert same(server["copy 1"], story.points(tracker.tag))


def test_before_the_first_checkpoint_nothing_is_sent_and_at_the_end_all(story: Story) -> None:
    server: Server = {}
    outcome = RunSync(story.run, "fake", FakeTracker(server)).send()
    assert (outcome.points_sent, outcome.held_back) == (0, 40)
    story.end()
    tracker = FakeTracker(server)
    assert RunSync(story.run, "fake", tracker).send().held_back == 0
    assert tracker.states == [RunState.COMPLETED]


def test_what_a_failed_run_made_after_its_checkpoint_waits_or_is_asked_for(
    story: Story, server: Server, command: Command
) -> None:
    story.checkpoint(30)
    story.end("failed")
    out = command("upload", story.run.id, "mlflow")
    assert out.splitlines()[1:] == [
        "  66 points sent, 66 there up to step 30",
        "  10 steps are held back: a resume would repeat them (--all sends them)",
    ]
    assert max(map(len, out.splitlines()[1:])) <= 80
    printed = command("upload", story.run.id, "mlflow", "--all")
    assert printed.splitlines()[1:] == ["  22 points sent, 88 there up to step 40"]


def test_a_record_that_cannot_be_read_is_named_and_nothing_is_doubled(
    story: Story, caplog: pytest.LogCaptureFixture
) -> None:
    server: Server = {}
    story.checkpoint(30)
    RunSync(story.run, "fake", FakeTracker(server)).send()
    [path] = story.run.trackers.glob("*.json")
    path.write_bytes(b"\x00\x00")
    story.end()
    RunSync(story.run, "fake", FakeTracker(server)).send()
    assert is_whole(server, story)
    assert f"{path} cannot be read: it holds NUL bytes only; it is not used" in caplog.text


def test_a_copy_that_was_removed_from_the_tracker_is_made_again(story: Story) -> None:
    server: Server = {}
    story.end()
    RunSync(story.run, "fake", FakeTracker(server)).send()
    server.clear()
    RunSync(story.run, "fake", FakeTracker(server)).send()
    assert is_whole(server, story)


def test_damaged_lines_of_the_metrics_are_left_out(story: Story) -> None:
    whole = story.path.read_bytes().splitlines(keepends=True)
    whole[4] = b'{"step": 5, "train\n'
    story.path.write_bytes(b"".join(whole) + b'{"step": 41, "wall')
    story.end()
    server: Server = {}
    RunSync(story.run, "fake", FakeTracker(server)).send()
    [copy] = server.values()
    assert {step for step, _ in copy} == {*range(1, 41)} - {5}


def test_a_run_without_metrics_is_sent_as_it_is(server: Server, command: Command) -> None:
    story = Story()
    assert "0 points sent, 0 there" in command("upload", story.run.id, "mlflow")


def test_a_tracker_that_is_away_is_named_and_the_next_call_goes_on(
    story: Story, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story.end()

    def away(name: str, run: Any) -> FakeTracker:
        with trackers.translate_errors("mlflow at http://here"):
            # as of a library that puts the password of the address into its error
            raise ConnectionRefusedError(111, "no one at http://user:hidden@here")
        raise AssertionError

    monkeypatch.setattr(commands, "build_tracker", away)
    assert cli.main(["upload", story.run.id, "mlflow"]) == EXIT_FAILED
    err = capsys.readouterr().err
    assert "mlflow at http://here did not accept the metrics (ConnectionRefusedError" in err
    assert "the same command continues where it stopped" in err
    assert "hidden" not in err
    monkeypatch.setattr(commands, "build_tracker", lambda name, run: FakeTracker(server))
    assert cli.main(["upload", story.run.id, "mlflow"]) == EXIT_DONE
    assert is_whole(server, story)


def test_a_damaged_run_is_named_and_the_others_are_sent(story: Story, server: Server, command: Command) -> None:
    story.end()
    damaged = Story().run
    (damaged.path / "result.json").write_text("[]")
    printed = command.ends(EXIT_FAILED, "upload", damaged.id, story.run.id, "mlflow", "--follow")
    assert f"{damaged.name}/{damaged.id}: {damaged.path}/result.json cannot be read" in printed.err
    assert is_whole(server, story)


def test_two_at_a_time_are_refused(story: Story) -> None:
    fsio.make_dir(story.run.trackers)
    sync = RunSync(story.run, "fake", FakeTracker({}))
    lock = sync._path.with_suffix(".lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="another `toolkit upload` sends run"):
            sync.send()


@pytest.mark.parametrize("follows", [False, True])
def test_a_run_that_another_call_sends_keeps_no_other_from_being_sent(
    story: Story, command: Command, change_limits: ChangeLimits, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """With --follow it is tried again: before, a call of the user's ended the one that the run itself had started."""
    change_limits(upload_every_s=0.2)
    servers: dict[str, Server] = {}
    monkeypatch.setattr(commands, "build_tracker", lambda name, run: FakeTracker(servers.setdefault(str(run), {})))
    held = Story()
    held.start()
    held.steps(1, 40)
    for each in (story, held):
        each.end()
    fsio.make_dir(held.run.trackers)
    sync = RunSync(held.run, "mlflow", FakeTracker({}))
    with sync._path.with_suffix(".lock").open("w") as file, contextlib.ExitStack() as at_end:
        fcntl.flock(file, fcntl.LOCK_EX)
        if follows:
            release = threading.Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN))
            at_end.callback(release.join)
            release.start()
        words = ["upload", held.run.id, story.run.id, "mlflow", *["--follow"] * follows]
        printed = command.ends(EXIT_DONE if follows else EXIT_FAILED, *words)
    assert f"{held.run.name}/{held.run.id}: another `toolkit upload` sends run {held.run.id}" in printed.err
    copies = [server["copy 1"] for server in servers.values() if server]
    assert len(copies) == 1 + follows
    assert all(same(copy, story.points(FakeTracker({}).tag)) for copy in copies)


def test_a_tracker_that_is_not_installed_says_how_to_install_it(
    story: Story, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for name in ("mlflow", "wandb"):
        assert f"pip install {name}" in command.refuses("upload", story.run.id, name)
    assert not list(story.run.trackers.glob("*"))


def test_the_record_is_private_and_holds_no_password(story: Story) -> None:
    assert trackers.without_password("https://me:secret@host:5000/x") == "https://host:5000/x"
    story.end()
    RunSync(story.run, "fake", FakeTracker({})).send()
    for path in story.run.trackers.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    assert story.run.trackers.stat().st_mode & 0o077 == 0


class WandbInMemory:
    """The part of the library wandb that is used. Its server refuses the id of a deleted run."""

    class errors:
        class CommError(Exception): ...

    def __init__(self) -> None:
        self.histories: dict[str, list[int]] = {}
        self.deleted: set[str] = set()
        self.names: dict[str, str] = {}

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode="online", base_url="https://wandb.test"))

    def Api(self, timeout: float) -> Any:
        return SimpleNamespace(flush=lambda: None, run=self._look, runs=self._search)

    def Settings(self, **_: Any) -> None: ...

    def _search(self, project: str, filters: dict[str, str], order: str) -> Any:
        """Yield the runs with this name, the newest first. The library asks only when it is iterated."""
        if not self.names:
            raise ValueError(f"Could not find project {project}")
        assert order == "-created_at"
        for id in reversed(self.histories):
            if self.names[id] == filters["display_name"]:
                yield SimpleNamespace(id=id)

    def init(self, id: str, name: str, **_: Any) -> Any:
        if id in self.deleted:
            raise self.errors.CommError(f"run {id} was previously created and deleted")
        self.names[id] = name
        steps = self.histories.setdefault(id, [])
        return SimpleNamespace(log=lambda _, step: steps.append(step), finish=lambda: None)

    def delete(self, id: str) -> None:
        del self.histories[id]
        self.deleted.add(id)

    def _look(self, path: str) -> Any:
        id = path.rpartition("/")[2]
        if id not in self.histories:
            raise ValueError(f"Could not find run <Run {path}>")
        return SimpleNamespace(lastHistoryStep=max(self.histories[id], default=-1), delete=lambda: self.delete(id))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> WandbInMemory:
    library = WandbInMemory()
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


def send_to_wandb(story: Story) -> int:
    return RunSync(story.run, "wandb", Wandb(identity(story.run, None))).send().points_sent


def lose_record(story: Story) -> None:
    for path in story.run.trackers.glob("*.json"):
        path.unlink()


def test_a_copy_that_was_deleted_in_wandb_is_made_again_under_another_id(story: Story, library: WandbInMemory) -> None:
    story.end()
    send_to_wandb(story)
    first = library.histories[story.run.id]
    assert first
    for _ in range(2):  # the id of the second copy is taken no more either
        library.delete(next(iter(library.histories)))
        send_to_wandb(story)
        (copy,) = library.histories
        assert copy not in library.deleted
        assert library.histories[copy] == first
    send_to_wandb(story)
    assert library.histories == {copy: first}, "a copy that is there is kept"
    # The record of its id is lost: it is found by its name and, as wandb does not tell what it has, made anew.
    lose_record(story)
    send_to_wandb(story)
    assert [*library.histories.values()] == [first], "there is one, and it is whole"
    assert copy in library.deleted


def test_a_deleted_copy_whose_record_is_lost_is_named_and_then_made_again(story: Story, library: WandbInMemory) -> None:
    story.end()
    count = send_to_wandb(story)
    first = library.histories[story.run.id]
    library.delete(story.run.id)
    lose_record(story)
    # without a record the first send tries the run's own id, which wandb refuses
    with pytest.raises(TrackerError, match="previously created and deleted"):
        send_to_wandb(story)
    assert send_to_wandb(story) == count
    assert [*library.histories.values()] == [first]


def test_csv_has_a_row_for_each_step_and_a_column_for_each_metric(story: Story, command: Command) -> None:
    rows = list(csv.DictReader(command("upload", story.run.id, "csv").splitlines()))
    points = {
        (int(row["step"]), tag): float(value)
        for row in rows
        for tag, value in row.items()
        if tag not in ("run", "step", "wall_time") and value
    }
    assert same(points, story.points(str))
    assert [float(row["wall_time"]) for row in rows] == [
        json.loads(line)["wall_time"] for line in story.path.read_text().splitlines()
    ]


def test_csv_replaces_its_own_file_only(story: Story, command: Command) -> None:
    for _ in range(2):
        command("upload", story.run.id, "csv", "--to", "out.csv")
    assert len(Path("out.csv").read_text().splitlines()) == 41
    Path("mine.csv").write_text("a,b\n")
    assert "mine.csv already exists" in command.refuses("upload", story.run.id, "csv", "--to", "mine.csv")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["csv", "--follow"], "--follow needs --to"),
        (["csv", "--project", "p"], "leave out --project"),
        (["mlflow", "--to", "x"], "--to is for csv"),
    ],
)
def test_options_that_do_not_fit_are_refused(story: Story, options: list[str], text: str, command: Command) -> None:
    assert re.search(text, command.refuses("upload", story.run.id, *options))


SYNC: dict[str, Any] = {
    "version": 1,
    "tracker": "mlflow",
    "place": "mlflow at sqlite:///mlflow.db, experiment name",
    "remote": "0123abcd",
    "end": 4000,
    "sending": 5000,
    "tail": "00ff",
    "sending_tail": "11ee",
    "step": 40,
    "points": 80,
}


def test_each_key_of_a_record_of_what_a_tracker_has_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.json"
    fsio.write_json(path, SYNC)
    assert SyncRecord.read(path).to_json() == SYNC, "or a key has no example here"
