"""Requests that `toolkit checkpoint` refuses, and damage that it names."""

from __future__ import annotations

import pytest

from toolkit.base import fsio
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEST
from toolkit.cli import main as cli
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
def test_a_word_too_many_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == EXIT_REQUEST
    assert f"{argv[-1].replace('=', ' ')}" in capsys.readouterr().err


def test_a_checkpoint_without_its_manifest_is_not_verified(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    fsio.make_dir(run.checkpoints / "step-00000010")
    assert cli.main(["checkpoint", "verify", run.id]) == EXIT_FAILED
    assert "step-00000010/manifest.json cannot be read: No such file" in capsys.readouterr().out
    assert cli.main(["checkpoint", "list", run.id]) == EXIT_DONE
    assert "damaged: it has no manifest.json" in capsys.readouterr().out
