"""A rank's reports: what arrives, what a lost store means, and what the supervisor's side makes of them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore

from tests.waiting import wait_for
from toolkit import activity as activity_words
from toolkit import rundir
from toolkit.activity import Activity
from toolkit.dist import report, store_host
from toolkit.dist.report import RESULT_KEY, FileReporter, NullReporter, StoreReporter, rank_key
from toolkit.dist.stop import PREFIX, STOP, _Round, propose
from toolkit.dist.stop_store import StoreTransport, in_pieces
from toolkit.errors import EXIT_FAILED
from toolkit.rundir import RunDir

TIMEOUT_S = 20


class Store:
    """A store in memory, and a network that can be cut."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        if self.is_gone:
            raise DistNetworkError("Connection reset by peer")
        self.values[key] = value


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which a reporter has ended this process, which lives on."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(report, "HEARTBEAT_S", 0.01)
    return codes


def store_reporter(store: Any, rank: int, activity: Activity | None = None) -> StoreReporter:
    """With a double, which mypy would not take for a store."""
    return StoreReporter(store, rank, activity or Activity())


def test_the_newest_of_every_field_arrives_with_its_time_and_the_training_waits_for_nobody() -> None:
    store = Store()
    reporter, begun = store_reporter(store, 3), time.time()
    reporter.progress(step=1, loss=2.5)
    wait_for(lambda: "loss" in store.values.get(rank_key(3), ""), TIMEOUT_S, "the first report")
    reporter.progress(step=2)
    reporter.progress(step=3, phase="evaluate")
    reporter.close()
    told = json.loads(store.values[rank_key(3)])
    assert begun <= told.pop("time") <= time.time()
    assert {name: told[name] for name in ("step", "loss", "phase")} == {"step": 3, "loss": 2.5, "phase": "evaluate"}


def test_a_report_says_what_the_rank_does_and_two_of_a_rank_that_stands_still_differ() -> None:
    """By that the supervisor knows that somebody is there."""
    store, activity = Store(), Activity()
    reporter = store_reporter(store, 1, activity)
    activity.phase, activity.step = activity_words.WAITING_FOR_DATA, 7
    activity.move()
    first = wait_for(lambda: (v := store.values.get(rank_key(1), "")) * ("for data" in v), TIMEOUT_S, "a report")
    assert (told := json.loads(first)) | {"beat": 0} == {"doing": "waiting for data", "done": 7, "count": 1, "beat": 0}
    second = wait_for(lambda: (v := store.values[rank_key(1)]) * (v != first), TIMEOUT_S, "another one")
    assert json.loads(second) | {"beat": 0} == told | {"beat": 0}
    reporter.close()


def test_the_last_words_are_sent_also_by_a_rank_that_ends_before_the_first_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "HEARTBEAT_S", 600.0)
    store = Store()
    reporter = store_reporter(store, 0)
    reporter.progress(step=450)
    assert store.values == {}
    reporter.close()
    assert json.loads(store.values[rank_key(0)])["step"] == 450


def test_a_step_does_not_wait_for_a_store_that_does_not_answer() -> None:
    answers, asked = threading.Event(), threading.Event()

    class Slow(Store):
        def set(self, key: str, value: str) -> None:
            asked.set()
            answers.wait(TIMEOUT_S)
            super().set(key, value)

    store = Slow()
    reporter = store_reporter(store, 0)
    assert asked.wait(TIMEOUT_S)
    for step in range(1000):
        reporter.progress(step=step)
    assert store.values == {}
    answers.set()
    reporter.close()
    assert json.loads(store.values[rank_key(0)])["step"] == 999


def test_only_rank_0_tells_the_result_of_the_run() -> None:
    stores = [Store(), Store()]
    for rank, store in enumerate(stores):
        reporter = store_reporter(store, rank)
        reporter.finish({"step": 10, "metrics": {"eval/accuracy": 0.5}})
        reporter.close()
    assert json.loads(stores[0].values[RESULT_KEY]) == {"step": 10, "metrics": {"eval/accuracy": 0.5}}
    assert RESULT_KEY not in stores[1].values


