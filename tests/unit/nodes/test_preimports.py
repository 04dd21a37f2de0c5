"""Which modules a zygote may import, and which are left to the ranks. Each case is a process of its own."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toolkit.nodes.agent import zygote

PACKAGES = {
    "calm": "import wave",
    "reads_rank": "import os\nos.environ.get('LOCAL_RANK', '0')",
    "reads_all": "import os\ndict(os.environ)",
    "reads_home": "import os\nos.getenv('HOME')",
    "imports_reader": "import reads_rank",
    "starts_thread": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    "fails": "raise RuntimeError('no licence')",
    "exits": "raise SystemExit(3)",
}
LEARN = """
import sys, threading
from pathlib import Path
from toolkit.nodes.agent import preimports
print(*preimports.import_recorded(Path(sys.argv[1]), {"RANK", "LOCAL_RANK"}))
print("calm" in sys.modules, "reads_rank" in sys.modules, threading.active_count())
"""


def python(folder: Path, program: str, *arguments: str) -> list[str]:
    for name, text in PACKAGES.items():
        (folder / f"{name}.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_packages_that_would_break_a_fork_are_left_to_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "imports.json"
    path.write_text(json.dumps({"modules": [*PACKAGES, "wave"], "left_out": None}))
    expected = ["calm reads_home wave", "True False 1"]
    assert python(tmp_path, LEARN, str(path)) == expected
    left_out = json.loads(path.read_text())["left_out"]
    assert {*left_out} == {*PACKAGES} - {"calm", "reads_home"}
    assert python(tmp_path, LEARN, str(path)) == expected, "what was tried is not tried again"


def test_nothing_is_tried_before_it_is_known_what_ranks_have_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "imports.json"
    noted = {"modules": ["calm", "reads_rank"], "left_out": None}
    path.write_text(json.dumps(noted))
    assert python(tmp_path, LEARN.replace('{"RANK", "LOCAL_RANK"}', "set()"), str(path)) == ["", "False False 1"]
    assert json.loads(path.read_text()) == noted


def test_a_trial_that_crashes_learns_nothing(tmp_path: Path) -> None:
    (tmp_path / "crashes.py").write_text("import os\nos.abort()")
    path = tmp_path / "imports.json"
    path.write_text(json.dumps({"modules": ["calm", "crashes"], "left_out": None}))
    assert python(tmp_path, LEARN, str(path)) == ["", "False False 1"]


def test_a_damaged_file_teaches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "imports.json"
    for text in ("", "{", "[]", '{"modules": 3}', '{"modules": [null], "left_out": "calm"}'):
        path.write_text(text)
        assert python(tmp_path, LEARN, str(path)) == ["", "False False 1"]


NOTE = """
import sys
from pathlib import Path
from toolkit.nodes.agent import preimports
preimports.record_imports(Path(sys.argv[1]))
preimports.inherited = frozenset(sys.modules)
import calm
preimports.record_imports(Path(sys.argv[1]))
"""


def test_installed_modules_are_noted_and_those_of_the_user_are_not(tmp_path: Path) -> None:
    path = tmp_path / "imports.json"
    python(tmp_path, NOTE.partition("preimports.inherited")[0], str(path))
    assert not path.exists(), "a fresh interpreter has inherited nothing"
    python(tmp_path, NOTE, str(path))
    noted = json.loads(path.read_text())
    assert noted["left_out"] is None
    assert "wave" in noted["modules"]
    assert "calm" not in noted["modules"]
    path.write_text(json.dumps({"modules": ["earlier", "wave"], "left_out": ["earlier"]}))
    python(tmp_path, NOTE.replace("import calm", "import calm, cmd"), str(path))
    again = json.loads(path.read_text())
    assert {"earlier", "wave", "cmd"} <= {*again["modules"]}
    assert again["left_out"] is None, "the new ones are to be tried"


def test_a_kernel_without_figures_of_waiting_costs_the_figure_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zygote._waited_s() > 0.0
    for text in ("", "x y z"):
        monkeypatch.setattr(Path, "read_text", lambda path, text=text: text)
        assert zygote._waited_s() == 0.0

    def missing(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    assert zygote._waited_s() == 0.0


COUNT = """
import os, torch
from toolkit.nodes.agent import preimports
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
gpus = 1
real = torch.cuda.is_available
torch.cuda.is_available = lambda: (real(), gpus > 0)[1]  # CUDA itself is asked; what it answers is not real
torch.cuda.device_count = lambda: gpus
print(preimports.fork_breaks_gpu())
torch.cuda.is_available()  # asks CUDA for the number of devices
print(preimports.fork_breaks_gpu(), torch.cuda.is_initialized())
gpus = 0
print(preimports.fork_breaks_gpu())
"""


def test_a_process_that_has_counted_its_gpus_cannot_hand_them_to_a_fork(tmp_path: Path) -> None:
    """torch refuses CUDA in such a fork, though CUDA is not initialised."""
    has_cuda = torch.version.cuda is not None
    assert python(tmp_path, COUNT) == ["False", f"{has_cuda} False", "False"]
