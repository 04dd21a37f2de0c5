"""What other packages add: an installed wheel, and entry points that are at fault."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.pages import ROOT, blocks
from toolkit import registry
from toolkit.base.errors import ConfigError, PluginError
from toolkit.config import (
    JobConfig,
    StrategyConfig,
    TrainConfig,
    check_step,
    is_loop,
    load_config,
    may_resume_with,
    validate,
)
from toolkit.config.validation import StrategyChecks
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunStatus
from toolkit.registry import StrategySpec
from toolkit.strategies import build_strategy

TOML = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "lab-plugin"
version = "1"

{entry}"""


def toolkit(site: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Run the command where ``site`` holds what is installed beside this environment. Return what it prints."""
    env = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "TOOLKIT_RUNS": str(site / "runs")}
    argv = [sys.executable, "-m", "toolkit", *words]
    done = subprocess.run(argv, env=env, cwd=site, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the plugin of docs/plugins.md, installed from its wheel."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    for text in blocks("docs/plugins.md", "python"):
        (name,) = re.findall(r"^# (\S+\.py)\n", text)
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    (entry,) = blocks("docs/plugins.md", "toml")
    (project / "pyproject.toml").write_text(TOML.format(entry=entry))
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(build, cwd=project, check=True, capture_output=True)
    (wheel,) = (project / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    return site


def test_the_plugin_of_the_page_is_installed_from_a_wheel_and_used(site: Path) -> None:
    run = rundir.create("gpt", site / "runs")
    run.write_status(RunStatus(progress=RunProgress(step=7)))
    assert toolkit(site, "steps", "gpt") == ("7\n", "")
    out, err = toolkit(site, "--help")
    assert "print the last step of a run" in out
    assert err == ""
    assert "the step of the newest run named gpt" in toolkit(site, "steps", "--help")[0]
    assert "did you mean 'steps'" in toolkit(site, "stepss", code=2)[1]
    assert toolkit(site, "__complete", "bash", "toolkit step")[0] == "steps\n"


def test_the_strategy_and_the_tracker_of_the_page_work(site: Path) -> None:
    options = ["strategy.name=slow_ddp", "train.max_steps=20", "train.log_every=10", "optim.warmup_steps=0"]
    config = str(ROOT / "configs/digits_ddp.yaml")
    shutil.copytree(ROOT / "jobs", site / "jobs")
    toolkit(site, "submit", config, *options, "cluster.tasks_per_node=1", "--executor", "local", "--wait")
    toolkit(site, "upload", "digits-ddp", "lines")
    toolkit(site, "upload", "digits-ddp", "lines")  # nothing is new
    (file,) = site.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line or "train/loss" in line] == [10, 20]
    refused = toolkit(site, "submit", config, "strategy.name=slow_dpp", "--dry-run", code=2)[1]
    assert "strategy.name" in refused
    assert "slow_ddp" in refused, "an unknown name is answered with those of plugins, too"


ABLE = StrategySpec(
    "lab:build",
    "tests.house.test_registry:AbleChecks",
    whole_update=True,
    same_state=True,
    mesh=("replicas", "shards"),
)
BARE = StrategySpec("lab:build")
OLD = StrategySpec("lab:build", interface=0)
HALF = StrategySpec("lab:build", "no_such:Checks")


def add(monkeypatch: pytest.MonkeyPatch, kind: registry.Kind, **values: str) -> None:
    others = {key: values if key == kind else {} for key in registry.BUILT_IN}
    monkeypatch.setattr(registry, "_of_others", lambda: others)


def test_what_another_strategy_can_do_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.house.test_registry"
    found = {name: f"{here}:{name.upper()}" for name in ("able", "bare", "old", "half")}
    add(monkeypatch, "strategies", **found, gone="no_such:GONE", function=f"{here}:add")

    def check(name: str, *more: str) -> None:
        overrides = [f"strategy.name={name}", "train.clip_norm=1", "cluster.tasks_per_node=1", *more]
        validate(load_config(ROOT / "configs/digits_ddp.yaml", overrides, project=ROOT), project=ROOT)

    check("able", "strategy.mesh.shards=1")
    for name, more, says in (
        ("bare", [], "train.clip_norm: does not go with strategy.name bare"),
        (
            "able",
            ["train.sync_batch_norm=true"],
            f"train.sync_batch_norm: goes with strategy.name {', '.join(registry.with_trait('sync_batch_norm'))}",
        ),
        ("able", ["optim.lr=7"], "optim.lr: too fast"),
        ("bear", [], "unknown value 'bear'; did you mean 'bare'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            check(name, *more)
    for name, says in (
        ("old", "OLD was written for version 0 of toolkit.strategies; this is version 1"),
        ("gone", "gone of strategies needs no_such:GONE, which cannot be loaded"),
        ("half", "half of strategies needs no_such:Checks, which cannot be loaded: ModuleNotFoundError"),
        ("function", "test_registry:add is a function, and has to be a toolkit.registry.StrategySpec"),
    ):
        with pytest.raises(PluginError, match=re.escape(says)):
            check(name)
    with pytest.raises(PluginError, match="bare of strategies needs lab:build, which cannot be loaded"):
        build_strategy(StrategyConfig("bare"), cast(Any, None))
    assert may_resume_with("strategy.name", "ddp", "able")
    assert not may_resume_with("strategy.name", "ddp", "bare")


class AbleChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        if config.optim.lr > 5:
            raise ConfigError("optim.lr: too fast")


def test_entries_at_fault_are_named_in_a_line_and_the_others_work(site: Path, tmp_path: Path) -> None:
    for path in site.iterdir():
        (tmp_path / path.name).symlink_to(path)
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[toolkit.commands]\nstatus = other\nbroken = other\nsteps = other\n")
    out, err = toolkit(tmp_path, "--help")
    assert "print the last step of a run" in out
    assert out.count("cannot be loaded: broken of commands") == 1
    assert sorted(line.rpartition(": ")[2] for line in err.splitlines()) == ["'status' is taken", "'steps' is taken"]
    assert (
        "toolkit: error: broken of commands needs other, which cannot be loaded"
        in toolkit(tmp_path, "broken", code=2)[1]
    )


def test_a_rank_of_a_core_strategy_searches_for_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the installed packages would cost each rank's start some hundredths of a second."""
    monkeypatch.setattr(registry, "_of_others", lambda: pytest.fail("searched"))
    for name in registry.STRATEGIES:
        check_step(TrainConfig(), StrategyConfig(name))
    for kind in registry.BUILT_IN:
        for name in registry.BUILT_IN[kind]:
            assert registry.where(kind, name) is not None


def test_a_script_with_the_adapter_of_another_package_has_the_toolkit_in_its_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("from lab_plugin.loop import Lab\n\nLab().fit()\n")
    assert not is_loop("train.py", tmp_path)
    add(monkeypatch, "adapters", lab="lab_plugin.loop")
    assert is_loop("train.py", tmp_path)


def test_what_the_table_names_can_be_imported() -> None:
    pytest.importorskip("mpi4py")
    for kind, names in registry.BUILT_IN.items():
        assert [name for name, path in names.items() if registry.load_part(kind, name, path) is None] == []
    for name, strategy in registry.STRATEGIES.items():
        assert issubclass(registry.load_part("strategies", name, strategy.checks), StrategyChecks)
