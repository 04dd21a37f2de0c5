"""Atomic, private, durable."""

import errno
import fcntl
import json
import os
import signal
import stat
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.file_operations import file_operations
from tests.process_limits import ChangeLimits
from tests.unit.disks import SmallDisk, no_file_longer_than
from toolkit.base import fsio
from toolkit.base.fsio import PatientFile


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


def test_what_a_library_writes_into_a_new_folder_is_private_too(tmp_path: Path) -> None:
    """torch's DCP writes its files with the user's umask."""
    before = os.umask(0)
    try:
        with fsio.atomic_path(tmp_path / "out") as path:
            (path / "deep").mkdir(parents=True)
            (path / "deep/file").write_text("x")
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("out", "out/deep", "out/deep/file")] == [0o700, 0o700, 0o600]


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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_disk_that_cannot_flush_folders_takes_files_all_the_same(tmp_path: Path, number: int) -> None:
    def refuse_folders(operation: str, path: str) -> None:
        if operation == "fsync" and Path(path).is_dir():
            raise OSError(number, os.strerror(number), path)

    with nullcontext() if number == errno.EINVAL else pytest.raises(OSError), file_operations(refuse_folders):
        fsio.write_atomic(tmp_path / "file", "new")
        fsio.make_private_and_sync(tmp_path)
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize(
    ("torn", "kept"),
    [(b'{"b": ', b""), (b"\0" * 100, b""), (b'{"b": 2}', b'{"b": 2}\n')],
    ids=["cut off", "NULs", "without its break"],
)
def test_a_line_replaces_a_torn_one(tmp_path: Path, torn: bytes, kept: bytes) -> None:
    path = tmp_path / "lines"
    fsio.append_json_line(path, {"a": 1})
    with path.open("ab") as file:
        file.write(torn)
    fsio.append_json_line(path, {"c": 3})
    assert path.read_bytes() == b'{"a": 1}\n' + kept + b'{"c": 3}\n'


def test_a_file_set_aside_keeps_its_content_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    aside = fsio.set_aside(tmp_path / "file")
    assert aside.name.startswith("file.damaged-")
    assert [path.name for path in tmp_path.iterdir()] == [aside.name]
    assert aside.read_text() == "x"


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e305, -1e305])
def test_a_diverged_loss_becomes_null_however_deep_it_lies(tmp_path: Path, bad: float) -> None:
    value = {"a": bad, "b": [1.5, (bad, {"c": bad})], "d": "nan", "e": True, "f": 3}
    expected = {"a": None, "b": [1.5, [None, {"c": None}]], "d": "nan", "e": True, "f": 3}
    fsio.write_json(tmp_path / "file", value)
    fsio.append_json_line(tmp_path / "lines", value)
    for name in ("file", "lines"):
        assert json.loads((tmp_path / name).read_text(), parse_constant=refuse) == expected


def test_a_line_that_does_not_fit_on_the_disk_is_an_error_and_not_half_a_line(tmp_path: Path) -> None:
    """The kernel takes what fits and calls that a success. The refusal comes with the next byte."""
    path = tmp_path / "lines"
    fsio.append_json_line(path, {"attempt": 1})
    with no_file_longer_than(path.stat().st_size + 5), pytest.raises(OSError, match="File too large"):
        fsio.append_json_line(path, {"attempt": 2})
    assert path.read_text() == '{"attempt": 1}\n'
    fsio.append_json_line(path, {"attempt": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"attempt": 1}, {"attempt": 2}]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    disk = SmallDisk()
    monkeypatch.setattr(os, "pwrite", disk)
    return disk


RECORDS = [json.dumps({"step": step, "loss": 1 / (step + 1)}).encode() + b"\n" for step in range(6)]


def test_what_the_kernel_has_taken_of_a_record_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = PatientFile(path)
    file.write(RECORDS[0] + RECORDS[1])
    with no_file_longer_than(len(RECORDS[0]) + 3):
        file.flush()
        assert path.stat().st_size == len(RECORDS[0]) + 3
        file.sync()
    file.write(RECORDS[2])
    file.sync()
    assert path.read_bytes() == b"".join(RECORDS[:3])
    file.close()


def test_a_file_goes_on_at_its_end(tmp_path: Path) -> None:
    for record in RECORDS:
        file = PatientFile(tmp_path / "file")
        file.write(record)
        file.close()
    assert (tmp_path / "file").read_bytes() == b"".join(RECORDS)
    assert mode(tmp_path / "file") == 0o600


def test_a_second_close_does_not_close_what_somebody_else_has_opened_since(tmp_path: Path) -> None:
    file = PatientFile(tmp_path / "file")
    file.close()
    with (tmp_path / "other").open("w") as other:  # gets the number that has become free
        file.close()
        other.write("x")
    assert (tmp_path / "other").read_text() == "x"


