"""The table at a run's end, and the next request. The figures can be checked by hand and by seff's formulas."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.attempts import attempt
from toolkit.files.run_files import JobUsage, PriceRecord, RunProgress, RunUsage
from toolkit.plugins.node_watch import efficiency

GIB = 1 << 30
#: Two nodes for an hour, four CPUs and 16 GiB each.
JOB = JobUsage(
    job_id="7",
    since=1000.0,
    wall_s=3600.0,
    nodes=2,
    tasks_per_node=2,
    cpus_per_task=2,
    cpus=8,
    memory_bytes=16 * GIB,
    time_limit_s=4 * 3600.0,
    gpus_per_node=0,
    cpu_s=7200.0,
    cpu_held_s=8 * 3600.0,
    busy_cpus=2.0,
    most_cpus=1.4,
    used_bytes=1 * GIB,
    shared_bytes=0,
    most_bytes=3 * GIB,
    most_bytes_host="node2",
    gpu_s=0.0,
    gpu_held_s=0.0,
    busy_gpus=0.0,
    most_gpus=0,
    most_gpu_bytes=0,
    power_w=0.0,
    energy_j=0.0,
    read_bytes=0,
    written_bytes=0,
    received_bytes=0,
    sent_bytes=0,
    unused_gpus=(),
)
GPUS: dict[str, Any] = {
    "gpus_per_node": 4,
    "gpu_s": 3 * 1800.0,
    "gpu_held_s": 8 * 3600.0,
    "most_gpus": 3,
    "energy_j": 7.2e6,
    "unused_gpus": ("GPU 3 of node2",),
}


def options(line: str) -> dict[str, str]:
    program, *words = shlex.split(line)
    assert program == "sbatch"
    return dict(word.removeprefix("--").split("=") for word in words)


def test_the_next_request_has_what_was_used_with_margins() -> None:
    line = efficiency.sbatch_line(JOB, longest_s=3600.0)
    asked = {"nodes": "2", "ntasks-per-node": "2", "cpus-per-task": "1", "mem": "3840M", "time": "80"}
    assert options(line) == asked
    assert len(line) <= 78


@pytest.mark.parametrize(
    ("changes", "option", "value"),
    [
        ({"most_cpus": 3.9}, "cpus-per-task", "2"),  # never more than was asked
        ({"most_cpus": 0.0}, "cpus-per-task", "1"),
        ({"most_bytes": 10}, "mem", "256M"),
        ({"most_bytes": 15 * GIB}, "mem", "19G"),  # more than was asked: there it was tight
        ({"time_limit_s": 3900.0}, "time", "65"),
        ({"most_gpus": 3, "gpus_per_node": 4}, "gpus-per-node", "3"),
    ],
)
def test_each_size_of_the_next_request_has_its_rule(changes: dict[str, Any], option: str, value: str) -> None:
    assert options(efficiency.sbatch_line(JOB.replace(**changes), longest_s=3600.0))[option] == value


def test_an_unfinished_run_keeps_its_limit_and_loses_gpus_that_none_used() -> None:
    used = options(efficiency.sbatch_line(JOB.replace(gpus_per_node=4), longest_s=None))
    assert used["time"] == "240"
    assert "gpus-per-node" not in used


def test_no_time_is_enough_for_a_run_that_met_its_limit() -> None:
    attempts = [attempt(1, "timeout", "requeue", step_end=9)]
    told = efficiency.of_run(RunUsage(jobs=(JOB, JOB)), attempts, has_completed=True)
    assert "time" not in options(told.sbatch or "")


def test_the_peak_of_a_node_that_mostly_started_is_not_below_its_average() -> None:
    job = JOB.replace(nodes=1, cpus=2, cpu_held_s=40.0, cpu_s=20.0, most_cpus=0.1)
    (row,) = [row for row in efficiency.rows(job) if row[0] == "CPUs"]
    assert row[2] == "1.0 on average, 1.0 at a node's peak"


def test_the_table_fits_a_terminal_and_tells_what_seff_tells() -> None:
    told = efficiency.of_run(RunUsage(jobs=(JOB,)), (), has_completed=True)
    lines = efficiency.lines(told)
    print("\n".join(lines))
    *table, command = lines
    assert all(len(line) <= 78 for line in table), max(table, key=len)
    assert command.startswith("    sbatch --")  # a terminal leaves such a line whole
    # seff(1): CPU time used / (run time x CPUs); memory of a node used / asked.
    cpu, memory = 7200 / (3600 * 8), 3 / 16
    text = "\n".join(lines)
    assert f"{1 - cpu:.0%} (6.0 CPU h)".replace("%", " %") in text
    assert f"{1 - memory:.0%} (13 GiB)".replace("%", " %") in text
    assert "2.0 on average, 1.4 at a node's peak" in text
    assert "3 GiB at most, on node2" in text


def test_gpus_their_energy_and_the_price_are_told() -> None:
    price = PriceRecord(cpu_hour=0.1, gpu_hour=2.0, currency="EUR")
    told = efficiency.of_run(RunUsage(jobs=(JOB.replace(**GPUS),), price=price), (), has_completed=True)
    assert (told.cost, told.currency) == (8 * 0.1 + 8 * 2.0, "EUR")
    assert told.idle_cost == pytest.approx(6 * 0.1 + 6.5 * 2.0)
    text = "\n".join(efficiency.lines(told))
    for part in ("19 % busy", "81 % (6.5 GPU h)", "2 kWh", "16.80 EUR, 81 % of it", "GPU 3 of node2 was allocated"):
        assert part in text
    assert "--gpus-per-node=3" in text


def test_the_jobs_of_a_run_are_taken_together() -> None:
    second = JOB.replace(job_id="8", wall_s=1800.0, most_cpus=2.5, most_bytes=2 * GIB, memory_bytes=8 * GIB)
    both = efficiency.together((JOB, second))
    assert (both.cpu_s, both.wall_s, both.most_cpus) == (14_400.0, 5400.0, 2.5)
    assert (both.most_bytes, both.most_bytes_host, both.memory_bytes) == (3 * GIB, "node2", 8 * GIB)
    told = efficiency.of_run(RunUsage(jobs=(JOB, second)), (), has_completed=True)
    assert told.jobs == 2
    assert options(told.sbatch or "")["time"] == "80", "one job of the run took an hour at most"


def test_a_run_of_seconds_is_told_without_a_next_request() -> None:
    told = efficiency.of_run(RunUsage(jobs=(replace(JOB, cpu_held_s=8 * 5.0),)), (), has_completed=True)
    assert told.sbatch is None
    assert efficiency.lines(None) == []
    assert efficiency.of_run(RunUsage(), (), has_completed=True) is None


def test_what_is_used_now_is_curves() -> None:
    now = JOB.replace(**GPUS, busy_gpus=2.4, power_w=1234.5)
    assert efficiency.usage_scalars(now)["usage/gpu_energy_kwh"] == 2.0
    assert "usage/gpus_busy" not in efficiency.usage_scalars(JOB)
    assert efficiency.usage_scalars(None) == {}


@pytest.mark.parametrize(
    ("steps", "cause", "tells"),
    [
        ([(0, 40)], "crashed", True),
        ([(0, 40), (40, None)], "crashed", True),
        ([(0, None)], "crashed", False),
        ([(40, 40)], "timeout", False),
        ([(0, 40)], "out_of_memory", False),
        ([], "", False),
    ],
)
def test_only_a_run_that_trained_tells_what_is_enough(
    steps: list[tuple[int, int | None]], cause: str, tells: bool
) -> None:
    attempts = [
        attempt(number, cause, "give_up", step_start=start, step_end=end)
        for number, (start, end) in enumerate(steps, 1)
    ]
    assert (efficiency.of_run(RunUsage(jobs=(JOB,)), attempts, has_completed=False).sbatch is not None) is tells


@pytest.mark.parametrize(("step", "tells"), [(41, True), (40, False), (None, False)])
def test_an_attempt_that_makes_steps_tells_what_is_enough_before_it_ends(step: int | None, tells: bool) -> None:
    at = RunProgress(step=step, step_start=40)
    assert (efficiency.of_run(RunUsage(jobs=(JOB,)), (), has_completed=False, at=at).sbatch is not None) is tells
