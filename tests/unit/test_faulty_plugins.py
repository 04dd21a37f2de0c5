"""Plugins that are absent or at fault: each use of a hook in the core says what then happens."""

from __future__ import annotations

import ast
import selectors
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit
from tests.pages import ROOT
from tests.waiting import PATIENCE
from toolkit import registry
from toolkit.base.errors import ConfigError, PluginError, RequestError, RunNotFoundError, ToolkitError
from toolkit.cli import main as cli
from toolkit.config import load_config
from toolkit.files import rundir
from toolkit.nodes.agent.helpers import Helpers
from toolkit.run.prepare.new_run import check_submittable
from toolkit.train.lifecycle import NoRequests

#: These are found by the core itself, which says what is missing: other callers ask in a way that copes with a fault.
FOUND = {"on_request", "withdraw_retry", "open_gpus"}
#: These carry out what a user has asked for. All others look, advise or measure.
NEEDED = {
    *("second_place", "state_copies", "bad_samples", "balance", "initial_weights", "muon", "prune", "trace", "faults"),
    *(
        "launcher",
        "watch_batch_host",
        "compressed_gradients",
        "after",
        "wait_for_other_runs",
        "sweep_rows",
        "named_runs",
    ),
    "on_request",
}


def uses() -> dict[str, set[str]]:
    """Return the hooks that the core names, by the function of the registry that it asks."""
    found: dict[str, set[str]] = {}
    core = Path(toolkit.__file__).parent
    for path in core.rglob("*.py"):
        if path.is_relative_to(core / "plugins") or path.name == "registry.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("registry"), "find" as how), [ast.Constant("hooks"), named, *_]):
                    pass
                case ast.Call(ast.Attribute(ast.Name("registry"), how), [named, *_]):
                    pass
                case _:
                    continue
            hooks = [each.value for each in ast.walk(named) if isinstance(each, ast.Constant)]
            found.setdefault(how, set()).update(str(hook).partition(".")[0] for hook in hooks)
    return found


