"""The config in a run's folder has one meaning wherever, and whenever, it is read."""

from pathlib import Path

import pytest

from toolkit.config import JobConfig, load_config
from toolkit.files import origin, rundir
from toolkit.run.prepare.new_run import new_run


def test_an_origin_by_name_is_the_run_that_had_it_when_this_one_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    source = rundir.create("digits")
    source.config.write_text("")
    (source.checkpoints / "step-00000001").mkdir()
    (source.checkpoints / "step-00000001/manifest.json").write_text("")
    config = JobConfig(name="digits")
    config.model.init_from = "digits"
    kept = load_config(new_run(config, None).config, site=False).model.init_from
    assert kept == str(source.path)
    assert origin.find(kept) == origin.WeightsOrigin(origin.RUN, source.path)
