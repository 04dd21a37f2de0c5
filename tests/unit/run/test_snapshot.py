"""The sources that run are those that were submitted."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from tests.scale.snapshots import counted
from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.run.prepare import snapshot


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


def test_a_core_dump_is_no_source_whatever_its_size(project: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).read_bytes()[:64]  # an ELF file's header
    for name, kind in {"core": 4, "core.817": 4, "python.core": 4, "jobs/core.so": 3}.items():
        (project / name).write_bytes(program[:16] + kind.to_bytes(2, sys.byteorder) + program[18:])
    os.truncate(project / "core", 1 << 40)
    (project / "jobs/core").write_text("units of work\n")
    snapshot.take(project, tmp_path / "run/code")
    left_out = json.loads((tmp_path / "run/code/SNAPSHOT.json").read_text())["left_out"]
    assert left_out == dict.fromkeys(("core", "core.817", "python.core"), "a core dump")
    assert {p.name for p in (tmp_path / "run/code/jobs").iterdir()} == {"a.py", "core", "core.so"}


def test_without_git_every_file_outside_known_folders_is_copied(project: Path, tmp_path: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv/x").write_text("x")
    (project / "env/conda-meta").mkdir(parents=True)
    (project / "jobs/py311/bin").mkdir(parents=True)
    for path in ("env/bin", "jobs/py311/pyvenv.cfg", "jobs/py311/bin/x"):
        (project / path).touch()
    snapshot.take(project, tmp_path / "run/code")
    copied = {str(p.relative_to(tmp_path / "run/code")) for p in (tmp_path / "run/code").rglob("*") if p.is_file()}
    assert copied == {"jobs/a.py", "run.sh", ".gitignore", "weights.bin", "SNAPSHOT.json"}


def test_a_file_costs_few_calls_of_the_file_system(project: Path, tmp_path: Path) -> None:
    """On a network's disk each call is a round trip. 20,000 files of 16 calls took 96 s."""
    small, large = (counted(project, tmp_path / f"run{files}/code", files) for files in (100, 300))
    assert large["files"] - small["files"] == 200
    calls = {name: (large[name] - small[name]) / 200 for name in small if name != "files"}
    assert sum(calls.values()) < 4.5, calls


@pytest.mark.parametrize("listed", ["[]", "{", '{"\\u0000": ""}', "[" * 100_000, '{"run.sh": ""}'])
def test_notes_of_a_project_itself_are_not_those_of_a_laptop(project: Path, tmp_path: Path, listed: str) -> None:
    (project / "SNAPSHOT.json").write_text(json.dumps({"git_sha": "of another time", "dirty": True}))
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "a note")
    (project / snapshot.SENT).write_text(listed)
    snapshot.take(project, tmp_path / "code")
    assert (tmp_path / "code/jobs/a.py").exists() is (listed != '{"run.sh": ""}')
    note = json.loads((tmp_path / "code/SNAPSHOT.json").read_text())
    assert note["git_sha"] == git(project, "rev-parse", "HEAD").strip()


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


def test_too_much_to_copy_names_the_largest(project: Path, tmp_path: Path, change_limits: ChangeLimits) -> None:
    change_limits(snapshot_bytes=50)
    with pytest.raises(RequestError, match=r"(?s)the sources to copy are .*weights\.bin"):
        snapshot.take(project, tmp_path / "run/code")


