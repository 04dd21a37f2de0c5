"""Atomic, private, durable."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from toolkit import fsio


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_modes_are_private_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = fsio.make_dir(tmp_path / "a/b")
        fsio.write_atomic(folder / "file", b"x")
        fsio.append_json_line(folder / "lines", 1)
    finally:
        os.umask(before)
    assert [mode(tmp_path / "a"), mode(folder)] == [0o700, 0o700]
    assert [mode(folder / "file"), mode(folder / "lines")] == [0o600, 0o600]


def test_a_failed_write_leaves_the_old_content_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    fsio.write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        fsio.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_cut_off_by_a_crash_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    fsio.append_json_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": ')
    assert fsio.read_json_lines(path) == [{"a": 1}]
    fsio.append_json_line(path, {"c": 3})
    assert fsio.read_json_lines(path) == [{"a": 1}, {"c": 3}]


def test_missing_files_read_as_nothing(tmp_path: Path) -> None:
    assert fsio.read_json(tmp_path / "none") is None
    assert fsio.read_json_lines(tmp_path / "none") == []
