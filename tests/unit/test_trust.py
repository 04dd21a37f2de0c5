"""Who may write where. The one check behind run folders, second places, rendezvous files and other users' sources."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from tests.unit.owners import STRANGER, give
from toolkit.base import trust
from toolkit.base.errors import RequestError
from toolkit.base.trust import TRUST_VARIABLE, own_part, refuse_untrusted
from toolkit.files import rundir


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "place"
    folder.mkdir(parents=True, mode=0o755)
    return folder


def refused(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        refuse_untrusted(path, "the folder for runs")
    return str(caught.value)


def test_what_is_ours_all_the_way_is_believed(place: Path) -> None:
    refuse_untrusted(place, "x")
    refuse_untrusted(place / "not" / "yet", "x")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_a_place_that_others_may_write_is_refused_with_what_to_do(place: Path, mode: int) -> None:
    place.chmod(mode)
    words = refused(place)
    assert words.startswith(f"the folder for runs: {place} belongs to")
    assert f"mode {mode:04o}" in words
    assert "chmod go-w" in words


def test_a_folder_above_may_be_open_to_all_if_it_is_sticky(place: Path) -> None:
    place.parent.chmod(0o777)
    assert f"others may write into {place.parent} (mode 0777)" in refused(place)
    place.parent.chmod(0o1777)
    refuse_untrusted(place, "x")


def test_a_group_that_may_write_is_refused_until_it_is_trusted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.chmod(0o775)
    give(os.geteuid(), [place.parent], monkeypatch, gid=STRANGER)
    assert refused(place).endswith(f"set {TRUST_VARIABLE}=@{STRANGER}")
    monkeypatch.setenv(TRUST_VARIABLE, f"nobody, @{STRANGER}0")
    refused(place)
    monkeypatch.setenv(TRUST_VARIABLE, f"nobody, @{STRANGER}")
    refuse_untrusted(place, "x")


@pytest.mark.parametrize("where", ["place", "above"])
def test_what_somebody_else_owns_is_refused_until_they_are_trusted(
    place: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place if where == "place" else place.parent
    give(STRANGER, [path], monkeypatch)
    words = refused(place)
    assert f"{path} belongs to {STRANGER}" in words
    assert words.endswith(f"or, if you trust {STRANGER}, set {TRUST_VARIABLE}={STRANGER}")
    monkeypatch.setenv(TRUST_VARIABLE, str(STRANGER))
    refuse_untrusted(place, "x")
    monkeypatch.delenv(TRUST_VARIABLE)
    trust.trust_owner(path)
    refuse_untrusted(place, "x")


def test_a_link_counts_with_its_owner_and_with_the_way_that_it_leads(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "open" / "ours"
    elsewhere.mkdir(parents=True)
    (place / "link").symlink_to("../../open/ours")
    refuse_untrusted(place / "link", "x")
    refuse_untrusted(place / "link" / "deeper", "x")
    elsewhere.parent.chmod(0o777)
    assert str(elsewhere.parent) in refused(place / "link" / "deeper")
    elsewhere.parent.chmod(0o755)
    give(STRANGER, [place / "link"], monkeypatch)
    assert f"{place / 'link'} belongs to {STRANGER}" in refused(place / "link" / "deeper")


def test_links_in_a_circle_are_the_systems_own_error(place: Path) -> None:
    (place / "one").symlink_to("two")
    (place / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        refuse_untrusted(place / "one" / "x", "x")


def test_root_and_the_owner_of_the_file_system_are_trusted_above(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a file system's first folder could do anything anyway.

    Examples are a bind mount into a container, or a project's file system.
    """
    give(STRANGER, [place.parent], monkeypatch)
    monkeypatch.setattr(trust, "_file_system_owner", lambda path, device: STRANGER)
    refuse_untrusted(place, "x")
    give(STRANGER, [place], monkeypatch)
    assert f"{place} belongs to {STRANGER}" in refused(place)  # but not for what is in question itself


def test_a_user_that_is_not_there_cannot_be_trusted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "no-such-user")
    assert "no user 'no-such-user'" in refused(place)


def test_users_of_one_folder_have_a_part_each_and_its_owner_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    assert own_part(shared) == shared  # it will be ours
    shared.mkdir()
    shared.chmod(0o1777)
    assert own_part(shared) == shared
    give(STRANGER, [shared], monkeypatch)
    assert own_part(shared) == shared / trust.user_name(os.geteuid())
    shared.chmod(0o755)
    assert own_part(shared) == shared


def test_in_a_shared_folder_runs_jobs_and_rendezvous_files_are_each_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    give(STRANGER, [shared], monkeypatch)
    monkeypatch.setenv("TOOLKIT_RUNS", str(shared))
    monkeypatch.setattr(trust, "_file_system_owner", lambda path, device: STRANGER)
    run = rundir.create("digits")
    assert run.path.parent == shared / trust.user_name(os.geteuid()) / "digits"
    rundir.remember_job(run, "box-7")
    assert rundir.run_of_job("box-7") == run
    assert [path.name for path in shared.iterdir()] == [trust.user_name(os.geteuid())]


def test_no_run_is_made_where_somebody_else_could_replace_it(tmp_path: Path) -> None:
    """Users who may write into `runs/digits` could replace the sources of a run there."""
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits").chmod(0o777)
    with pytest.raises(RequestError, match=r"TOOLKIT_RUNS.*mode 0777"):
        rundir.create("digits", tmp_path)
    assert list((tmp_path / "digits").iterdir()) == []


def test_a_restarted_job_goes_on_with_no_run_that_others_may_write(tmp_path: Path) -> None:
    run = rundir.create("digits", tmp_path)
    rundir.remember_job(run, "box-7")
    run.path.chmod(0o777)
    with pytest.raises(RequestError, match=r"the run of job box-7: .*mode 0777"):
        rundir.run_of_job("box-7", tmp_path)


@pytest.mark.parametrize(
    ("name", "members", "is_own"),
    [("ann", [], True), ("ann", ["ann"], True), ("ann", ["ann", "bob"], False), ("anns", [], False)],
)
def test_a_group_with_another_name_or_member_is_not_the_users_own(
    name: str, members: list[str], is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user a group, and a umask that lets the group write."""
    me = pwd.struct_passwd(("ann", "x", 4711, 4711, "", "/", "sh"))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))
    assert trust._is_own_group(4711) is is_own
    assert not trust._is_own_group(4712)
