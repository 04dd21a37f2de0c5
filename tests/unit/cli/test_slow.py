"""What `status` and `why` say about nodes that are slow for long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.command import Command
from toolkit.cli import show
from toolkit.files import rundir
from toolkit.files.run_files import RunStatus
from toolkit.files.rundir import RunDir

NOW = time.time()
NODES = [f"node{number:02}" for number in range(1, 5)]
SLOW = {"host": "node03", "ranks": [12, 13, 14, 15], "ratio": 1.61, "since": NOW - 720.0, "until": None}
RECOVERED = {"host": "node01", "ranks": [2], "ratio": 3.0, "since": NOW - 900.0, "until": NOW - 810.0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(show, "SILENT_S", 3600.0)  # NOW was when the tests began
    made = rundir.create("digits")
    made.config.write_text("")
    return made


def stands(run: RunDir, *stragglers: dict[str, Any], nodes: list[str] = NODES, **more: Any) -> None:
    progress = {"step": 30, "stragglers": list(stragglers)}
    run.write_status(
        RunStatus.from_json({"state": "running", "nodes": nodes, "updated": NOW, "progress": progress, **more})
    )


def told(command: Command, *argv: str) -> list[str]:
    return [line for line in command(*argv).splitlines() if "slow" in line]


def test_status_names_who_is_slow_now(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    expected = "node03 (ranks 12-15) is 1.6 times slower than the others for 12 min"
    assert told(command, "status") == [expected]


def test_status_as_json_has_all_of_them(run: RunDir, command: Command) -> None:
    stands(run, RECOVERED, SLOW)
    (row,) = json.loads(command("status", "--json"))
    assert [(s["host"], s["slow_s"], s["until"] is None) for s in row["stragglers"]] == [
        ("node01", 90.0, False),
        ("node03", 720.0, True),
    ]


@pytest.mark.parametrize("stragglers", [[RECOVERED], []])
def test_status_says_nothing_where_nobody_is_slow(
    run: RunDir, stragglers: list[dict[str, Any]], command: Command
) -> None:
    stands(run, *stragglers)
    assert told(command, "status") == []
