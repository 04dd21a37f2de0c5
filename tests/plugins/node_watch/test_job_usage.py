"""What the supervisor derives from the nodes' samples, and keeps in ``usage.json``."""

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import fsio
from toolkit.config.cluster import PriceConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.node_watch import job_usage
from toolkit.plugins.node_watch.job_usage import JobUsageRecorder, Samples, slow_links, unused_gpus
from toolkit.plugins.node_watch.usage import GpuUsage, NodeUsage
from toolkit.run.attempt.attempt import Attempt
from toolkit.slurm.jobs import parse_jobs

PLAN = Allocation(("n1", "n2"), (2, 2), 2, gpus=(2, 2), job_id="7")
GPU = GpuUsage(0, busy=0.5, busy_s=50.0, power_w=300.0, energy_j=1000.0, most_memory_bytes=5)
NODE = NodeUsage(since=100.0, until=200.0, cpu_s=150.0, cpus=1.5, most_cpus=3.0, memory_bytes=10, most_memory_bytes=20)
ENVIRON = {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"}


def attempt(number: int = 1, age_s: float = 600.0) -> Attempt:
    return Attempt(number, time.time() - age_s, PLAN)


def recorder(run: RunDir) -> JobUsageRecorder:
    return JobUsageRecorder(run, PLAN, PriceConfig(cpu_hour=1.0), ENVIRON)


def sent(samples: Samples) -> dict[tuple[str, float], Any]:
    """Return the samples as the agents send them."""
    return {agent: json.loads(json.dumps(asdict(sample))) for agent, sample in samples.items()}


def test_the_nodes_samples_are_summed_up_with_what_slurm_was_asked_for(run: RunDir) -> None:
    (row,) = parse_jobs(
        "JobId=7 JobName=x\n   JobState=RUNNING TimeLimit=30:00\n   NumNodes=2\n   TRES=cpu=8,mem=3G,node=2"
    )
    busier = replace(NODE, cpu_s=250.0, most_cpus=3.5, most_memory_bytes=90, gpus=(GPU, replace(GPU, index=1)))
    used = recorder(run).update(sent({("n1", 100.0): NODE, ("n2", 100.0): busier}), attempt(), row, is_last=True)
    assert (used.cpus, used.memory_bytes, used.time_limit_s) == (8, 3 << 29, 1800.0)
    assert (used.cpu_s, used.cpu_held_s, used.most_cpus, used.busy_cpus) == (400.0, 800.0, 3.5, 3.0)
    assert (used.most_bytes, used.most_bytes_host) == (90, "n2")
    assert (used.gpu_s, used.gpu_held_s, used.busy_gpus, used.most_gpus) == (100.0, 200.0, 1.0, 2)
    assert (used.power_w, used.energy_j) == (600.0, 2000.0)
    assert run.usage().jobs == (used,)
    assert run.usage().price is not None


def test_an_agent_that_has_ended_counts_with_its_last_sample(run: RunDir) -> None:
    again = replace(NODE, since=300.0, until=310.0, cpu_s=5.0, cpus=0.5)
    used = recorder(run).update(sent({("n1", 100.0): NODE, ("n1", 300.0): again}), attempt(), None, is_last=True)
    assert (used.cpu_s, used.cpu_held_s, used.busy_cpus) == (155.0, 440.0, 0.5)


def test_each_job_of_a_run_has_its_entry_and_a_supervisor_that_takes_over_adds_none(run: RunDir) -> None:
    first = {("n1", 100.0): NODE}
    assert recorder(run).update(sent({}), attempt(), None, is_last=True) is None
    recorder(run).update(sent(first), attempt(), None, is_last=True)
    recorder(run).update(sent({("n1", 100.0): replace(NODE, cpu_s=160.0)}), attempt(), None, is_last=True)
    assert [job.cpu_s for job in run.usage().jobs] == [160.0]
    recorder(run).update(sent({("n1", 900.0): replace(NODE, since=900.0, until=950.0)}), attempt(), None, is_last=True)
    assert [job.since for job in run.usage().jobs] == [100.0, 900.0]


def test_a_damaged_or_unwritable_file_costs_no_more_than_itself(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "usage.json").write_text("{")
    assert recorder(run).update(sent({("n1", 100.0): NODE}), attempt(), None, is_last=True) is not None
    assert len(run.usage().jobs) == 1

    def full(usage: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write_usage", lambda self, usage: full(usage))
    assert recorder(run).update(sent({("n1", 100.0): NODE}), attempt(), None, is_last=True) is not None
    assert "usage.json cannot be written" in caplog.text


def test_a_file_server_that_is_away_costs_one_writing(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorder(run)
    with monkeypatch.context() as away:
        away.setattr(fsio, "read_bytes", lambda path, _: fails(path))
        assert recording.update(sent({("n1", 100.0): NODE}), attempt(), None, is_last=True) is not None
    assert "usage.json cannot be written" in caplog.text
    recording.update(sent({("n1", 100.0): NODE}), attempt(), None, is_last=True)
    assert len(run.usage().jobs) == 1


def fails(path: Path) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@pytest.mark.parametrize(
    "heard", [[("n1", 120.0), ("n2", 100.0)], [("n2", 100.0), ("n1", 120.0)], [("n1", 120.0)]], ids=str
)
def test_a_job_counts_once_whichever_agents_a_next_supervisor_hears(
    run: RunDir, heard: list[tuple[str, float]]
) -> None:
    """The agent of n2 may have ended with the supervisor that knew it."""
    agents = {("n1", 120.0): replace(NODE, since=120.0), ("n2", 100.0): NODE}
    recorder(run).update(sent(agents), attempt(), None, is_last=True)
    recording = recorder(run)
    samples: dict[tuple[str, float], NodeUsage] = {}
    for agent in heard:
        samples[agent] = agents[agent]
        recording.update(sent(dict(samples)), attempt(), None, is_last=True)
    assert len(run.usage().jobs) == 1


def with_gpus(*idle_s: float) -> Mapping[tuple[str, float], NodeUsage]:
    gpus = tuple(replace(GPU, index=index, idle_s=idle) for index, idle in enumerate(idle_s))
    return {("n2", 100.0): replace(NODE, gpus=gpus), ("spare", 100.0): replace(NODE, gpus=gpus)}


@pytest.mark.parametrize(
    ("idle_s", "age_s", "unused"),
    [
        ((0.0, 255.0), 270.0, ["GPU 1 of n2"]),  # within five minutes
        ((0.0, 230.0), 235.0, []),  # too soon to say
        ((0.0, 300.0), 1000.0, []),  # it was used, and is idle since
        ((5000.0, 0.0), 300.0, ["GPU 0 of n2"]),  # idle since an earlier attempt
    ],
)
def test_a_gpu_that_no_rank_of_the_attempt_has_used_is_named(
    idle_s: tuple[float, ...], age_s: float, unused: list[str]
) -> None:
    """An unused GPU is named within five minutes.

    A sample may be 15 s old, and the first one comes seconds after the attempt's begin.
    """
    assert unused_gpus(with_gpus(*idle_s), attempt(age_s=age_s)) == unused
    assert job_usage.UNUSED_AFTER_S + job_usage.SAMPLE_AGE_S + job_usage.LOOK_EVERY_S < 300


def test_an_unused_gpu_is_logged_once_in_each_attempt(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    recording = recorder(run)
    for number in (1, 1, 2):
        used = recording.update(sent(with_gpus(0.0, 700.0)), attempt(number), None, is_last=True)
        assert used.unused_gpus == ("GPU 1 of n2",)
    assert caplog.text.count("GPU 1 of n2 is allocated, and no rank has used it") == 2


def linked(*links: tuple[int, int], busy_s: float = 400.0) -> NodeUsage:
    return replace(NODE, gpus=tuple(GpuUsage(index, busy_s=busy_s, link=link) for index, link in enumerate(links)))


def test_a_gpu_with_a_slower_link_than_the_others_makes_its_node_sick() -> None:
    """All GPUs report their own maximum as reached. One node's riser is of an older kind."""
    even = linked((5, 16), (5, 16))
    assert slow_links({"n1": even, "n2": even}) == {}
    found = slow_links({"n1": even, "n2": linked((5, 16), (5, 8)), "n3": linked((4, 16), (5, 16))})
    assert found == {
        "n2": "GPU 1 is linked by PCIe 5 x8, and most GPUs of the job by 5 x16",
        "n3": "GPU 0 is linked by PCIe 4 x16, and most GPUs of the job by 5 x16",
    }
    assert slow_links({"n1": even, "n2": linked((1, 16), (0, 0), busy_s=10.0)}) == {}, "it has not worked yet"
    assert slow_links({"n1": linked((5, 16), (5, 8))}) == {}, "either of two may be the odd one"


def test_a_link_is_compared_with_those_of_gpus_of_the_same_model() -> None:
    """Every A100 has PCIe 4 and every H100 has 5. None is slow, though most are H100s."""

    def of(model: str, usage: NodeUsage) -> NodeUsage:
        return replace(usage, gpus=tuple(replace(gpu, model=model) for gpu in usage.gpus))

    new, old = of("H100", linked(*[(5, 16)] * 6)), of("A100", linked(*[(4, 16)] * 4))
    assert slow_links({"n1": new, "n2": old}) == {}
    found = slow_links({"n1": new, "n2": old, "n3": of("A100", linked((4, 8), (4, 16)))})
    assert found == {"n3": "GPU 0 is linked by PCIe 4 x8, and most GPUs of the job by 4 x16"}
