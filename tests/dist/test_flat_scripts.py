"""Scripts that call ``toolkit.start()`` without a ``with`` block, as a user starts them: by python and by submitit."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from toolkit.base.errors import EXIT_REQUEST, ConfigError
from toolkit.config import load_config
from toolkit.files import rundir

pytestmark = pytest.mark.dist

SCRIPT = """
import sys
import torch
import toolkit

def train(steps, bad=None):
    run = toolkit.start()
    model = torch.nn.Linear(1, 1)
    run.resumable(model=model)
    for step in toolkit.current().steps(range(100), total=steps):
        print(step, flush=True)
        if step == bad:
            raise ValueError("a bad row")
        if step == 4:
            run.save()
    return 0

if __name__ == "__main__":
    sys.exit(train(8, *map(int, sys.argv[1:])))
"""
SUBMIT = """
import sys
import submitit
import flat_script

executor = submitit.LocalExecutor("submitit")
executor.update_parameters(timeout_min=2)
print(executor.submit(flat_script.train, 8, *map(int, sys.argv[1:])).result())
"""


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TOOLKIT_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", **variables}
    argv = [sys.executable, *words]
    return subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE * 60
    )


def test_a_flat_script_that_fails_is_not_completed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "flat_script.py").write_text(SCRIPT)
    failed = python(tmp_path, "flat_script.py", "6")
    assert failed.returncode == 1
    assert "ValueError: a bad row" in failed.stderr
    (run,) = rundir.all_runs(tmp_path / "runs")
    assert run.result() is None
    assert "a bad row" in run.error_file(1, 0).read_text()
    ended = python(tmp_path, "flat_script.py", TOOLKIT_RUN_DIR=str(run.path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["5", "6", "7"]
    assert (run.result().state, run.result().step) == ("completed", 8)


BLOCK = """
import sys
import torch
import toolkit

with toolkit.start() as run:
    run.resumable(model=torch.nn.Linear(1, 1))
    for step in run.steps(range(100), total=8):
        if step == 3:
            sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "state"), [(0, "completed"), (3, "failed")])
def test_an_exit_ends_a_block_as_it_ends_a_flat_script(tmp_path: Path, code: int, state: str) -> None:
    """Before, a block that was left by `sys.exit(0)` was not completed."""
    (tmp_path / "block.py").write_text(BLOCK)
    assert python(tmp_path, "block.py", str(code)).returncode == code
    (run,) = rundir.all_runs(tmp_path / "runs")
    assert run.status().state == state
    assert (run.result() is not None) == (code == 0)


def test_a_run_within_a_job_of_submitit_has_the_scripts_name_and_goes_on_by_submitit(tmp_path: Path) -> None:
    """Before, `toolkit resume` submitted a job that started submitit's own program, and failed."""
    (tmp_path / "flat_script.py").write_text(SCRIPT)
    (tmp_path / "submit.py").write_text(SUBMIT)
    assert "a bad row" in python(tmp_path, "submit.py", "6").stderr
    (run,) = rundir.all_runs(tmp_path / "runs")
    assert run.name == "flat_script"
    refused = python(tmp_path, "-m", "toolkit", "resume", run.id)
    assert refused.returncode == EXIT_REQUEST
    told = python(tmp_path, "-m", "toolkit", "why", run.id).stdout
    assert "toolkit resume" not in told
    for text in (refused.stderr, told):
        variable = re.search(f"`export {rundir.RUN_DIR_VARIABLE}=(.+)`", text)
        assert variable is not None, text
    done = python(tmp_path, "submit.py", **{rundir.RUN_DIR_VARIABLE: variable[1]})
    assert done.stdout == "0\n", done.stderr
    assert (run.result().state, run.result().step) == ("completed", 8)


def test_a_module_of_a_package_is_resumed_as_a_module(tmp_path: Path) -> None:
    """Before, `toolkit resume` started it as a file, which has no relative imports."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rows.py").write_text("GOOD = False\n")
    text = SCRIPT.replace("import toolkit\n", "import toolkit\nfrom . import rows\n")
    (package / "training.py").write_text(text.replace("step == bad", "step == bad and not rows.GOOD"))
    assert "a bad row" in python(tmp_path, "-m", "package.training", "6").stderr
    (run,) = rundir.all_runs(tmp_path / "runs")
    assert (run.name, load_config(run.config, site=False).job) == ("training", "package.training")
    (package / "rows.py").write_text("GOOD = True\n")
    ended = python(tmp_path, "-m", "toolkit", "resume", run.id, "--code", "--wait", PATH="/nothing")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (run.result().state, run.result().step) == ("completed", 8)


def test_without_a_run_there_is_no_current_one() -> None:
    import toolkit

    with pytest.raises(
        ConfigError, match=r"toolkit\.current: this process has no run that is open: call toolkit\.start"
    ):
        toolkit.current()