def test_each_use_of_a_hook_says_what_holds_where_it_fails() -> None:
    used = uses()
    kinds = {"commands", "strategies", "datasets", "checks", "backends", "devices"}
    assert used["find"] - kinds == FOUND
    assert used["needed"] == NEEDED, "each names a key or a command"
    assert not (used["call"] | used["Guarded"]) & NEEDED


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have one plugin with a module that cannot be imported; return the module."""
    module = tmp_path / "lab_broken.py"
    module.write_text("import nosuchlib\n")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = dict.fromkeys(("run_ended", "pace", "muon", "named_runs", "tokenize", "check_site"), "lab_broken:Hook")
    lab = registry.Plugin("lab", hooks=hooks, commands={"lab": "lab_broken"})
    monkeypatch.setattr(registry, "plugins", cache(lambda: (*registry.built_in(), lab)))
    return module


WHY = "which cannot be loaded: ModuleNotFoundError: No module named 'nosuchlib'"


@pytest.mark.usefixtures("broken")
def test_what_cannot_be_imported_costs_a_line_or_names_the_key(caplog: pytest.LogCaptureFixture) -> None:
    assert registry.call("run_ended", 1) is None
    assert registry.ask("check_site", 1) is None
    pace = registry.Guarded("pace", 1)
    assert not pace
    assert pace.ask("compare", [1.0]) is None
    lines = [record.message for record in caplog.records]
    assert [line.split()[2] for line in lines] == ["run_ended", "check_site", "pace"]
    assert all(WHY in line for line in lines)
    registry.require("muon", "optim.name: muon")  # on a login node without torch
    with pytest.raises(PluginError, match=rf"^optim\.name: muon: muon of hooks needs lab_broken:Hook, {WHY}"):
        registry.needed("muon", "optim.name: muon")
    with pytest.raises(ConfigError, match=r"data\.share: auto needs a plugin that is not installed"):
        registry.require("balance", "data.share: auto")


@pytest.mark.usefixtures("broken")
def test_a_command_that_cannot_be_imported_spoils_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "nosuchlib" not in capsys.readouterr().err
    assert cli.main(["lab"]) == 2
    assert f"toolkit: error: lab of commands needs lab_broken, {WHY}" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    out, _ = capsys.readouterr()
    assert "submit" in out
    assert out.count("cannot be loaded: lab of commands") == 1


@pytest.mark.usefixtures("broken")
def test_runs_are_found_beside_sweeps_that_nothing_can_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = rundir.create("digits", tmp_path)
    run.config.write_text("")
    (tmp_path / rundir.SWEEPS / "lr").mkdir(parents=True)
    (tmp_path / rundir.SWEEPS / "lr/sweep.json").write_text("{}")
    assert rundir.find("digits", tmp_path).id == run.id
    assert "named_runs has failed" in caplog.text
    with pytest.raises(PluginError, match="the sweep 'lr'"):
        rundir.find("lr", tmp_path)


def test_what_a_hook_says_to_the_user_passes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(what: Exception) -> None:
        raise what

    monkeypatch.setattr(registry, "find", lambda kind, name: refuse)
    with pytest.raises(RunNotFoundError, match="no run"):
        registry.ask("named_runs", RunNotFoundError("no run"))
    assert registry.call("run_ended", RequestError("no place")) is None
    assert registry.ask("check_site", OSError("away")) is None
    assert len(caplog.records) == 2


def test_a_section_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lab = registry.Plugin("lab", sections={"strategy.lab": "no_such_module:Lab"})
    monkeypatch.setattr(registry, "_load_built_in", lambda names: iter([lab]))
    assert [*registry.sections("strategy")] == []
    assert "the section strategy.lab is left out: no_such_module:Lab: ModuleNotFoundError" in caplog.text


def test_ranks_without_the_plugin_of_requests_refuse_what_others_have_set(tmp_path: Path) -> None:
    told: dict[str, Any] = {}

    def from_main(topic: str, say: Any) -> Any:
        return told.get(topic, say())

    run = rundir.create("digits", tmp_path)
    session: Any = SimpleNamespace(run_dir=run.path, from_main=from_main)
    requests = NoRequests(session)
    requests.resume(3)
    requests.carry_out("request/7", 3)  # rank 0: the others are told to do nothing
    told["changes"] = [(2, "optim.lr", 0.1)]
    with pytest.raises(ToolkitError, match=r"what was set while the run trained .*optim\.lr.* needs a plugin"):
        requests.resume(3)


@pytest.mark.parametrize("override", ["cluster.spare_nodes=1", "cluster.nodes=2 retry.allow_fewer_nodes=true"])
def test_a_job_that_may_lose_nodes_is_refused_before_it_is_queued(override: str) -> None:
    words = ["cluster.tasks_per_node=1", *override.split()]
    config = load_config(ROOT / "configs/digits_ddp.yaml", words, project=ROOT, site=False)
    with pytest.raises(ConfigError, match=r"cluster\.spare_nodes or retry\.allow_fewer_nodes needs a plugin"):
        check_submittable(config, "slurm", ROOT)


def test_an_agent_outlives_a_plugin_that_fails_at_what_a_helper_says(caplog: pytest.LogCaptureFixture) -> None:
    def fail(text: bytes) -> None:
        raise ValueError("no number")

    with selectors.DefaultSelector() as selector:
        Helpers(selector).ask(["true"], fail)
        while selector.get_map():
            for key, _ in selector.select(PATIENCE):
                key.data()
    assert "the output of true is not heard any more: ValueError" in caplog.text


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("from toolkit.registry import Plugin; PLUGIN = Plugin('p', commands=None)", "its commands are None"),
        ("from toolkit.registry import Plugin; PLUGIN = Plugin('p', commands={7: 'm'})", "7: 'm' is not a name"),
        ("from toolkit.registry import Plugin; PLUGIN = Plugin('p', hooks={'watch': None})", "'watch': None is not"),
        ("from toolkit.registry import Plugin; PLUGIN = Plugin('p', traits={'s': True})", "and a StrategyTraits"),
        ("from toolkit.registry import Plugin; PLUGIN = Plugin(None)", "its name is None"),
    ],
)
def test_a_plugin_at_fault_is_left_out_with_a_line(
    source: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "their_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_plugin", raising=False)
    assert [*registry._load([("theirs", "their_plugin")])] == []
    assert "plugin theirs is left out" in caplog.text
    assert why in caplog.text


def test_a_part_of_a_plugin_that_ends_the_program_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_the_program.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "where", lambda kind, name: "ends_the_program")
    with pytest.raises(PluginError, match="cannot be loaded: SystemExit: 0"):
        registry.find("hooks", "their_hook")
