"""The commands that ``cluster.container`` makes, word by word."""

from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.slurm.container import Container, Image, outermost, parse, refuse_missing

FOLDERS = ("/runs", "/home/me/project")
RANK = ["toolkit", "run", "/runs/x/config.yaml"]


def container(image: Image, gpus: tuple[str, ...] = ()) -> Container:
    return Container(image, FOLDERS, workdir="/home/me/project", code="/runs/x/code", gpus=gpus)


def test_apptainer_runs_the_images_python_with_the_runs_code_and_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    inside = container(Image("apptainer", "/images/torch.sif"), ("--nv",))
    assert inside.command(RANK) == [
        *("apptainer", "exec", "--bind=/runs", "--bind=/home/me/project", "--pwd=/home/me/project", "--nv"),
        "/images/torch.sif",
        *("env", "PYTHONPATH=/runs/x/code", "PYTHONNOUSERSITE=1", "python3", "-P", "-m"),
        *("toolkit", "run", "/runs/x/config.yaml"),
    ]
    assert inside.srun_options() == []
    (tmp_path / "singularity").write_text("")
    (tmp_path / "singularity").chmod(0o755)
    assert inside.command(RANK)[0] == "singularity"  # where that is the only one


def test_pyxis_is_said_in_options_of_srun() -> None:
    inside = container(Image("pyxis", "nvcr.io#nvidia/pytorch:26.01-py3"), ("--nv",))
    assert inside.srun_options() == [
        "--container-image=nvcr.io#nvidia/pytorch:26.01-py3",
        "--container-mounts=/runs:/runs,/home/me/project:/home/me/project",
        "--container-workdir=/home/me/project",
    ]
    assert inside.command(RANK)[:3] == ["env", "PYTHONPATH=/runs/x/code", "PYTHONNOUSERSITE=1"]
    assert inside.command(RANK)[3:] == ["python3", "-P", "-m", *RANK]


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("/images/torch.sif", Image("apptainer", "/images/torch.sif")),
        ("/images/sandbox/", Image("apptainer", "/images/sandbox/")),
        ("apptainer:docker://pytorch/pytorch", Image("apptainer", "docker://pytorch/pytorch")),
        ("/images/torch.sqsh", Image("pyxis", "/images/torch.sqsh")),
        ("nvcr.io#nvidia/pytorch:26.01-py3", Image("pyxis", "nvcr.io#nvidia/pytorch:26.01-py3")),
        ("pyxis:pytorch/pytorch:2.15", Image("pyxis", "pytorch/pytorch:2.15")),
    ],
)
def test_the_runtime_follows_from_the_image_or_is_said(text: str, image: Image) -> None:
    assert parse(text) == image


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pytorch/pytorch:2.15", "apptainer:pytorch/pytorch:2.15 or pyxis:pytorch/pytorch:2.15"),
        ("images/torch.sif", "give an absolute path"),
    ],
)
def test_an_image_that_leaves_doubt_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.container: ") as caught:
        parse(text)
    assert words in str(caught.value)


def test_an_image_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.container: there is no .*/torch\.sif"):
        refuse_missing(f"apptainer:{tmp_path}/torch.sif")
    (tmp_path / "torch.sif").touch()
    refuse_missing(f"{tmp_path}/torch.sif")


def test_only_the_outermost_of_the_folders_that_are_there_are_mounted(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "ab").mkdir()
    folders = [tmp_path / "a/b", tmp_path / "ab", tmp_path / "a", tmp_path / "none"]
    assert outermost(folders) == (str(tmp_path / "a"), str(tmp_path / "ab"))
    with pytest.raises(ConfigError, match="no : or , may be in its path"):
        outermost([tmp_path / "a,b"])
