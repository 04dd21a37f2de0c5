"""Packages: their content, whose files are trusted, and two jobs that make one at once."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from toolkit.base import fsio
from toolkit.plugins.staging import package
from toolkit.plugins.staging.package import Package, PackageSource, PackRequest, StagingError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a" * 5000)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def packed(source: Path, cache: Path, program: str | None = None) -> Package:
    return package.pack(PackageSource(str(source), program), PackRequest(str(cache), ()))


def members(made: Package) -> dict[str, str]:
    """Return the target of each member, by name. It is empty unless the member is a link."""
    with tarfile.open(made.file) as tar:
        return {member.name: member.linkname for member in tar}


def test_a_cache_that_others_may_write_to_is_refused(source: Path, cache: Path) -> None:
    made = packed(source, cache)
    cache.chmod(0o777)
    for path in (source, source / "a.txt"):
        with pytest.raises(StagingError, match=r"copies for the nodes: .*cache belongs to .* and has mode 0777"):
            packed(path, cache)
    cache.chmod(0o700)
    cache.parent.chmod(0o777)
    with pytest.raises(StagingError, match="others may write into"):
        packed(source, cache)
    cache.parent.chmod(0o700)
    assert packed(source, cache) == made


@pytest.mark.parametrize("name", ["", "a.txt"])
def test_a_record_that_names_another_file_counts_for_nothing(source: Path, cache: Path, name: str) -> None:
    made = packed(source / name, cache)
    precious = cache.parent / "precious"
    precious.write_bytes(bytes(made.size_bytes))
    fsio.write_json(cache / f"{made.key}.json", made.replace(file=str(precious)).to_json())
    again = packed(source / name, cache)
    assert again.file == made.file
    package.discard(again)
    assert precious.exists()


def test_data_is_packed_with_folders_named_as_those_of_conda(source: Path, cache: Path) -> None:
    for name in ("envs", "pkgs"):
        (source / name).mkdir()
        (source / name / "x").touch()
    assert {"envs/x", "pkgs/x"} <= members(packed(source, cache)).keys()
    of_environment = members(packed(source, cache, program="bin/python"))
    assert of_environment["envs"] == str(source / "envs")
    assert "envs/x" not in of_environment


def test_a_relative_link_out_of_the_source_becomes_absolute(source: Path, cache: Path) -> None:
    (source.parent / "outside").write_text("outside")
    links = {"out": "../outside", "sub/out": "../../outside", "back": "../data/a.txt", "dangling": "../none"}
    inside = {"in": "a.txt", "sub/in": "../a.txt", "sub/top": "..", "device": "/dev/null"}
    for name, target in {**links, **inside}.items():
        (source / name).symlink_to(target)
    targets = members(packed(source, cache))
    assert {name: targets[name] for name in inside} == inside
    for name in links:
        assert Path(targets[name]).is_absolute()
        assert Path(targets[name]).resolve() == (source / name).resolve()


def test_two_jobs_may_make_the_same_package_at_once(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, others = package._add, list[Package]()
    read_while_replaced: list[bytes] = []

    def add_after_the_other(tar: tarfile.TarFile, path: Path, entry: package._PackageEntry) -> None:
        if not others:
            monkeypatch.setattr(package, "_add", add)
            others.append(packed(source, cache))
            read_while_replaced.append(Path(others[0].file).read_bytes())
        add(tar, path, entry)

    monkeypatch.setattr(package, "_add", add_after_the_other)
    made = packed(source, cache)
    assert made == others[0]
    assert Path(made.file).read_bytes() == read_while_replaced[0]
    assert sorted(path.name for path in cache.iterdir()) == [f"{made.key}.json", f"{made.key}.tar"]


def test_a_change_while_packing_leaves_the_package_of_another_job(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = packed(source, cache)
    (cache / f"{made.key}.json").unlink()  # the other job has not yet written it
    add = package._add

    def add_and_change(tar: tarfile.TarFile, path: Path, entry: package._PackageEntry) -> None:
        add(tar, path, entry)
        os.utime(source / "a.txt", (0, 0))

    monkeypatch.setattr(package, "_add", add_and_change)
    with pytest.raises(StagingError, match="was changed while it was packed"):
        packed(source, cache)
    assert [path.name for path in cache.iterdir()] == [f"{made.key}.tar"]
