"""Compiled kernels are kept on the node where the home is shared by all nodes."""

import os
import pwd
from importlib import metadata
from pathlib import Path

import pytest

from toolkit.base import this_node, trust


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home and a folder for temporary files that all nodes share, and a disk of the node."""
    for name in ("shared-home", "shared-temp", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setattr(this_node, "file_system", lambda path: "nfs4" if path.name.startswith("shared-") else "ext4")
    monkeypatch.setattr(this_node, "staging_folders", lambda stage_dir, environ: [tmp_path / "disk"])
    return {"HOME": str(tmp_path / "shared-home"), "TMPDIR": str(tmp_path / "disk")}


def test_the_cache_in_a_shared_home_moves_to_a_private_folder_of_the_node(
    environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / f"disk/toolkit-caches-{os.getuid()}/torch-{metadata.version('torch')}"
    assert this_node.cache_variables(environ) == {"TRITON_CACHE_DIR": str(folder / "triton")}
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    # torch's own is in the folder for temporary files.
    environ["TMPDIR"] = str(tmp_path / "shared-temp")
    both = this_node.cache_variables(environ)
    assert both == {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor"),
    }
    assert this_node.cache_variables(environ | both) == {}


def test_without_a_home_no_cache_is_moved_from_it(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Directory services may be away, and containers have users without a name."""
    del environ["HOME"]
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert this_node.cache_variables(environ) == {}
    assert trust.cache_dir() is None


def test_what_the_user_has_set_stays(environ: dict[str, str], tmp_path: Path) -> None:
    environ["TRITON_CACHE_DIR"] = str(tmp_path / "shared-home/mine")
    assert this_node.cache_variables(environ) == {}


def test_a_cache_on_a_disk_of_the_node_stays(environ: dict[str, str], tmp_path: Path) -> None:
    environ["HOME"] = str(tmp_path / "disk")
    assert this_node.cache_variables(environ) == {}


def test_a_folder_that_others_may_write_is_not_used(environ: dict[str, str], tmp_path: Path) -> None:
    """Its kernels are programs, which the ranks would run."""
    (tmp_path / f"disk/toolkit-caches-{os.getuid()}").mkdir()
    (tmp_path / f"disk/toolkit-caches-{os.getuid()}").chmod(0o777)
    assert this_node.cache_variables(environ) == {}
