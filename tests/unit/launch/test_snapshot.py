"""What was submitted is what runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from toolkit.errors import RequestError
from toolkit.launch import snapshot


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    (project / "jobs").mkdir(parents=True)
    (project / "jobs/a.py").write_text("A = 1\n")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / ".gitignore").write_text("*.bin\n")
    (project / "weights.bin").write_bytes(b"x" * 100)
    return project


def test_git_says_what_belongs_and_the_diff_is_kept(project: Path, tmp_path: Path) -> None:
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "first")
    (project / "jobs/a.py").write_text("A = 2\n")
    (project / "jobs/new.py").write_text("B = 1\n")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert (code / "jobs/a.py").read_text() == "A = 2\n"
    assert (code / "jobs/new.py").exists()
    assert not (code / "weights.bin").exists()
    note = json.loads((code / "SNAPSHOT.json").read_text())
    assert note["git_sha"] == git(project, "rev-parse", "HEAD").strip()
    assert note["dirty"] is True
    assert "+A = 2" in (code / "SNAPSHOT.diff").read_text()


def test_without_git_every_file_outside_known_folders_is_copied(project: Path, tmp_path: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv/x").write_text("x")
    snapshot.take(project, tmp_path / "run/code")
    copied = {str(p.relative_to(tmp_path / "run/code")) for p in (tmp_path / "run/code").rglob("*") if p.is_file()}
    assert copied == {"jobs/a.py", "run.sh", ".gitignore", "weights.bin", "SNAPSHOT.json"}


def test_an_existing_copy_is_kept(project: Path, tmp_path: Path) -> None:
    snapshot.take(project, tmp_path / "run/code")
    (project / "jobs/a.py").write_text("A = 3\n")
    snapshot.take(project, tmp_path / "run/code")
    assert (tmp_path / "run/code/jobs/a.py").read_text() == "A = 1\n"


def test_a_copy_that_was_interrupted_does_not_block_the_next(project: Path, tmp_path: Path) -> None:
    (tmp_path / "run/code.partial").mkdir(parents=True)
    (tmp_path / "run/code.partial/left").write_text("x")
    snapshot.take(project, tmp_path / "run/code")
    assert not (tmp_path / "run/code/left").exists()


def test_too_much_to_copy_names_the_largest(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_BYTES", 50)
    with pytest.raises(RequestError, match=r"weights\.bin"):
        snapshot.take(project, tmp_path / "run/code")


def test_a_package_called_data_is_a_source_and_the_folder_data_is_not(project: Path, tmp_path: Path) -> None:
    """Without git, as in an unpacked archive: `toolkit/data` was left out, and every rank failed on it."""
    for name in ("data/mnist.bin", "runs/old/code/x.py", "jobs/data/set.py", "jobs/.git/config"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert (code / "jobs/data/set.py").exists()
    assert not [name for name in ("data", "runs", "jobs/.git") if (code / name).exists()]


def test_a_folder_that_a_repository_around_it_ignores_is_copied_all_the_same(project: Path, tmp_path: Path) -> None:
    """A home folder under git that ignores everything but dot files."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("*\n")
    snapshot.take(project, tmp_path / "run/code")
    assert (tmp_path / "run/code/jobs/a.py").exists()


def test_the_files_of_a_submodule_are_copied(project: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").write_text("L = 1\n")
    for folder in (library, project):
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "first")
    git(project, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "vendored")
    snapshot.take(project, tmp_path / "run/code")
    assert (tmp_path / "run/code/vendored/lib.py").exists()