def test_a_package_called_data_is_a_source_and_the_folder_data_is_not(project: Path, tmp_path: Path) -> None:
    """Without git, as in an unpacked archive, `toolkit/data` was left out. Every rank then failed at its import."""
    for name in ("data/mnist.bin", "runs/old/code/x.py", "jobs/data/set.py", "jobs/.git/config"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert (code / "jobs/data/set.py").exists()
    assert not [name for name in ("data", "runs", "jobs/.git") if (code / name).exists()]
    left_out = json.loads((code / "SNAPSHOT.json").read_text())["left_out"]
    assert left_out == dict.fromkeys(("data", "runs"), "a folder without modules, and outside git")


@pytest.mark.parametrize("name", ["data/sets.py", "data/sets/__init__.py"])
def test_a_package_called_data_at_the_top_is_a_source_too(project: Path, tmp_path: Path, name: str) -> None:
    (project / name).parent.mkdir(parents=True)
    (project / name).touch()
    snapshot.take(project, tmp_path / "run/code")
    assert (tmp_path / "run/code" / name).exists()


def test_a_git_that_takes_too_long_leaves_no_source_out(
    project: Path, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    """Before, the files that it tracks, or those that it does not, were missing in the copy."""
    git(project, "init", "-q")
    change_limits(git_s=0.0)
    with pytest.raises(RequestError, match="`git ls-files` takes more than"):
        snapshot.take(project, tmp_path / "run/code")
    assert not (tmp_path / "run").exists()


def test_the_repository_is_that_of_the_project_inside_a_hook_of_git_too(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (project, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        git(folder, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/.git/index"))
    (tmp_path / "other/.git/info/exclude").write_text("*.py\n")
    snapshot.take(project, tmp_path / "run/code")
    assert copied(tmp_path / "run/code") == {"jobs/a.py", "run.sh", ".gitignore"}


def test_a_folder_that_a_repository_around_it_ignores_is_copied_all_the_same(project: Path, tmp_path: Path) -> None:
    """For example below a home folder under git that ignores everything but dot files."""
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


SECRETS = [
    ".env",
    ".env.local",
    ".netrc",
    ".ssh/id_rsa",
    ".ssh/config",
    ".aws/credentials",
    "id_ed25519",
    "deploy.key",
    "sub/token.txt",
    "secrets.yaml",
    "kaggle.json",
    "own.pem",
]
HARMLESS = [".env.example", "ca.pem", "jobs/tokens.py", "environment.yml", "jobs/secrets.py", "gcloud/main.py"]


def copied(code: Path) -> set[str]:
    """Return every file in the copy, by way of links too."""
    found = [Path(folder) / name for folder, _, names in os.walk(code, followlinks=True) for name in names]
    return {str(path.relative_to(code)) for path in found} - {"SNAPSHOT.json", "SNAPSHOT.diff"}


@pytest.mark.parametrize("tracked", [True, False], ids=["git tracks them", "no git"])
def test_no_secret_is_copied_and_each_is_named(
    project: Path, tmp_path: Path, tracked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in SECRETS + HARMLESS:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("hunter2 -----BEGIN PRIVATE KEY-----" if name in SECRETS else "nothing\n")
    # a link with a harmless name must not lead to a secret
    (project / "settings").symlink_to(".env")
    if tracked:
        git(project, "init", "-q")
        git(project, "add", "-Af")
        git(project, "commit", "-qm", "first")
        (project / ".env").write_text("hunter2 again")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert copied(code) == {"jobs/a.py", "run.sh", ".gitignore", "weights.bin", *HARMLESS}
    everything = b"".join(path.read_bytes() for path in code.rglob("*") if path.is_file())
    assert b"hunter2" not in everything
    left_out = json.loads((code / "SNAPSHOT.json").read_text())["left_out"]
    assert {".env", ".ssh", ".aws", "own.pem", "settings"} <= left_out.keys()
    assert all(f"{name} (may hold secrets)" in caplog.text for name in (".env", ".ssh", ".aws"))


def test_a_private_key_is_in_no_diff_whatever_became_of_it(project: Path, tmp_path: Path) -> None:
    """The copy leaves it out; where it was changed, removed or renamed, git's diff would show it."""
    git(project, "init", "-q")
    for name in ("changed.pem", "removed.pem", "renamed.key"):
        (project / name).write_text("-----BEGIN PRIVATE KEY-----\n" + f"hunter2 of {name}\n" * 9)
    git(project, "add", "-Af")
    git(project, "commit", "-qm", "first")
    with (project / "changed.pem").open("a") as file:
        file.write("hunter2, too\n")
    git(project, "mv", "renamed.key", "notes.txt")
    with (project / "notes.txt").open("w") as file:
        file.write("hunter2 of renamed.key\n" * 8)
    (project / "removed.pem").unlink()
    (project / "jobs/a.py").write_text("A = 2\n")
    snapshot.take(project, tmp_path / "run/code")
    diff = (tmp_path / "run/code/SNAPSHOT.diff").read_text()
    assert "+A = 2" in diff
    assert "PRIVATE KEY" not in diff


def test_links_that_lead_to_each_other_do_not_prevent_a_copy(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.py").write_text("")
    (project / "one").symlink_to("two")
    (project / "two").symlink_to("one")
    snapshot.take(project, tmp_path / "code")
    assert (tmp_path / "code/job.py").exists()
    assert "one" in json.loads((tmp_path / "code/SNAPSHOT.json").read_text())["left_out"]


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_links_of_packages_arrive_and_lead_neither_out_nor_in_a_circle(
    project: Path, tmp_path: Path, with_git: bool, caplog: pytest.LogCaptureFixture
) -> None:
    outside, data = tmp_path / "shared" / "lib", tmp_path / "images"
    for folder in (outside / "inner", data):
        folder.mkdir(parents=True)
    (outside / "__init__.py").write_text("L = 1\n")
    (outside / "inner/deep.py").write_text("D = 1\n")
    # a copy that followed these two would never end
    (outside / "back").symlink_to(project)
    (outside / "self").symlink_to(outside)
    (data / "0.png").write_text("x")
    (project / "jobs/loop").symlink_to(".")
    (project / "alias").symlink_to("jobs")
    targets: dict[str, Path | str]
    targets = {"lib": outside, "twice": outside, "images": data, "all": "/", "gone": "/not/there"}
    for name, target in targets.items():
        (project / name).symlink_to(target)
    if with_git:
        git(project, "init", "-q")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert (code / "lib/inner/deep.py").read_text() == "D = 1\n"
    assert (code / "alias/a.py").read_text() == "A = 1\n"
    assert (code / "alias").readlink() == Path("jobs")
    assert (code / "twice/inner/deep.py").samefile(code / "lib/inner/deep.py")
    assert (code / "lib/back/run.sh").samefile(code / "run.sh")
    assert all(not path.is_symlink() or path.resolve().is_relative_to(code) for path in code.rglob("*"))
    left_out = json.loads((code / "SNAPSHOT.json").read_text())["left_out"]
    assert left_out.keys() == {"images", "all", "gone"}
    assert f"images (a link to {data}, which is not a Python package)" in caplog.text


def test_a_link_to_a_folder_above_the_project_is_left_out_unseen(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look into it may mount every user's home. It may also wait for a dead file server."""
    (project / "above").symlink_to(project.parent)
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("it was looked into"))
    snapshot.take(project, tmp_path / "run/code")
    assert json.loads((tmp_path / "run/code/SNAPSHOT.json").read_text())["left_out"].keys() == {"above"}


def test_a_repository_in_the_project_is_copied_and_an_empty_submodule_is_named(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Git lists the files of neither. Before, the job died at its import, after hours in the queue."""
    library = tmp_path / "library"
    for folder in (library, project / "nested"):
        folder.mkdir()
        (folder / "lib.py").write_text("L = 1\n")
        (folder / "junk.bin").write_text("x")
        (folder / ".gitignore").write_text("*.bin\n")
        git(folder, "init", "-q")
    git(library, "add", "-A")
    git(library, "commit", "-qm", "first")
    git(project, "init", "-q")
    for name in ("filled", "empty"):
        git(project, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), name)
    # as after a clone without --recurse-submodules
    git(project, "submodule", "--quiet", "deinit", "-f", "empty")
    (project / "filled/new.py").write_text("N = 1\n")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    wanted = {"nested/lib.py", "nested/.gitignore", "filled/lib.py", "filled/new.py", "filled/.gitignore"}
    assert copied(code) == {"jobs/a.py", "run.sh", ".gitignore", ".gitmodules", *wanted}
    assert "empty (an empty repository; `git submodule update --init` fills a submodule)" in caplog.text


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_neither_runs_nor_slurms_outputs_are_copied(
    project: Path, tmp_path: Path, with_git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(project / "out/of"))
    for name in ("out/of/digits/1/code/x.py", "out/of/digits/1/logs/a.log", "slurm-17.out", "out/often.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    if with_git:
        git(project, "init", "-q")
    snapshot.take(project, project / "out/of/digits/2/code")
    found = copied(project / "out/of/digits/2/code") - {"weights.bin"}
    assert found == {"jobs/a.py", "run.sh", ".gitignore", "out/often.py"}


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_the_runs_of_a_project_within_the_project_are_not_copied(project: Path, tmp_path: Path, with_git: bool) -> None:
    """They grow: after some runs each submission of the outer project was refused for its size."""
    run = "demo/runs/demo/20261127-135917-58024848"
    names = ("checkpoints/step-00000450/rank-00000.safetensors", ".code/1/demo.py", "config.yaml")
    for name in ("demo/demo.py", *(f"{run}/{each}" for each in names), "old/.sweeps/demo/.code/1/demo.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    (project / run / ".code/now").symlink_to("../../../.sweeps/demo/.code/1")
    if with_git:
        git(project, "init", "-q")
    code = tmp_path / "run/code"
    snapshot.take(project, code)
    assert copied(code) - {"weights.bin"} == {"jobs/a.py", "run.sh", ".gitignore", "demo/demo.py"}
    assert not list(code.rglob("now"))
    assert json.loads((code / "SNAPSHOT.json").read_text())["left_out"] == {}


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EACCES, "this user may not read it"),
        *((number, "it was gone before it was copied") for number in (errno.ENOENT, errno.EISDIR, errno.ENXIO)),
    ],
)
def test_a_file_that_cannot_be_copied_is_left_out_and_named(
    number: int,
    why: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Root may read all files, so the refusal is played. The others are what a build does meanwhile."""
    plain = fsio.make_dir

    def make_dir(path: Path, parents: int | None = None) -> Path:
        changing = project / "jobs/a.py"
        if changing.is_file():
            changing.unlink()
            if number == errno.EISDIR:
                changing.mkdir()
            elif number == errno.ENXIO:
                os.mkfifo(changing)
        return plain(path, parents)

    def refuse(path: Path, *most_bytes: int) -> bytes:
        if path == project / "jobs/a.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *most_bytes)

    if number == errno.EACCES:
        read = fsio.read_bytes
        monkeypatch.setattr(fsio, "read_bytes", refuse)
    else:
        monkeypatch.setattr(fsio, "make_dir", make_dir)
    snapshot.take(project, tmp_path / "run/code")
    assert f"jobs/a.py ({why})" in caplog.text
    assert (tmp_path / "run/code/run.sh").exists()
    assert not (tmp_path / "run/code/jobs/a.py").exists()
