"""Requests that `toolkit doctor` refuses."""

from __future__ import annotations

import pytest

from toolkit.base.errors import EXIT_REQUEST
from toolkit.cli import main as cli


def test_doctor_refuses_a_number_of_nodes_that_no_job_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "cluster.nodes=0"]) == EXIT_REQUEST
    assert "cluster.nodes: 0 is refused" in capsys.readouterr().err
