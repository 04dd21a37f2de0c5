"""The arguments of a script: the words after ``--``, and options by name."""

from pathlib import Path
from typing import Any

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import SCRIPT_JOB, JobConfig, command_line, dump_config, load_config, validate
from toolkit.config.script_arguments import argv_override, with_options

LOOP = "import argparse, toolkit\n\nwith toolkit.start() as run:\n    pass\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(LOOP)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "options", "line"),
    [
        ("", {"epochs": 3}, "--epochs 3"),
        ("", {"e": 3, "batch_size": 8, "no-amp": True}, "-e 3 --batch_size 8 --no-amp"),
        ("--epochs 1 data", {"epochs": 3}, "--epochs 3 data"),
        ("--epochs=1 data", {"epochs": 3}, "--epochs 3 data"),
        ("data --epochs", {"epochs": 3}, "data --epochs 3"),
        ("--epochs --amp", {"epochs": 3}, "--epochs 3 --amp"),
        ("--sizes 1 2 3 --amp", {"sizes": [4, 5]}, "--sizes 4 5 --amp"),
        ("--amp data", {"amp": True}, "--amp data"),
        ("--amp data", {"amp": False}, "data"),
        ("data", {"amp": False}, "data"),
        ("--shift -1 data", {"shift": 2}, "--shift 2 data"),
        ("--shift 1", {"shift": -2}, "--shift -2"),
        ("", {"word": "-x"}, "--word=-x"),
        ("fit --lr 1 -- --lr 2", {"lr": 3, "new": 4}, "fit --lr 3 --new 4 -- --lr 2"),
        ("--epochs-max 2", {"epochs": 3}, "--epochs-max 2 --epochs 3"),
    ],
)
def test_an_option_is_set_where_it_stands_and_else_at_the_end(words: str, options: dict[str, Any], line: str) -> None:
    assert with_options(words.split(), options) == line.split()


@pytest.mark.parametrize(
    "words", [["--lr", "1e-3"], ["", "it's", "a b"], ["${x}", "\\${x}", "é", "#", "'", '"', "null", "007"], ["a\nb\t"]]
)
def test_words_come_back_as_they_were_given(words: list[str], project: Path) -> None:
    config = load_config("train.py", [argv_override(words)])
    validate(config)
    (project / "again.yaml").write_text(dump_config(config))
    assert command_line(load_config("again.yaml", site=False)) == words


def test_a_number_keeps_its_text() -> None:
    config = load_config("train.py", ["args.id=007", "args.version=1.10", "args.lr=1e-4", "args.num=3"])
    assert command_line(config) == ["--id", "007", "--version", "1.10", "--lr", "1e-4", "--num", "3"]


def test_the_later_layer_wins_whichever_way_it_gives_an_option(project: Path) -> None:
    (project / "loop.yaml").write_text("job: train.py\nargs: {epochs: 3, lr: 0.5}\n")
    assert command_line(load_config("loop.yaml")) == ["--epochs", "3", "--lr", "0.5"]
    assert command_line(load_config("loop.yaml", [argv_override(["--epochs", "4"])])) == [
        "--epochs",
        "4",
        "--lr",
        "0.5",
    ]
    both = [argv_override(["--epochs", "4", "x"]), "args.epochs=5"]
    assert command_line(load_config("loop.yaml", both)) == ["--epochs", "5", "x", "--lr", "0.5"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("args.--epochs=3", "args.--epochs: give the option's name without the dashes before it: args.epochs=3"),
        ("args.=3", "args.: give the option's name"),
        ("args=[1]", "args is a mapping"),
        ("argv=--epochs", "argv is a list"),
        ("args.epochs={a: 1}", "args.epochs takes text or a whole number or a number or true or false"),
    ],
)
def test_what_is_no_argument_is_refused_by_its_key(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(load_config("train.py", [given]))


@pytest.mark.parametrize("given", ["argv=[--epochs]", "args.epochs=3"])
def test_a_job_class_takes_no_arguments(given: str, project: Path) -> None:
    (project / "job.py").write_text("import toolkit\n\nclass Job(toolkit.Job):\n    pass\n")
    with pytest.raises(ConfigError, match=r"^arg[vs]: arguments are for a script .* params.NAME=VALUE"):
        validate(load_config("job.py", [given, "data.name=digits"]))


def test_a_foreign_command_may_be_any_words() -> None:
    validate(JobConfig(job=SCRIPT_JOB, argv=["python", "-c", "import sys\nprint(sys.argv)", ""]))
