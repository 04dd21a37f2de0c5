"""The adapters' names need their libraries, and an error names the missing one."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import is_loop
from toolkit.plugins import integrations


def test_importing_the_package_loads_neither_torch_nor_a_library() -> None:
    code = (
        "import sys, toolkit.plugins.integrations; "
        "assert not {'torch', 'lightning', 'transformers', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", [None, "2.5.9", "1.99"])
def test_a_library_that_is_missing_or_too_old_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def installed(library: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(library)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ConfigError) as refused:
        _ = integrations.LightningCallback
    assert str(refused.value) == (
        f"LightningCallback needs lightning 2.6 or newer, and {version or 'none'} is installed: "
        "pip install 'slurm-batch-toolkit[integrations]'"
    )


def test_a_name_that_is_not_there_is_no_library() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'KerasCallback'"):
        _ = integrations.KerasCallback


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("from toolkit.plugins.integrations import AccelerateRun\nrun = AccelerateRun(None)\n", True),
        ("from toolkit.plugins import integrations as by\ncallbacks = [by.LightningCallback()]\n", True),
        ("import toolkit\n\nwith toolkit.start() as run:\n    pass\n", True),
        ("import lightning\n", False),
        ("from toolkit import submit\n", False),
    ],
)
def test_a_script_with_an_adapter_is_submitted_as_a_loop_of_ones_own(tmp_path: Path, text: str, is_one: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert is_loop("train.py", tmp_path) is is_one
