"""A project with a module that a job needs from elsewhere is refused by its name before anything is queued."""

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base.errors import RequestError
from toolkit.files import rundir
from toolkit.run.prepare import snapshot
from toolkit.run.submission import executors, submit
from toolkit.run.submission.handle import Run

LOOP = "import toolkit\nwith toolkit.start() as run:\n    pass\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("TOOLKIT_RUNS", raising=False)
    monkeypatch.setenv("TOOLKIT_SITE", str(tmp_path / "site.yaml"))
    (tmp_path / "site.yaml").write_text("{}")
    Path("loop.py").write_text(LOOP)
    monkeypatch.setattr(executors, "send", lambda run, config, executor, owner, **_: Run(run, executor, "1"))
    return tmp_path / "project"


@pytest.mark.parametrize(
    "name",
    ["toolkit.py", "toolkit/__init__.py", "torch/__init__.py", "submitit.py", "random.py", "logging/__init__.py"],
)
def test_a_module_that_hides_one_that_a_job_needs_is_refused_by_name(name: str, project: Path) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("VALUE = 1\n")
    with pytest.raises(
        RequestError, match=rf"{project / name}: a job would import it in place of {name[:5]}.*: rename"
    ):
        submit.submit("loop.py", executor="local")
    assert rundir.all_runs() == []


@pytest.mark.parametrize(
    "name", ["torch/ops.cu", "mine/random.py", "test/__init__.py", "turtle.py", "src/torch/__init__.py", "toolkits.py"]
)
def test_what_hides_nothing_is_copied(name: str, project: Path) -> None:
    """A folder without ``__init__.py`` gives way to a package of its name."""
    (project / name).parent.mkdir(parents=True, exist_ok=True)
    (project / name).write_text("VALUE = 1\n")
    assert (submit.submit("loop.py", executor="local").dir.code / name).is_file()


def test_a_script_that_runs_where_it_lies_hides_nothing(project: Path) -> None:
    Path("plain.py").write_text("print(1)\n")
    Path("random.py").write_text("")
    submit.submit("plain.py", executor="local")


def test_the_modules_of_python_that_a_job_loads_are_known() -> None:
    program = """
import sys
import torch.distributed, torch.utils.data, submitit
import toolkit.run.supervise.entry, toolkit.nodes.agent.node, toolkit.nodes.agent.zygote, toolkit.train.user_loop
print(*{name.partition(".")[0] for name in sys.modules} & sys.stdlib_module_names)
"""
    # Without site: what is loaded before any path of ours counts, or is built in, cannot be hidden.
    early = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True)
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    missing = {*loaded.stdout.split()} - {*early.stdout.split()} - {*sys.builtin_module_names}
    assert {name for name in missing - snapshot.job_imports() if not name.startswith("_")} == set()
