"""Bad input ends in one line that names the fault. It used to end in a traceback or silence."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE
from toolkit import config as configs
from toolkit.base.errors import EXIT_DONE, ConfigError, RequestError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.manifest import CorruptCheckpointError
from toolkit.config import job_module
from toolkit.config.schema import JobConfig
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation


def test_a_terminal_without_an_umlaut_shows_an_escape_instead(run: RunDir) -> None:
    run.write_result(RunResult.from_json({"state": "failed", "why": "the disk of Müller is full"}))
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    argv = [sys.executable, "-m", "toolkit", "status", run.id]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE * 60)
    assert (done.returncode, done.stderr) == (EXIT_DONE, "")
    assert r"the disk of M\xfcller is full" in done.stdout


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (b"def main(config:\n", "line 1: cannot be imported as Python: '(' was never closed"),
        (b"x = '\xe9'\ndef main(config): ...\n", "cannot be imported as Python: (unicode error) 'utf-8' codec"),
        (b"\0", "cannot be imported as Python: source code string cannot contain null bytes"),
        (b"(" * 5000, "cannot be imported as Python: too many nested parentheses"),
    ],
    ids=["syntax", "encoding", "NUL", "nested"],
)
def test_a_job_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, source: bytes, says: str) -> None:
    (tmp_path / "work.py").write_bytes(source)
    with pytest.raises(ConfigError) as caught:
        job_module.check_job(JobConfig(job="work"), tmp_path)
    assert str(caught.value).startswith(f"job: {tmp_path / 'work.py'}")
    assert says in str(caught.value)


def test_a_job_file_in_another_declared_encoding_is_read(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\ndef main(config): ...\n")
    job_module.check_job(JobConfig(job="work"), tmp_path)


def test_a_package_around_a_job_is_read_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/__init__.py").write_text("1 / 0")
    (tmp_path / "tasks/work.py").write_text("def main(config): ...")
    job_module.check_job(JobConfig(job="tasks.work"), tmp_path)
    (tmp_path / "tasks/__init__.py").write_text("\nimport")
    with pytest.raises(ConfigError, match=r"job: .*tasks/__init__\.py, line 2: cannot be imported as Python"):
        job_module.check_job(JobConfig(job="tasks.work"), tmp_path)


@pytest.mark.parametrize("name", ["SLURM_RESTART_COUNT", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"])
@pytest.mark.parametrize("text", ["many", "-1", "1.5", "9" * 5000])
def test_a_number_of_slurms_environment_that_is_none_is_named(name: str, text: str) -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", name: text}
    with pytest.raises(RequestError, match=f"{name}='{text[:80]}' is not a whole number"):
        Allocation.slurm(environ)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.root", "/" + "x" * 300), ("model.init_from", "x" * 5000), ("checkpoint.copy_to", "/" + "x" * 300)],
    ids=["data.root", "init_from", "copy_to"],
)
def test_a_path_that_no_file_system_takes_is_refused_by_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*File name too long"):
        configs.validate(configs.load_config(None, [f"{key}={value}"], site=False))


OBJECTS = ("versions", "meta", "files", "tensors", "values")
MANIFEST: dict[str, Any] = {"step": 1, "world_size": 1, **{key: {} for key in OBJECTS}, "headers": []}
NO_META = [{"metrics": [1]}, {"metrics": {"x": "y"}}, {"identity": 5}]
NO_HEADERS: list[Any] = [None, [1], [[]], [{}], 5, "x"]
NO_OBJECTS = [None, [], [1], 5, "x"]


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        *((key, odd) for key in OBJECTS for odd in NO_OBJECTS),
        *(("meta", odd) for odd in NO_META),
        *(("headers", odd) for odd in NO_HEADERS),
        *((key, {"rank-00000.safetensors": odd}) for key in ("files", "tensors", "values") for odd in NO_OBJECTS),
    ],
)
def test_a_manifest_of_another_shape_is_damage(key: str, odd: Any) -> None:
    raw = manifests._frame(2, json.dumps({**MANIFEST, key: odd}).encode())
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is not a manifest of format 2"):
        manifests.decode(raw, Path("manifest.json"))