def test_a_store_that_is_lost_while_the_reporter_closes_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    """Rank 0 has ended and the supervisor closed the store before the last rank says goodbye."""
    monkeypatch.setattr(report, "HEARTBEAT_S", 600.0)
    store = Store()
    reporter = store_reporter(store, 1)
    store.is_gone = True
    reporter.close()
    assert exits == []


def test_a_rank_whose_tcp_store_is_gone_ends_itself(exits: list[int]) -> None:
    """torch's own store and client: what it raises is what is understood."""
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    client = TCPStore("127.0.0.1", servers[0].port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    with closing(StoreReporter(client, 2, Activity())) as reporter:
        reporter.progress(step=1)
        wait_for(lambda: servers[0].check([rank_key(2)]), TIMEOUT_S, "a report")
        assert exits == []
        servers.clear()
        wait_for(lambda: exits, TIMEOUT_S, "the end of the rank")
        assert set(exits) == {EXIT_FAILED}


# torch is not needed for this and takes seconds to import.
RANK = """
import sys, threading, types
sys.modules["torch"], sys.modules["torch.distributed"] = types.ModuleType("torch"), types.ModuleType("d")
sys.modules["torch.distributed"].Store = object
from toolkit import logs
from toolkit.activity import Activity
from toolkit.dist import report

class Store:
    def set(self, key, value):
        raise RuntimeError("Connection reset by peer")

logs.setup("rank 1/2 node2")
report.StoreReporter(Store(), 1, Activity())
threading.Event().wait()  # stands for a collective that nobody will end
"""


def test_a_rank_that_hangs_in_a_collective_is_ended_as_well_when_its_supervisor_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == EXIT_FAILED
    (line,) = done.stderr.splitlines()
    assert "rank 1/2 node2 ERROR the supervisor's store is gone" in line


# ----------------------------------------------------------------------------------------------- without a supervisor


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("alone", tmp_path)


def test_an_unsupervised_run_has_a_status_while_it_goes_on_and_a_result_at_its_end(run: RunDir) -> None:
    run.write_result({"state": "failed"})
    reporter = FileReporter(run, {"supervised": False, "pid": 7})
    assert run.result() is None  # the last start's: whoever waits would take it for this one's
    reporter.progress(step=5, loss=float("nan"))
    status = wait_for(lambda: run.status() if run.status().get("progress") else None, TIMEOUT_S, "a status")
    assert (status["state"], status["pid"], status["progress"]["step"]) == ("running", 7, 5)
    assert status["progress"]["loss"] is None
    reporter.finish({"step": 9, "metrics": {"eval/accuracy": 1.0}})
    reporter.close()
    result = run.result() or {}
    assert result.pop("wall_s") >= 0
    assert result == {"state": "completed", "attempts": 1, "step": 9, "metrics": {"eval/accuracy": 1.0}}
    assert (run.status()["state"], run.status()["progress"]["step"]) == ("completed", 5)


def test_an_unsupervised_run_that_ends_without_a_result_has_failed(run: RunDir) -> None:
    reporter = FileReporter(run, {})
    reporter.progress(step=5)
    reporter.close()
    assert (run.status()["state"], run.status()["progress"]["step"]) == ("failed", 5)
    assert run.result() is None


def test_a_full_disk_costs_an_unsupervised_run_some_of_its_status_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, write = threading.Event(), RunDir.write_status

    def full(self: RunDir, status: dict[str, Any]) -> None:
        refused.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write_status", full)
    reporter = FileReporter(run, {})
    reporter.progress(step=5)
    assert refused.wait(TIMEOUT_S)
    monkeypatch.setattr(RunDir, "write_status", write)
    reporter.progress(step=6)
    wait_for(lambda: (run.status().get("progress") or {}).get("step") == 6, TIMEOUT_S, "the next status")
    monkeypatch.setattr(RunDir, "write_status", full)
    reporter.close()


def test_the_other_ranks_of_an_unsupervised_run_write_nothing(run: RunDir) -> None:
    before = sorted(run.path.rglob("*"))
    reporter = NullReporter()
    reporter.progress(step=1)
    reporter.finish({"step": 1})
    reporter.close()
    assert sorted(run.path.rglob("*")) == before


# ------------------------------------------------------------------------------------------------------ the store host


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, FileIO]]:
    """Read and write end, and a store host that looks often."""
    monkeypatch.setattr(store_host, "POLL_S", 0.01)
    monkeypatch.setattr(store_host, "OTHERS_EVERY_S", 0.01)
    reader, writer = os.pipe()
    with FileIO(reader, "r"), FileIO(writer, "w") as requests:
        yield reader, requests


