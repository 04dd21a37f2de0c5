"""The trackers' own libraries hold to the contract. They are no part of the development environment:

python -m venv V && V/bin/pip install omegaconf pytest mlflow wandb
TOOLKIT_REQUIRE_TRACKERS=1 V/bin/python -m pytest -m soak tests/soak/test_trackers.py
"""

import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.trackers.contract import Points, Story, check_contract, same
from tests.soak.wandb_server import WandbServer
from tests.waiting import wait_for
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED
from toolkit.cli import main as cli
from toolkit.plugins.trackers import build_tracker

#: The libraries warn about each other's and Python's versions.
pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]


def need(name: str) -> Any:
    """Import a library; without it the test is skipped, or fails with TOOLKIT_REQUIRE_TRACKERS=1."""
    if os.environ.get("TOOLKIT_REQUIRE_TRACKERS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Any]:
    """MLflow with a database of its own."""
    library = need("mlflow")
    before = library.get_tracking_uri()
    library.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield library
    library.set_tracking_uri(before)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """The real wandb, which sends to a server of the test."""
    library, server = need("wandb"), WandbServer()
    monkeypatch.setenv("WANDB_BASE_URL", server.address)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    library.teardown()  # it reads the variables once
    yield server
    library.teardown()
    server.close()
    assert server.unknown == []


def name_in_mlflow(tag: str) -> str:
    return tag.replace("%", "_")


def in_mlflow(library: Any, remote: str) -> Points:
    """Return the values of a run; each may be there once."""
    client = library.MlflowClient()
    found: dict[tuple[int, str], float] = {}
    for tag in client.get_run(remote).data.metrics:
        for metric in client.get_metric_history(remote, tag):
            assert (metric.step, tag) not in found, "a value was sent twice"
            found[metric.step, tag] = metric.value
    return found


def test_mlflow_holds_to_the_contract(mlflow: Any) -> None:
    check_contract(lambda run: build_tracker("mlflow", run), lambda remote: in_mlflow(mlflow, remote))


def test_wandb_holds_to_the_contract(wandb: WandbServer) -> None:
    check_contract(lambda run: build_tracker("wandb", run), wandb.points)


@pytest.mark.parametrize("taken", [0, 1, 17, 59])
def test_a_server_of_wandb_that_fails_midway_gets_the_rest_later(wandb: WandbServer, taken: int) -> None:
    story = Story()
    story.start()
    story.steps(1, 60)
    story.end()
    wandb.lines_left = taken
    assert cli.main(["upload", story.run.id, "wandb"]) == EXIT_FAILED
    assert len(wandb.histories.get(story.run.id, [])) <= taken
    wandb.lines_left = math.inf
    assert cli.main(["upload", story.run.id, "wandb"]) == EXIT_DONE
    assert same(wandb.points(story.run.id), story.points(str))
    assert wandb.histories[story.run.id][0]["_timestamp"] == 1.8e9 + 0.25


def test_mlflow_shows_times_parameters_and_the_end_of_a_run(mlflow: Any) -> None:
    story = Story()
    story.start()
    story.steps(1, 40)
    story.end("failed")
    assert cli.main(["upload", story.run.id, "mlflow", "--project", "p", "--all"]) == EXIT_DONE
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert found.info.status == "FAILED"
    assert found.data.params["optim.lr"] == "0.05"
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.step for metric in history] == list(range(1, 41))
    assert history[0].timestamp == 1000 * 1.8e9 + 250


@pytest.mark.parametrize("kill_after_s", [0.0, 0.5, 1.0, 2.0])
def test_a_killed_command_neither_loses_nor_doubles(mlflow: Any, tmp_path: Path, kill_after_s: float) -> None:
    story = Story()
    story.start()
    story.steps(1, 2_000)
    story.end()
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    argv = [sys.executable, "-m", "toolkit", "upload", story.run.id, "mlflow"]
    root = str(Path(__file__).parents[2])
    mlflow.MlflowClient().search_experiments()  # the database is there
    with subprocess.Popen(argv, env={**env, "PYTHONPATH": root}) as process:
        wait_for(lambda: list(story.run.trackers.glob("*.json")) or process.poll() is not None, 120, "the first batch")
        try:
            process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
    assert cli.main(["upload", story.run.id, "mlflow"]) == EXIT_DONE
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert same(in_mlflow(mlflow, found.info.run_id), story.points(name_in_mlflow))


def test_a_server_that_is_away_costs_nothing(mlflow: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:  # a port on which nothing listens, until the server below does
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    mlflow.set_tracking_uri(address.replace("//", "//me:hidden@"))
    story = Story()
    story.start()
    story.steps(1, 60)
    story.checkpoint(30)
    assert cli.main(["upload", story.run.id, "mlflow"]) == EXIT_FAILED
    said = capsys.readouterr()
    assert f"mlflow at {address}, experiment digits did not accept the metrics" in said.err
    assert "hidden" not in said.err + said.out
    argv = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log) as server:
        try:
            wait_for(lambda: cli.main(["upload", story.run.id, "mlflow"]) == EXIT_DONE, 180, "the server")
            story.end()
            assert cli.main(["upload", story.run.id, "mlflow"]) == EXIT_DONE
            [record] = story.run.trackers.glob("*.json")
            remote = json.loads(record.read_text())["remote"]
            assert same(in_mlflow(mlflow, remote), story.points(name_in_mlflow))
        finally:
            server.terminate()
    for path in story.run.trackers.glob("*.json"):
        assert "hidden" not in path.read_text()
