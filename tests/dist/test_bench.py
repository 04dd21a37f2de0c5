"""``make bench`` still runs; what it measures is for a quiet machine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.scale import curves

pytestmark = pytest.mark.dist


def output_of(*words: str) -> str:
    argv = [sys.executable, "-m", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout


def test_the_orders_are_compared_and_one_that_memory_cannot_hold_is_not_run() -> None:
    size = 10**12
    lines = output_of("tests.bench.data", "--rounds", "1", "--sizes", "100000", str(size)).splitlines()
    ours, theirs = ([line for line in lines if name in line] for name in ("  ours", "  torch DistributedSampler"))
    assert [len(re.findall(r"[\d.]+ +\([\d.]+\)", line)) for line in (*ours, *theirs)] == [4, 4, 4, 0]
    assert "not run: it needs 48000 GB" in theirs[1]


def test_the_loops_are_compared() -> None:
    out = output_of("tests.bench.loop", "--steps", "20", "--rounds", "1")
    contenders = {line.split("  ")[0] for line in out.splitlines()}
    assert {"hand-written", "ours", "ours, alone"} <= contenders


def test_what_may_happen_to_a_step_is_compared() -> None:
    lines = output_of("tests.bench.steps", "--steps", "1", "--rounds", "1").splitlines()
    assert [line.split()[0] for line in lines] == ["sgd"] * 6 + ["adamw"] * 6


@pytest.mark.soak
def test_the_backends_are_compared() -> None:
    pytest.importorskip("mpi4py")
    argv = [sys.executable, "-m", "tests.bench.collectives", "--rounds", "1"]
    out = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout
    assert "all-reduce 64 MB" in out
    assert "DDP step" in out


def test_every_mechanism_that_grows_with_the_size_of_a_run_has_its_curve() -> None:
    lines = output_of("tests.scale", "--small").splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    assert names == [curve.name for curve in curves()]
    assert len(lines) == 3 * len(names)  # name, columns, one size
