"""`toolkit tensorboard`: which runs it shows, and how to reach it."""

import os
import socket

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.command import Command
from tests.unit.cli.test_cli import run  # noqa: F401
from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE
from toolkit.cli import main as cli
from toolkit.files import rundir


def test_tensorboard_names_runs_by_name_and_id(run: rundir.RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fsio.make_dir(run.tensorboard)
    EventFileWriter(str(run.tensorboard)).close()
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: called.append(argv))
    for _ in range(2):  # the second time the links are there
        cli.main(["tensorboard", "--host", "0.0.0.0"])
    argv, again = called
    assert argv == again
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    found = EventMultiplexer().AddRunsFromDirectory(argv[argv.index("--logdir") + 1])
    assert set(found.Runs()) == {f"digits/{run.id}"}


def test_tensorboard_says_how_to_reach_it_from_ones_own_machine(
    run: rundir.RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def says(*words: str) -> str:
        (line,) = command.ends(EXIT_DONE, "tensorboard", *words).err.splitlines()
        return line

    monkeypatch.setattr(os, "execv", lambda _, argv: None)
    monkeypatch.setenv("SSH_CONNECTION", "198.51.100.7 50000 192.0.2.1 22")
    monkeypatch.setenv("USER", "ada")
    assert "`ssh -N -L 7000:localhost:7000 ada@192.0.2.1`, then open http://localhost:7000" in says("--port", "7000")
    assert "`ssh -N -L 6006:localhost:6006 ada@192.0.2.1`" in says("--host", "0.0.0.0")
    # In a job the login node is the one that its shell has come from.
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "`ssh -N -L 6006:node7:6006 ada@192.0.2.1`" in says("--host", "node7")
    assert f"`ssh -N -L 6006:localhost:6006 -J ada@192.0.2.1 ada@{socket.gethostname()}`" in says()
    assert f"`ssh -N -L 6006:{socket.gethostname()}:6006 ada@192.0.2.1`" in says("--host", "0.0.0.0")
    monkeypatch.delenv("SSH_CONNECTION")
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login2")
    assert "`ssh -N -L 6006:node7:6006 ada@login2`" in says("--host", "node7")


def test_tensorboard_for_this_machine_says_nothing_about_others(
    run: rundir.RunDir, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(os, "execv", lambda _, argv: None)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert command.ends(EXIT_DONE, "tensorboard").err == ""
