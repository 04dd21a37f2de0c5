"""``make bench`` still runs; what it measures is for a quiet machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist


def test_the_loops_are_compared() -> None:
    argv = [sys.executable, "-m", "tests.bench.loop", "--steps", "20", "--rounds", "1"]
    out = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300).stdout
    contenders = {line.split("  ")[0] for line in out.splitlines()}
    assert {"hand-written", "ours", "ours, alone"} <= contenders
