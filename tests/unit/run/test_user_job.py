"""A job is a module, a file by its path, or an installed package's module. An error in it names the line."""

import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.cli.main import main
from toolkit.config import SCRIPT_JOB, JobConfig, is_loop, job_source, load_config, validate
from toolkit.files import rundir
from toolkit.run.prepare.new_run import check_submittable, new_run
from toolkit.run.rank.user_job import job_class, load, params_of
from toolkit.run.submission.submit import dry_run


@pytest.fixture(autouse=True)
def imports(tmp_path: Path) -> Iterator[None]:
    """Forget what a test imports from its own files."""
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('PACKAGE', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MAIN = "def main(config): print(config)\n"


def test_a_file_imports_its_neighbours_and_its_classes_can_be_pickled(tmp_path: Path) -> None:
    write(tmp_path, work__nets="width = 3\n", work__mine="from nets import width\nclass Data: ...\n" + MAIN)
    module = load("work/mine.py", tmp_path)
    assert (module.__name__, module.width) == ("mine", 3)
    assert type(pickle.loads(pickle.dumps(module.Data()))) is module.Data


def test_a_file_of_a_package_imports_relatively(tmp_path: Path) -> None:
    text = "from .nets import width\nfrom work.nets import width as same\nimport nets\n" + MAIN
    write(tmp_path, work__nets="width = 3\n", work__mine=text)
    (tmp_path / "work/__init__.py").touch()
    assert load("./work/mine.py", tmp_path).__name__ == "work.mine"


@pytest.mark.parametrize("name", ["random", "pytest", "code", "a-b", "a.b"])
def test_a_file_whose_name_is_taken_leaves_the_other_module_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(MAIN)
    module = load(f"{name}.py", tmp_path)
    assert module.__file__ == str(tmp_path / f"{name}.py")
    assert sys.modules["random"] is random
    assert sys.modules["pytest"] is pytest


def test_each_copy_of_the_sources_gives_its_own_job(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        copy = tmp_path / str(number)
        write(copy, train=f"number = {number}\n", tasks__work=f"number = {number}\n")
        (copy / "tasks/__init__.py").touch()
        assert load("train.py", copy).number == number
        assert load("tasks.work", copy).number == number


def test_a_job_of_a_src_layout_or_an_installed_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, site = tmp_path / "project", tmp_path / "site-packages"
    write(project / "src", pack__PACKAGE="here = True\n", pack__work="from pack import here\n")
    write(
        site,
        installed__PACKAGE="import torch_of_nobody\n",
        installed__work=MAIN,
        installed__sub__deep=MAIN,
        installed__sub__PACKAGE="",
    )
    monkeypatch.syspath_prepend(site)
    assert job_source("pack.work", project) == project / "src/pack/work.py"
    assert load("pack.work", project).here
    assert job_source("installed.work", project) == site / "installed/work.py"
    assert job_source("installed.sub.deep", project) == site / "installed/sub/deep.py"
    # an import would fail here: the package's __init__ needs a module that is not installed
    check_submittable(JobConfig(job="installed.work"), "local", project)
    with pytest.raises(ConfigError, match=r"job: .*installed/__init__\.py, line 1: ModuleNotFoundError: No module"):
        load("installed.work", project)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("import nobodys_module", "work.py, line 1", "ModuleNotFoundError: No module named 'nobodys_module'"),
        ("\nx = 1\nx.y", "work.py, line 3", "AttributeError: 'int' object has no attribute 'y'"),
        ("from beside import missing", "work.py, line 1", "ImportError: cannot import name 'missing'"),
        ("import broken", "broken.py, line 2", "SyntaxError: "),
        ("import wrong", "wrong.py, line 3", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_job_that_fails_at_its_import_names_the_line(text: str, line: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, beside="", broken="\nimport\n", wrong="def f():\n    return 1\n1 / 0\n", work=text)
    for job in ("work", "work.py"):
        with pytest.raises(ConfigError) as caught:
            load(job, tmp_path)
        assert str(caught.value).startswith(f"job: {tmp_path}/{line}: {says}")
        assert f"(when {job} is imported); fix that line, or install" in str(caught.value)
        assert caught.value.__cause__ is not None, "whose traceback `toolkit why` shows"


@pytest.mark.parametrize("error", ["OSError('stale file')", "RuntimeError('CUDA error')"])
def test_what_a_node_does_to_an_import_is_not_held_against_the_job(error: str, tmp_path: Path) -> None:
    write(tmp_path, work=f"raise {error}")
    with pytest.raises((OSError, RuntimeError)):
        load("work.py", tmp_path)


def checked(folder: Path, text: str, job: str = "work.py") -> None:
    (folder / "work.py").write_text(text)
    validate(load_config(None, [f"job={job}"], project=folder), project=folder)


@pytest.mark.parametrize(
    "text",
    [
        MAIN,
        "def main(config, extra=1): ...",
        "import toolkit\nclass Anything(toolkit.Job): ...",
        "from toolkit import Job\nclass Mine(Job): ...",
        "from toolkit import Job as Base\nclass Common(Base): ...\nclass Mine(Common): ...",
        "import toolkit\nwith toolkit.start() as run: ...",
        "import toolkit as tk\ndef main():\n    with tk.start() as run: ...\nmain()",
    ],
)
@pytest.mark.parametrize("job", ["work.py", "./work.py", "work"])
def test_a_file_may_hold_a_job_class_a_main_or_a_loop(text: str, job: str, tmp_path: Path) -> None:
    checked(tmp_path, text, job)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", r"job: work\.py \(.*work\.py\) has no function main\(config\) that is left to the toolkit, no class"),
        ("class Job: ...", r"no class derived from toolkit\.Job, and no loop with toolkit\.start\(\)"),
        (
            "\ndef main(): ...",
            r"work\.py, line 2: main is called with one argument, the config: write def main",
        ),
        ("def main(config, other): ...", r"work\.py, line 1: main is called with one argument"),
        (
            "import toolkit\nclass A(toolkit.Job): ...\nclass B(toolkit.Job): ...",
            r"work\.py: A \(line 2\) and B \(line 3\) are both jobs; leave one in this file, and move the other out",
        ),
        (
            "import toolkit\nclass A(toolkit.Job)",
            r"job: .*work\.py, line 2: cannot be imported as Python",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Params:\n  x: int = f()\n" + MAIN,
            r"params: .*work\.py, line 4: needs f, and only",
        ),
    ],
)
def test_a_file_without_one_job_is_refused_before_anything_is_queued(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(tmp_path, text)


def test_advice_with_a_path_can_be_pasted_into_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    with pytest.raises(ConfigError, match=rf"`toolkit submit '{project}/work\.py'` runs it"):
        checked(project, "print(1)")
    (project / "many.yaml").write_text("sweep: {optim.lr: [1, 2]}\n")
    with pytest.raises(ConfigError, match=rf"`toolkit sweep '{project}/many\.yaml'` submits them"):
        load_config(project / "many.yaml")
    assert main(["new", str(project / "mine")]) == 0
    assert f"next: `cd '{project}/mine' && toolkit submit mine.yaml --follow`" in capsys.readouterr().out


ENTRY = 'if __name__ == "__main__":\n    '


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (MAIN, "job"),
        ("import torch\ntorch.manual_seed(0)\n@torch.no_grad()\n" + MAIN, "job"),
        ("import toolkit\n" + MAIN + ENTRY + "main(toolkit.load_config('c.yaml'))", "job"),
        ("import toolkit\n" + MAIN + ENTRY + "toolkit.submit(main)", "job"),
        ("import toolkit\ntoolkit.start()", "loop"),
        ("from toolkit import Job\nclass A(Job): ...", "job"),
        ("print(1)", "plain"),
        ("import models", "plain"),
        ("def main(args): ...\n" + ENTRY + "main(parse())", "plain"),
        ("import hydra\n@hydra.main()\ndef main(cfg): ...\n" + ENTRY + "main()", "plain"),
        ("import fire\ndef main(lr): ...\nfire.Fire(main)", "plain"),
        ("import typer\napp = typer.Typer()\n@app.command()\ndef main(lr): ...\napp()", "plain"),
        ("def main(x): ...\ndef cli():\n    main(1)\n" + ENTRY + "cli()", "plain"),
        ("def main(): ...", "line 1: main is called with one argument"),
        ("def main(config, other): ...", "line 1: main is called with one argument"),
        ("x = 1", "as a script it would do nothing"),
        ("import models\ndef train(): ...", "as a script it would do nothing"),
    ],
)
def test_a_file_is_judged_alike_by_the_command_line_a_config_and_python(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, work=text, models="print(2)")
    (tmp_path / "c.yaml").write_text("job: work.py\n")
    monkeypatch.chdir(tmp_path)
    for asked in ("work.py", "c.yaml", {"job": "work.py"}):
        if kind in ("job", "loop", "plain"):
            text = dry_run(asked, executor="local")
            assert (f"job: {SCRIPT_JOB}" in text, is_loop("work.py")) == (kind == "plain", kind == "loop")
            assert (f"- {tmp_path}/work.py" in text) is (kind == "plain")
        else:
            with pytest.raises(ConfigError, match=kind):
                dry_run(asked, executor="local")