def test_a_full_disk_and_its_end_are_each_said_once(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    file = PatientFile(tmp_path / "file")
    disk.room = 3
    for record in RECORDS:
        file.write(record)
        file.flush()
    disk.room = None
    for _ in range(2):
        file.flush()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    began, ended = (record.getMessage() for record in caplog.records)
    assert f"{tmp_path / 'file'}: No space left on device" in began
    assert f"{tmp_path / 'file'}: written after" in ended
    assert "No space left on device" in ended  # the line above may be what the disk did not take
    file.close()


def test_what_is_lost_because_the_disk_is_full_at_the_end_is_said(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    file = PatientFile(tmp_path / "file")
    disk.room = 10
    file.write(RECORDS[0])
    file.close()
    assert f"the last {len(RECORDS[0]) - 10} bytes are lost" in caplog.records[-1].getMessage()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.binary(max_size=20)),
        st.tuples(st.just("truncate"), st.integers(0, 80)),
        st.tuples(st.just("room"), st.none() | st.integers(0, 30)),
        st.tuples(st.sampled_from(["flush", "sync"]), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(before=st.binary(max_size=20), actions=ACTIONS)
def test_the_file_is_at_every_moment_a_beginning_of_what_a_bytearray_would_hold(
    before: bytes, actions: list[tuple[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path, model, disk = Path(folder) / "file", bytearray(before), SmallDisk()
        path.write_bytes(before)
        patch.setattr(os, "pwrite", disk)
        patch.setattr(os, "fsync", lambda fd: None)  # hundreds of flushes to a busy disk take seconds
        file = PatientFile(path)
        for action, value in actions:
            if action == "write":
                file.write(value)
                model += value
            elif action == "truncate":
                file.truncate(value)
                del model[value:]
            elif action == "room":
                disk.room = value
            else:
                getattr(file, action)()
                assert disk.room is not None or path.read_bytes() == model
            assert file.size == len(model)
            assert model.startswith(path.read_bytes())
        disk.room = None
        file.close()
        assert path.read_bytes() == model


def test_a_long_file_is_brought_to_the_disk_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Each piece is a sign of life. None is given before the kernel has the piece on the disk."""
    change_limits(written_piece_bytes=100)
    said: list[str] = []
    sync = os.fdatasync

    def fdatasync(fd: int) -> None:
        sync(fd)
        said.append("on the disk")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    content: list[bytes | memoryview] = [bytes(range(250)), b"x" * 30, memoryview(b"y" * 40)]
    fsio.write_stream(tmp_path / "file", content, lambda: said.append("moved"))
    assert (tmp_path / "file").read_bytes() == b"".join(content)
    assert said == ["on the disk", "moved"] * 3 + ["moved"]


def seen_in(write: Callable[[], object]) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    with file_operations(lambda name, path: seen.append((name, Path(path).name.partition(".tmp-")[0]))):
        write()
    return seen


def test_each_write_is_on_the_disk_before_and_after_its_rename(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    seen = seen_in(lambda: fsio.write_atomic(folder / "file", "x"))
    assert seen[-3:] == [("fsync", ".file"), ("replace", ".file"), ("fsync", "folder")]
    seen = seen_in(lambda: fsio.rename_dir(folder, tmp_path / "other"))
    assert seen == [("fsync", "folder"), ("rename", "folder"), ("fsync", tmp_path.name)]
    seen = seen_in(lambda: fsio.append_json_line(tmp_path / "lines", 1))
    assert seen[-1] == ("fsync", "lines")


def test_a_users_umask_is_kept_for_what_their_own_programs_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fsio.UMASK_VARIABLE, raising=False)
    os.umask(0o027)
    fsio.set_private_umask()
    fsio.set_private_umask()  # as in a child of such a process
    assert (os.umask(0o077), fsio.users_umask()) == (0o077, "027")
    fsio.restore_umask()
    assert os.umask(0o022) == 0o027
    monkeypatch.setenv(fsio.UMASK_VARIABLE, "0002")  # as bash prints it
    fsio.restore_umask()
    assert os.umask(0o022) == 0o002
    monkeypatch.setenv(fsio.UMASK_VARIABLE, "nonsense")
    assert fsio.users_umask() == "022"


def test_a_file_that_another_holds_is_read_when_it_gives_it_up(tmp_path: Path) -> None:
    """A file server holds a file for one of its clients by a lease, and asks for it by a signal."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    holder = os.open(path, os.O_RDWR)
    before = signal.signal(signal.SIGIO, lambda number, frame: os.close(holder))
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert fsio.read_bytes(path) == b"x"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(holder)
    finally:
        signal.signal(signal.SIGIO, before)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR])
def test_what_is_no_file_is_neither_opened_nor_waited_for(tmp_path: Path, flags: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(OSError, match=str(path)) as refused:
            fsio.open_regular(str(path), flags)
        assert refused.value.errno == errno.ENXIO


def test_a_folder_that_another_process_removes_too_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, what the other one had not removed yet stayed, without an error."""
    folder, unlink = tmp_path / "folder", os.unlink
    folder.mkdir()
    for name in "abcd":
        (folder / name).touch()

    def both(path: str, *args: object, **options: Any) -> None:
        unlink(path, *args, **options)
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", both)
    fsio.remove_tree(folder)
    assert not folder.exists()
    fsio.remove_tree(folder)


@pytest.mark.parametrize("has_links", [True, False])
def test_files_are_as_they_were_after_an_error_also_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted")))
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("before")
    with suppress(ZeroDivisionError), fsio.unchanged_on_error(there, new, unless=lambda: False):
        fsio.write_atomic(there, "after")
        fsio.write_atomic(new, "after")
        fsio.write_atomic(there, str(1 / 0))
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert there.read_text() == "before"
