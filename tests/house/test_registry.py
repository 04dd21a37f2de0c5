"""Plugins: those that come with the toolkit, those of other people, and those that are at fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.pages import ROOT, blocks
from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.config import (
    JobConfig,
    StrategyConfig,
    TrainConfig,
    check_step,
    goes_on_with,
    is_loop,
    load_config,
    validate,
)
from toolkit.config.validation import StrategyChecks
from toolkit.files import rundir
from toolkit.files.run_files import RunProgress, RunStatus
from toolkit.registry import Plugin, StrategyTraits

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
    toolkit(site, "sync", "digits-ddp", "lines")
    toolkit(site, "sync", "digits-ddp", "lines")  # nothing is new
    (file,) = site.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line or "train/loss" in line] == [10, 20]
    refused = toolkit(site, "submit", config, "strategy.name=slow_dpp", "--dry-run", code=2)[1]
    assert "strategy.name" in refused
    assert "slow_ddp" in refused, "an unknown name is answered with those of plugins, too"


def test_what_a_strategy_of_a_plugin_can_do_is_what_its_traits_say(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Plugin(
        "lab",
        strategies={"able": "lab:build", "bare": "lab:build"},
        traits={"able": StrategyTraits(whole_update=True, same_state=True, mesh=("replicas", "shards"))},
        checks={"able": "tests.house.test_registry:AbleChecks"},
    )
    monkeypatch.setattr(registry, "plugins", lambda: (*registry.built_in(), lab))

    def check(name: str, *more: str) -> None:
        overrides = [f"strategy.name={name}", "train.clip_norm=1", "cluster.tasks_per_node=1", *more]
        validate(load_config(ROOT / "configs/digits_ddp.yaml", overrides, project=ROOT), project=ROOT)

    check("able", "strategy.mesh.shards=1")
    for name, more, says in (
        ("bare", [], "train.clip_norm: does not go with strategy.name bare"),
        (
            "able",
            ["train.sync_batch_norm=true"],
            "train.sync_batch_norm: goes with strategy.name ddp, fsdp, zero, auto",
        ),
        ("able", ["optim.lr=7"], "optim.lr: too fast"),
        ("bear", [], "there is no 'bear'; did you mean 'bare'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            check(name, *more)
    assert goes_on_with("strategy.name", "ddp", "able")
    assert not goes_on_with("strategy.name", "ddp", "bare")


class AbleChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        if config.optim.lr > 5:
            raise ConfigError("optim.lr: too fast")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nosuchmodule", "ModuleNotFoundError: No module named 'nosuchmodule'"),
        ("PLUGIN = 3", "PLUGIN of other_plugin is no toolkit.registry.Plugin"),
        ("", "AttributeError: module 'other_plugin' has no attribute 'PLUGIN'"),
        ("PLUGIN = Plugin('other', interface=2)", "written for version 2 of toolkit.registry, and this is version 1"),
        ("PLUGIN = Plugin('other', commands={'status': 'x'})", "status of commands is there already, by toolkit"),
        ("PLUGIN = Plugin('other', commands={'why': 'x'})", "why of commands is there already, by why"),
        ("PLUGIN = Plugin('other', strategies={'ddp': 'x:y'})", "ddp of strategies is there already, by toolkit"),
        ("PLUGIN = Plugin('why')", "there is one of this name"),
        (
            "PLUGIN = Plugin('other', sections={'lab': 'x:Lab'})",
            "sections of a config come with the toolkit's own",
        ),
    ],
)
def test_a_plugin_at_fault_is_named_in_a_line_and_the_others_work(
    site: Path, tmp_path: Path, source: str, why: str
) -> None:
    for path in site.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "other_plugin.py").write_text(f"from toolkit.registry import Plugin\n{source}\n")
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[toolkit.plugins]\nother = other_plugin\n")
    out, err = toolkit(tmp_path, "--help")
    assert "print the last step of a run" in out
    assert [line for line in err.splitlines() if why in line] == err.splitlines()
    assert len(err.splitlines()) == 1


def test_a_rank_of_a_core_strategy_searches_for_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the installed packages would cost each rank's start some hundredths of a second."""
    monkeypatch.setattr(registry, "plugins", lambda: pytest.fail("searched"))
    for name in registry.CORE.strategies:
        check_step(TrainConfig(), StrategyConfig(name))
        assert registry.where("strategies", name) == "toolkit.strategies"
    for name in registry.CORE.backends:
        assert registry.where("backends", name) is not None


def test_a_script_with_the_adapter_of_another_package_has_the_toolkit_in_its_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("from lab_plugin.loop import Lab\n\nLab().fit()\n")
    assert not is_loop("train.py", tmp_path)
    lab = Plugin("lab", adapters={"lab": "lab_plugin.loop"})
    monkeypatch.setattr(registry, "plugins", lambda: (*registry.built_in(), lab))
    assert is_loop("train.py", tmp_path)


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for cached in (registry.built_in, registry.plugins):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "toolkit.plugins", None)
    for name in [name for name in sys.modules if name.startswith("toolkit.plugins.")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for cached in (registry.built_in, registry.plugins):
        cached.cache_clear()


@pytest.mark.usefixtures("without_plugins")
def test_a_toolkit_without_its_plugins_has_the_commands_of_the_core() -> None:
    assert registry.names("commands") == registry.CORE.commands
    assert registry.find("hooks", "cause_of_end") is None
    assert registry.where("commands", "why") is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("strategy.pipeline.schedule=gpipe", "strategy.pipeline needs the plugin pipeline, which is not installed"),
        ("strategy.name=local_sgd", "strategy.name: local_sgd needs the plugin local_sgd, which is not installed"),
        ("train.pruning={amount: 0.5, end_step: 9}", "train.pruning.amount needs the plugin pruning, which is not ins"),
        ("strategy.pipelin.schedule=gpipe", "unknown key 'strategy.pipelin'"),
    ],
)
def test_a_key_of_a_plugin_that_is_not_installed_names_it(override: str, says: str) -> None:
    code = (
        "import sys; sys.modules['toolkit.plugins'] = None\n"
        "from toolkit.base.errors import ConfigError\nfrom toolkit.config import load_config, validate\n"
        f"try:\n    validate(load_config('configs/digits_ddp.yaml', [{override!r}], site=False))\n"
        "except ConfigError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert says in done.stdout


def test_the_plugins_with_sections_are_those_that_the_config_asks() -> None:
    assert {plugin.name for plugin in registry.built_in() if plugin.sections} == {*registry.WITH_SECTIONS}


def test_what_the_plugins_bring_can_be_imported() -> None:
    pytest.importorskip("mpi4py")
    kinds: tuple[registry.Kind, ...] = get_args(registry.Kind)
    assert set(Plugin.__dataclass_fields__) == {"name", "interface", "traits", "waits", *kinds}
    for kind in kinds:
        for name in registry.names(kind):
            assert registry.find(kind, name) is not None
