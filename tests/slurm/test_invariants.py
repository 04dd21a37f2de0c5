"""The invariants of tests/slurm/schedules.py under random schedules.

A run that no user ended continues, one that a user ended does not, and each has one writer.

``make soak`` plays TOOLKIT_SCHEDULES schedules, 300 by default, on each of its four kinds of box. TOOLKIT_SEED repeats
one (not its exact moments: those are the machine's, too).
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.box import Box
from tests.slurm.conftest import visit_with_small_disk
from tests.slurm.schedules import make_project, play_all
from tests.slurm.watched import Cluster, say

pytestmark = pytest.mark.slurm


@pytest.fixture
def cluster(
    make_box: Callable[..., Box], request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Cluster, Path]]:
    """Yield a box with its runs on a small disk, and a folder without faults."""
    for site, disk in visit_with_small_disk(make_box, request, tmp_path, "192m"):
        with closing(Cluster(site, disk)) as cluster:
            yield cluster, site.folder / "traces"


def play(cluster: tuple[Cluster, Path], count: int, abreast: int) -> None:
    first = int(os.environ.get("TOOLKIT_SEED", random.randrange(10**8)))
    say(f"TOOLKIT_SEED={first}, {count} schedules")
    it, traces = cluster
    failed = play_all(it, list(range(first, first + count)), make_project(it.site, traces), traces, abreast)
    assert not failed, {watched.name: watched.violations for watched in failed}


@pytest.mark.soak
def test_three_random_schedules_hold_the_invariants(cluster: tuple[Cluster, Path]) -> None:
    play(cluster, 3, 3)


@pytest.mark.soak
def test_many_random_schedules_hold_the_invariants(cluster: tuple[Cluster, Path]) -> None:
    play(cluster, int(os.environ.get("TOOLKIT_SCHEDULES", "300")), int(os.environ.get("TOOLKIT_ABREAST", "5")))