ASK = [{"propose": "stop", "by": f"user {i}"} for i in range(3)]
LINES = [json.dumps(wanted).encode() + b"\n" for wanted in ASK]


def test_several_requests_in_one_chunk_are_all_heard(pipe: tuple[int, FileIO]) -> None:
    reader, writer = pipe
    writer.write(b"".join(LINES))
    writer.close()
    assert list(store_host._requests(reader)) == ASK


@pytest.mark.parametrize("cut", [1, 20, len(LINES[0]) - 1])
def test_a_request_that_comes_in_two_parts_is_heard_once_it_is_whole(pipe: tuple[int, FileIO], cut: int) -> None:
    reader, writer = pipe
    requests = store_host._requests(reader)
    writer.write(LINES[0][:cut])
    assert next(requests) == {}
    writer.write(LINES[0][cut:] + LINES[1][:cut])
    assert next(requests) == ASK[0]
    assert next(requests) == {}
    writer.write(LINES[1][cut:])
    assert next(requests) == ASK[1]


def test_a_request_longer_than_a_read_is_one_request(pipe: tuple[int, FileIO]) -> None:
    reader, writer = pipe
    wanted = {"propose": "stop", "by": "x" * 10_000}
    writer.write(json.dumps(wanted).encode() + b"\n" + LINES[0])
    writer.close()
    assert list(store_host._requests(reader)) == [wanted, ASK[0]]


def test_while_nobody_asks_for_anything_the_reports_are_looked_at(pipe: tuple[int, FileIO]) -> None:
    requests = store_host._requests(pipe[0])
    assert list(itertools.islice(requests, 3)) == [{}] * 3


def test_a_supervisor_that_dies_in_the_middle_of_a_word_has_asked_for_nothing(pipe: tuple[int, FileIO]) -> None:
    reader, writer = pipe
    writer.write(LINES[0][:7])
    writer.close()
    assert list(store_host._requests(reader)) == []


def test_the_store_host_relays_each_report_once_and_the_last_words_before_it_ends(
    pipe: tuple[int, FileIO], capsys: pytest.CaptureFixture[str]
) -> None:
    """Over torch's own store: what came between the last look and the end is told as well."""
    reader, writer = pipe
    store: Any = HashStore()
    thread = threading.Thread(target=store_host.serve, args=(store, 2, reader))
    thread.start()
    said: list[str] = []

    def heard(text: str) -> bool:
        said.append(capsys.readouterr().out)
        return text in "".join(said)

    store.set(rank_key(1), json.dumps({**DOING, "step": 1}))
    wait_for(lambda: heard('"done": 3'), TIMEOUT_S, "the first report")
    store.set(rank_key(2), json.dumps({**DOING, "step": 8}))  # there is no rank 2 of 2
    store.set(rank_key(1), json.dumps({**DOING, "step": 2}))
    store.set(RESULT_KEY, '{"step": 2}')
    writer.close()
    thread.join(TIMEOUT_S)
    heard("")
    assert [json.loads(line) for line in "".join(said).splitlines()] == [
        {"reports": {"1": SHORT}},
        {"reports": {"1": SHORT}},
        {"result": {"step": 2}},
    ]


DOING = {"doing": "in a step", "done": 3, "count": 1, "beat": 7}
SHORT = {"doing": "in a step", "done": 3, "count": 1}
STRANGE = [b"", b"garbage", b"\xff\xfe", b"[" * 100_000, b"[]", b"7", b'"stop"', b"{}"]
ODD_REPORTS = [{"doing": 1}, {"done": "3"}, {"count": None}, {"step": "x"}, {"save_s": []}, {"metrics": [1]}]
ODD_REPORTS += [{"spent": [1]}, {"spent": {"train": "long"}}, {"expendable": 3}, {"expendable": ["all"]}]


DEEP = b'{"doing": "x", "done": 1, "count": 1, "metrics": ' + b'{"a": ' * 400 + b"1" + b"}" * 401


