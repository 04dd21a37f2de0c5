"""`toolkit env`: what a rank is told."""

from __future__ import annotations

import pytest

from tests.command import Command


def test_a_rank_that_nothing_tells_where_its_supervisor_is_says_so(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("TOOLKIT_SUPERVISED", "1")
    for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(name, raising=False)
    assert "unset TOOLKIT_SUPERVISED" in command.refuses("env")
