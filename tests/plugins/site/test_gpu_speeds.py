"""GPUs that are slower than the job's others, by the lines of the nodes. The measurement itself runs on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import Any, cast

import pytest
import torch

from toolkit.nodes.agent.messages import CheckAnswered
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import NodeAnswered, NodeSilent
from toolkit.plugins.site import gpu_measure
from toolkit.plugins.site.checks import preflight


def text(gemm: list[float], copy: list[float]) -> str:
    return json.dumps({"gemm": gemm, "copy": copy})


def test_a_gpu_that_is_a_tenth_slower_than_the_jobs_median_is_named() -> None:
    even = text([100.0, 98.0], [50.0, 51.0])
    assert preflight.compare({"n1": even, "n2": even, "n3": even}) == {}
    found = preflight.compare(
        {"n1": even, "n2": text([99.0, 88.0], [50.0, 50.0]), "n3": text([99.0, 99.0], [25.0, 50.0])}
    )
    assert found == {
        "n2": "GPU 1 multiplies matrices at 89 % of the others' speed",
        "n3": "GPU 0 copies from the host at 50 % of the others' speed",
    }


@pytest.mark.parametrize("answer", ["", "No module named torch", "[]", '{"gemm": 3}', '{"gemm": ["x"], "copy": []}'])
def test_a_node_without_figures_is_left_out(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    even = text([100.0, 98.0], [50.0, 51.0])
    assert preflight.compare({"n1": even, "n2": even, "n3": answer}) == {}
    assert "is not known" in caplog.text


class PlayedAgents:
    """Agents of nodes whose GPUs are equal, except for one of n2."""

    silent_hosts = frozenset({"silent"})

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def request(self, orders: dict[str, Any], heard: SimpleQueue[Any]) -> int:
        self.asked |= orders
        for host in orders:
            if host == "dead":
                heard.put(NodeSilent(host, "it was lost", is_certain=False))
            elif host != "hangs":
                message = CheckAnswered(3, text([1.0, 1.0 if host == "n1" else 0.5], [1.0, 1.0]), 0.0, 0.0)
                heard.put(NodeAnswered(host, message, 0.0, 0.0))
        return 3

    def withdraw(self, number: int) -> None:
        assert number == 3


def test_all_nodes_are_asked_at_once_by_their_agents() -> None:
    agents, events = PlayedAgents(), SimpleQueue[Any]()
    found = preflight.slow_gpus(cast(Any, agents), ["n1", "n2", "dead", "silent"], events)
    assert {*agents.asked} == {"n1", "n2", "dead"}
    assert agents.asked["n1"].command[-2] == "toolkit.plugins.site.gpu_measure"
    assert {*found} == {"n2"}


@pytest.mark.parametrize(("gpus", "is_asked"), [(1, False), (2, True)])
def test_a_job_of_few_gpus_is_not_measured(gpus: int, *, is_asked: bool) -> None:
    agents, job = PlayedAgents(), Allocation(("n1", "n3"), (1, 1), 1, gpus=(gpus, gpus), job_id="1")
    assert preflight.slow_nodes(cast(Any, agents), job, SimpleQueue()).keys() <= {"n3"}
    assert bool(agents.asked) == is_asked


def test_an_event_such_as_a_signal_ends_the_wait_for_the_speeds() -> None:
    events = SimpleQueue[Any]()
    Timer(0.1, events.put, ["a signal"]).start()
    began = time.monotonic()
    assert preflight.slow_gpus(cast(Any, PlayedAgents()), ["n1", "hangs"], events) == {}
    assert time.monotonic() - began < preflight.WAIT_S / 4
    assert events.get() == "a signal"


def test_the_measurement_is_over_before_the_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")  # as torch on a slow disk
    *command, limit_s = preflight.COMMAND
    assert 0 < int(limit_s) < preflight.WAIT_S
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([*command, "1"], env=environ, timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM


def test_the_measurement_counts_products_and_copies_on_each_device() -> None:
    devices = [torch.device("cpu")] * 2
    found = gpu_measure.measure(devices, edge=64, copy_bytes=1 << 16, gemm_s=0.05, copy_s=0.05)
    assert {name: len(values) for name, values in found.items()} == {"gemm": 2, "copy": 2}
    assert all(value > 1e6 for values in found.values() for value in values), found
