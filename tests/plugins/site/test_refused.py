"""Requests that `toolkit doctor` refuses."""

from __future__ import annotations

from tests.command import Command


def test_doctor_refuses_a_number_of_nodes_that_no_job_can_have(command: Command) -> None:
    assert "cluster.nodes: 0 is refused" in command.refuses("doctor", "cluster.nodes=0")
