"""The keys of the config in the help of all commands that take some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_keys import folder, lines  # noqa: F401
from toolkit.config import all_keys


@pytest.mark.parametrize("command", ["submit", "run", "supervise", "resume-check"])
def test_every_key_is_listed_within_the_width_of_a_terminal(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.yaml").write_text(f"job: job.py\nparams: {{width: 3}}\nname: {'n' * 99}\nnotify: [{'x' * 150}]\n")
    found = lines(capsys, command, "c.yaml", "-h")
    assert max(len(line) for line in found if "xxx" not in line) <= 120
    names = [line[2:].partition(":")[0] for line in found if line[:2] in ("  ", "* ") and line[2:3].strip()]
    own = {"params.width", "params.dropout", "params.block.heads"}
    assert set(names) == own | set(all_keys()) - {"params"}
