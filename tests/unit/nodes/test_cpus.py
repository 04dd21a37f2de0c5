"""Which CPUs the tasks of a node get."""

import os
from pathlib import Path

import pytest

from toolkit.nodes.agent import processes


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    """Write two packages of two cores with two threads each, and return their folder.

    Numbered as Linux does: first the first thread of every core, then the second ones.
    """
    for cpu in range(8):
        core = cpu % 4
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 2}\n")
        (folder / "thread_siblings_list").write_text(f"{core},{core + 4}\n")
    return tmp_path


def test_the_threads_of_a_core_are_next_to_each_other_and_the_cores_of_a_package(topology: Path) -> None:
    assert processes.by_core(range(8), topology) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_siblings_may_be_given_as_a_range(topology: Path) -> None:
    for cpu in (6, 7):
        (topology / f"cpu{cpu}/topology/thread_siblings_list").write_text("6-7\n")
    assert processes.by_core([7, 2, 6], topology) == [2, 6, 7]


def test_each_task_has_cpus_of_its_own(monkeypatch: pytest.MonkeyPatch, topology: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 2, 6})
    assert processes.for_tasks(2, 2, topology=topology) == [[1, 5], [2, 6]]
    assert processes.for_tasks(2, 1, topology=topology) == [[1], [5]]


def test_tasks_share_what_is_not_enough_or_not_to_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert processes.for_tasks(2, 2) == [None, None]
    assert processes.for_tasks(2, None) == [None, None]


def test_a_machine_that_tells_nothing_has_one_thread_a_core(tmp_path: Path) -> None:
    assert processes.by_core([2, 0, 1], tmp_path) == [0, 1, 2]
