"""The rows of `toolkit doctor --prove --gpus` where nothing works. tests/dist has it whole."""

from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import JobFailedError
from toolkit.config import JobConfig
from toolkit.plugins.site import evidence, resume_check

SECRET = "/home/ann/runs on node7"


def test_a_part_that_fails_ends_no_other_and_its_row_has_no_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise JobFailedError(SECRET)

    monkeypatch.setattr(evidence, "submit", refuse)
    monkeypatch.setattr(resume_check, "check", refuse)
    before = Path.cwd()
    _, rows = evidence.collect(JobConfig(), "local")
    assert Path.cwd() == before
    assert {row.is_proven for row in rows} == {False, None}
    assert {row.name: row.text for row in rows if row.is_proven is None} == {
        "other interfaces": "there are none",
        "preempt and resume": "no Slurm",
        "spare node used": "one node",
    }
    assert {row.text for row in rows if row.is_proven is False} == {
        "the run failed (JobFailedError)",
        "the check failed (JobFailedError)",
    }
    assert SECRET in caplog.text