@pytest.mark.parametrize("job", ["{project}/train.py", "./train.py", "sub/../train.py", "../project/train.py"])
def test_a_run_takes_the_copy_of_a_file_however_it_was_named(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "runs"))
    project = tmp_path / "project"
    write(project, train=MAIN, sub__x="")
    run = new_run(JobConfig(job=job.format(project=project)), project)
    assert load_config(run.config, site=False).job == "train.py"
    assert job_source("train.py", run.code) == rundir.RunDir(run.path).code / "train.py"


def test_a_file_outside_of_the_project_is_refused(tmp_path: Path) -> None:
    write(tmp_path, outside=MAIN, project__inside=MAIN)
    with pytest.raises(Exception, match="the sources that a run copies are those of"):
        check_submittable(JobConfig(job="../outside.py"), "local", tmp_path / "project")


BASE = """from dataclasses import dataclass
import toolkit
@dataclass
class Params:
    width: int = 3  # of a layer
class Base(toolkit.Job): ...
"""
OWN = "import lib.base\n" + BASE.replace("width", "depth").replace("Base(toolkit.Job)", "Mine(lib.base.Base)")


@pytest.mark.parametrize(
    "job",
    [
        "from lib.base import Base\nclass Mine(Base): ...",
        "import lib.base\nclass Mine(lib.base.Base): ...",
        "from .base import Base\nclass Mine(Base): ...",
        "from . import base\nclass Common(base.Base): ...\nclass Mine(Common): ...",
        "from .between import Between\nfrom .other import Other\nclass Mine(Other, Between): ...",
        OWN,
    ],
    ids=["from", "import", "relative", "module", "over another", "its own"],
)
def test_a_job_has_the_keys_of_the_file_whose_class_it_derives_from(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    between = "from lib.base import Base\nclass Between(Base): ..."
    other = "import toolkit\nclass Other(toolkit.Job): ..."
    write(tmp_path, lib__PACKAGE="", lib__base=BASE, lib__between=between, lib__other=other, lib__mine=job)
    key = "depth" if job is OWN else "width"
    # On the login node, by the sources.
    config = load_config(None, ["job=lib.mine", f"params.{key}=5"], project=tmp_path)
    assert load_config(None, ["job=lib.mine"], project=tmp_path).params == {key: 3}
    with pytest.raises(ConfigError, match=rf"params.x: unknown key.*params\.{key}"):
        load_config(None, ["job=lib.mine", "params.x=5"], project=tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("job: lib.mine\n")
    assert main(["submit", "c.yaml", "--help"]) == 0
    assert f"params.{key}: int" in capsys.readouterr().out
    # On a rank, by the classes.
    params = params_of(job_class(load("lib.mine", tmp_path)), config)
    assert (vars(params), type(params).__module__) == ({key: 5}, "lib.mine" if job is OWN else "lib.base")


MISSING = """\
import os, nothere.layers
import time
from torch import nn
from helper import x
from . import beside
try:
    import apexx
except ImportError:
    pass
def later():
    import elsewhere
"""


def warnings_of(config: JobConfig, project: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level("WARNING"):
        check_submittable(config, "local", project)
    return [record.getMessage() for record in caplog.records if "finds no module" in record.getMessage()]


def test_a_top_level_import_that_cannot_be_found_is_said_at_submission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "helper.py").write_text("raise SystemExit('imported')")
    (tmp_path / "train.py").write_text(MISSING)
    foreign = JobConfig(job=SCRIPT_JOB, argv=[sys.executable, str(tmp_path / "train.py"), "--lr", "1"])
    (warning,) = warnings_of(foreign, tmp_path, caplog)
    assert warning.startswith(f"{tmp_path}/train.py, line 1: {sys.executable} finds no module 'nothere'")
    assert warnings_of(foreign, tmp_path, caplog) == []  # once while the file stays the same
    (tmp_path / "loop.py").write_text(f"{MISSING}import toolkit\nwith toolkit.start() as run:\n    pass\n")
    assert len(warnings_of(JobConfig(job="loop.py"), tmp_path, caplog)) == 1


@pytest.mark.parametrize("setup", [[], ["module load apex"]])
def test_nothing_is_said_where_another_python_or_path_may_run_it(
    setup: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").write_text(MISSING if setup else f"import sys\nsys.path.insert(0, 'lib')\n{MISSING}")
    argv = [sys.executable, str(tmp_path / "train.py")]
    config = JobConfig(job=SCRIPT_JOB, argv=argv)
    config.cluster.setup = setup
    assert warnings_of(config, tmp_path, caplog) == []
    config.argv = ["/usr/bin/env", *argv]
    config.cluster.setup = []
    assert warnings_of(config, tmp_path, caplog) == []
