"""Requests that `toolkit checkpoint` refuses, and damage that it names."""

from __future__ import annotations

import pytest

from tests.command import Command
from toolkit.base import fsio
from toolkit.base.errors import EXIT_FAILED
from toolkit.files.rundir import RunDir


@pytest.mark.parametrize(
    "argv",
    [
        ["checkpoint", "verify", "digits", "10", "20"],
        ["checkpoint", "list", "digits", "10"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
@pytest.mark.usefixtures("run")
def test_a_word_too_many_is_refused(argv: list[str], command: Command) -> None:
    assert f"{argv[-1].replace('=', ' ')}" in command.refuses(*argv)


def test_a_checkpoint_without_its_manifest_is_not_verified(run: RunDir, command: Command) -> None:
    fsio.make_dir(run.checkpoints / "step-00000010")
    out = command.ends(EXIT_FAILED, "checkpoint", "verify", run.id).out
    assert "step-00000010/manifest.json cannot be read: No such file" in out
    assert "damaged: it has no manifest.json" in command("checkpoint", "list", run.id)