def test_a_loss_that_is_not_a_number_is_none_of_a_strangers() -> None:
    told = {**DOING, "loss": float("nan"), "metrics": {"train/loss": float("inf")}}
    assert report.parse_report(json.dumps(told).encode(), 0) == {**DOING, "loss": None, "metrics": {"train/loss": None}}


@pytest.mark.parametrize("text", [DEEP, *STRANGE] + [json.dumps({**DOING, **odd}).encode() for odd in ODD_REPORTS])
def test_a_report_that_no_rank_of_ours_can_have_written_is_none(text: bytes) -> None:
    assert report.parse_report(json.dumps(DOING).encode(), 0) == DOING
    assert report.parse_report(text, 0) is None
    other = report.parse_report(text, 1)
    assert other is None or other.keys() == {"doing", "done", "count"}


def test_a_strangers_messages_end_no_store_host_and_are_told_once(
    pipe: tuple[int, FileIO], capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = pipe
    store: Any = HashStore()
    store.set("toolkit/agree/0/proposal", "not JSON")
    thread = threading.Thread(target=store_host.serve, args=(store, 2, reader))
    thread.start()
    said: list[str] = []

    def heard(text: str) -> bool:
        said.append(capsys.readouterr().out)
        return text in "".join(said)

    for key in (rank_key(0), RESULT_KEY):
        store.set(key, "not JSON")
        wait_for(lambda key=key: heard(key), TIMEOUT_S, "the word that it was ignored")
    store.set(rank_key(0), "nor is this")
    store.set(rank_key(1), json.dumps(DOING))
    writer.write(LINES[0])
    wait_for(lambda: store.check(["toolkit/agree/0/call/1"]), TIMEOUT_S, "the call of all ranks to stop")
    assert json.loads(store.get("toolkit/agree/0/call/1")) == ["stop", "user 0"]
    writer.close()
    thread.join(TIMEOUT_S)
    heard("")
    lines = [json.loads(line) for line in "".join(said).splitlines()]
    assert lines == [{"ignored": rank_key(0)}, {"ignored": RESULT_KEY}, {"reports": {"1": SHORT}}]


class CountingStore:
    """A store in memory; notes how long each message of several keys would be."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.messages: list[int] = []

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.messages.append(sum(len(text) + 9 for text in (*keys, *values)))
        self.values |= {key: value.encode() for key, value in zip(keys, values, strict=True)}

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.messages.append(sum(len(key) + 9 for key in keys))
        return [self.values[key] for key in keys]


def test_no_message_for_many_ranks_is_longer_than_the_server_parses_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, 16,385 nodes of 8 ranks were more keys than the server takes, and 8,000 ranks took 1.7 s a look."""
    ranks, store = 10_000, CountingStore()
    relay = store_host._Relay(store, ranks)  # type: ignore[arg-type]
    report = json.dumps({"doing": "in a step", "done": 1, "count": 2, "beat": 3})
    transport = StoreTransport(store)  # type: ignore[arg-type]
    transport.set({rank_key(rank): report for rank in range(ranks)})
    relay.pass_on(everything=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(int(rank) for line in lines for rank in line["reports"]) == list(range(ranks))
    propose(transport, ranks, STOP, by="the supervisor")
    acks = {_Round(PREFIX, 0).ack(rank): "[7, false]" for rank in range(ranks)}
    transport.set(acks)
    assert transport.get(list(acks)) == ["[7, false]"] * ranks
    assert max(store.messages) <= 4096
    assert len(store.messages) < 1500


def test_a_value_that_is_long_by_itself_goes_in_one_message() -> None:
    pieces = list(in_pieces([("a", "1"), ("long", "x" * 10_000), ("b", "2")]))
    assert pieces == [{"a": "1"}, {"long": "x" * 10_000}, {"b": "2"}]


def test_ranks_of_which_reports_are_passed_on_once_a_second_send_one_a_second() -> None:
    reporters = [store_reporter(Store(), rank) for rank in (0, 1)]
    assert [reporter._every_s / report.HEARTBEAT_S for reporter in reporters] == [1, 2]
    for reporter in reporters:
        reporter.close()
