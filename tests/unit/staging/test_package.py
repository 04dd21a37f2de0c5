"""Packages: what is in them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from toolkit.staging import package
from toolkit.staging.package import Package, PackageSource, PackRequest


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
