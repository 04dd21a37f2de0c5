"""The copy of the sources that a run keeps: what was submitted is what runs, whatever happens to the checkout later."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from toolkit import fsio, logs
from toolkit.errors import RequestError

MAX_BYTES = 200 * 2**20
#: Left out where no git says what belongs to the project: these anywhere, ...
SKIPPED_DIRS = {".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
#: ... and these at the top only: further down, `data` is a package as likely as data.
SKIPPED_TOP_DIRS = {"venv", "runs", "data"}

log = logs.get(__name__)


def take(project: Path, code: Path) -> None:
    """Copy the project's sources into ``code`` with a note of the git revision and the uncommitted diff beside them.

    In a git checkout the project is what git tracks plus what it would not ignore; elsewhere every file outside
    well-known build and data folders. An existing copy is kept: a restarted job runs what it ran before. Raises
    RequestError above 200 MiB, naming the largest files.
    """
    if code.exists():
        return
    files = list(_project_files(project))
    _check_size(project, files)
    partial = code.with_name("code.partial")
    shutil.rmtree(partial, ignore_errors=True)
    fsio.make_dir(partial)
    for name in files:
        _copy(project / name, partial / name)
    _note_revision(project, partial)
    fsio.rename_dir(partial, code)


def environment(code: Path, environ: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    """The variables under which Python imports from ``code`` first.

    Without PYTHONSAFEPATH ``python -m`` would put the current folder, usually the edited checkout, before it.
    """
    paths = [str(code), *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def _git(project: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *args], capture_output=True, text=True, timeout=60, errors="surrogateescape"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _project_files(project: Path) -> Iterator[str]:
    """What git tracks, in submodules too, and would track. Where git lists nothing (a folder that a repository around
    it ignores) or refuses (one that belongs to somebody else), what lies there."""
    tracked = _git(project, "ls-files", "--cached", "--recurse-submodules", "-z") or ""
    others = _git(project, "ls-files", "--others", "--exclude-standard", "-z") or ""
    names = dict.fromkeys((tracked + others).split("\0")) if tracked or others else _walk(project)
    return (name for name in names if name and (project / name).is_file())


def _walk(project: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(project):
        skipped = SKIPPED_DIRS | SKIPPED_TOP_DIRS if Path(folder) == project else SKIPPED_DIRS
        folders[:] = [name for name in folders if name not in skipped]
        yield from (str((Path(folder) / name).relative_to(project)) for name in files)


def _check_size(project: Path, files: list[str]) -> None:
    sizes = sorted(((project / name).stat().st_size, name) for name in files)
    total = sum(size for size, _ in sizes)
    if total > MAX_BYTES:
        largest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for size, name in sizes[:-4:-1])
        raise RequestError(
            f"{project}: the sources to copy are {total / 2**20:.0f} MiB, more than {MAX_BYTES // 2**20}; "
            f"list data and outputs in .gitignore; the largest: {largest}"
        )


def _copy(source: Path, target: Path) -> None:
    fsio.make_dir(target.parent)
    shutil.copyfile(source, target)
    target.chmod(0o700 if os.access(source, os.X_OK) else fsio.FILE_MODE)


def _note_revision(project: Path, code: Path) -> None:
    """``SNAPSHOT.json`` and ``SNAPSHOT.diff``: which commit this is, and what was changed since."""
    revision = _git(project, "rev-parse", "HEAD")
    diff = _git(project, "diff", "HEAD") if revision else None
    note = {"project": str(project), "git_sha": revision and revision.strip(), "dirty": bool(diff)}
    fsio.write_json(code / "SNAPSHOT.json", note)
    if diff:
        fsio.write_atomic(code / "SNAPSHOT.diff", diff.encode(errors="surrogateescape"))
