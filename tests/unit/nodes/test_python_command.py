"""Which commands the ranks' own interpreter runs in a fork. Which sources gain by that."""

import os
import sys
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from toolkit.nodes.start.python_command import gains_by_fork, parse

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["python", "train.py", "-u", "--lr=1"], (False, "train.py", ["-u", "--lr=1"], False)),
        (["python3", "-u", "train.py"], (False, "train.py", [], False)),
        ([sys.executable, "-X", "faulthandler", "-m", "pack.train", "x"], (True, "pack.train", ["x"], True)),
        (["python", "-Xfaulthandler", "./a b.py"], (False, "./a b.py", [], True)),
    ],
)
def test_a_script_or_module_of_our_interpreter_is_known(words: list[str], wanted: tuple[object, ...]) -> None:
    python = parse(words, f"{BIN}:/usr/bin")
    assert python[1:] == wanted
    assert python.executable == str(BIN / Path(words[0]).name)


@pytest.mark.parametrize(
    "words",
    [
        *(["python", option, "train.py"] for option in ("-O", "-E", "-I", "-s", "-B", "-Wignore", "-Xdev", "-c", "-")),
        ["python", "-W", "ignore", "train.py"],
        ["python", "-X", "dev", "train.py"],
        ["python", "-um", "train"],
        ["python"],
        ["python", "-m"],
        ["bash", "train.sh"],
        ["no-such-program", "train.py"],
        ["env", "python", "train.py"],
    ],
    ids=" ".join,
)
def test_other_commands_need_a_process_of_their_own(words: list[str]) -> None:
    assert parse(words, f"{BIN}:/usr/bin:/bin") is None


def test_the_interpreter_below_a_virtual_environment_is_another_one(tmp_path: Path) -> None:
    """It has other packages, though the program is the same file."""
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    assert parse(["python", "train.py"], str(tmp_path)) is None
    (tmp_path / "bin").symlink_to(BIN)
    assert parse(["python", "train.py"], str(tmp_path / "bin")) is not None


TRAINS = "import torch\n"


@pytest.mark.parametrize(
    ("files", "gains"),
    [
        ({"train.py": TRAINS}, True),
        ({"train.py": "from own.main import main", "own/__init__.py": "", "own/main.py": TRAINS}, True),
        ({"train.py": TRAINS + "import os; os.environ['TORCH_NCCL_TRACE'] = '2'"}, True),
        ({"train.py": TRAINS + "# OMP_NUM_THREADS=1 python train.py\n'''OMP_NUM_THREADS is set'''"}, True),
        ({"train.py": "print('no torch')"}, False),
        ({"train.py": "import os\nos.environ['OMP_NUM_THREADS'] = '1'\n" + TRAINS}, False),
        ({"train.py": "import os\nos.environ.update(TORCH_LOGS='+dynamo')\n" + TRAINS}, False),
        ({"train.py": "import os\nfor n in ('MKL_X', 'Y'): os.environ[n] = '1'\n" + TRAINS}, False),
        ({"train.py": "import own.threads\n" + TRAINS, "own/threads.py": "x = {'KMP_AFFINITY': 'none'}"}, False),
        ({"train.py": "from own import x", "own/x.py": "from .y import z", "own/y.py": "from ..torch import z"}, False),
        ({"train.py": "from own import x", "own/x.py": "from .y import z", "own/y.py": "from torch import z"}, True),
        ({"train.py": "import own\n" + TRAINS, "own/__init__.py": "def f(): return 'KMP_AFFINITY'"}, False),
        ({"train.py": "import comet_ml\n" + TRAINS}, False),
        ({"train.py": TRAINS + "this is no Python"}, False),
        ({"train.py": TRAINS + "import broken", "broken.py": "this is no Python"}, True),
        ({}, False),
    ],
)  # fmt: skip
def test_what_imports_torch_and_sets_nothing_that_torch_reads_then_gains(
    files: dict[str, str], gains: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gains_by_fork([sys.executable, str(tmp_path / "train.py")]) == gains


def test_modules_are_found_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text(TRAINS)
    assert not gains_by_fork([sys.executable, "-m", "pack"])
    monkeypatch.chdir(tmp_path)
    assert gains_by_fork([sys.executable, "-m", "pack"])
    assert not gains_by_fork([sys.executable, "-m", "pack.none"])


def test_installed_packages_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Not even where a user has put them on the path. torch itself names every variable that it reads."""
    (tmp_path / "train.py").write_text(TRAINS)
    monkeypatch.syspath_prepend(str(Path(os.__file__).parent))
    (tmp_path / "target" / "torch").mkdir(parents=True)
    (tmp_path / "target" / "torch" / "__init__.py").write_text("x = 'OMP_NUM_THREADS'")
    monkeypatch.syspath_prepend(str(tmp_path / "target"))
    assert gains_by_fork([sys.executable, str(tmp_path / "train.py")])
    change_limits(imported_source_bytes=30)
    (tmp_path / "train.py").write_text(TRAINS + "import other")
    (tmp_path / "other.py").write_text("# long enough")
    assert not gains_by_fork([sys.executable, str(tmp_path / "train.py")])
