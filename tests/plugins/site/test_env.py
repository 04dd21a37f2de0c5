"""`toolkit env`: what a rank is told."""

from __future__ import annotations

import pytest

from toolkit.base.errors import EXIT_REQUEST
from toolkit.cli import main as cli


def test_a_rank_that_nothing_tells_where_its_supervisor_is_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_SUPERVISED", "1")
    for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["env"]) == EXIT_REQUEST
    assert "unset TOOLKIT_SUPERVISED" in capsys.readouterr().err
