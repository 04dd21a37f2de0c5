"""Every new strategy, data set, cluster key and command has all its parts: docs/contributing.md."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.pages import PAGES, ROOT
from tests.smoke import BESIDE_THE_CONTRACT
from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.cli import main as cli
from toolkit.cli.keys import words_by_key
from toolkit.config import ClusterConfig, JobConfig, PruningConfig, StrategyConfig, TrainConfig, check_step, load_config
from toolkit.config.cluster import FLAGS, REFUSED
from toolkit.config.dataset_catalog import entry_of
from toolkit.config.script_keys import OF_LOOPS
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session
from toolkit.run.submission.executors import sbatch_script, srun_options
from toolkit.strategies import build_strategy

#: Keys of ``cluster`` that Slurm is not asked for: the supervisor reads them.
NOT_FOR_SBATCH = {"preflight", "container", "container_mounts", "price", "stage", "stage_dir", "tasks_per_gpu"}


def test_an_unknown_strategy_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError) as caught:
        build_strategy(StrategyConfig("nothing"), cast(Session, SimpleNamespace()))
    assert set(str(caught.value).rpartition("valid: ")[2].split(", ")) == set(registry.names("strategies"))


def test_each_strategy_is_held_to_the_contract_and_has_its_place_in_the_docs() -> None:
    from tests.dist.strategy_cases import SUBJECTS

    held = {config.name for config, _ in SUBJECTS.values()} | BESIDE_THE_CONTRACT
    assert set(registry.names("strategies")) == held, "SUBJECTS of tests/dist/strategy_cases.py"
    table = [line for line in (ROOT / "docs/strategies.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(registry.names("strategies")) <= named, "a row of the first table of docs/strategies.md"


PRUNING = PruningConfig(amount=0.5, end_step=9)
#: What the rows of the table in docs/steps.md ask for, from its first to its last.
OPTIONS_OF_A_STEP = (
    *(TrainConfig(clip_norm=1.0), TrainConfig(skip_bad_steps=True), TrainConfig(ema_decay=0.9)),
    *(TrainConfig(pruning=PRUNING), TrainConfig(pruning=replace(PRUNING, structured=True))),
    *(TrainConfig(sync_batch_norm=True), TrainConfig(channels_last=True)),
)


def is_refused(asked: TrainConfig, strategy: str) -> bool:
    try:
        check_step(asked, StrategyConfig(strategy))
    except ConfigError:
        return True
    return False


def test_the_page_on_steps_says_what_each_strategy_refuses() -> None:
    page = (ROOT / "docs/steps.md").read_text()
    text = page.partition("what works with which `strategy.name`")[2].partition("|\n\n")[0]
    table = [line for line in text.splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")[1:]] for line in table)
    columns = [re.findall(r"`(\w+)`", cell) for cell in names]
    known = sorted([*chain(*columns), "auto", "custom"])
    assert known == sorted(registry.names("strategies")), "a column of the table in docs/steps.md for each strategy"
    for asked, row in zip(OPTIONS_OF_A_STEP, rows, strict=True):
        for strategies, cell in zip(columns, row, strict=True):
            assert {is_refused(asked, name) for name in strategies} == {cell == "no"}, (strategies, asked)


@pytest.mark.parametrize("key", OF_LOOPS)
def test_the_page_on_loops_names_each_key_that_acts_on_one(key: str) -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("loop.md", "gpu.md"))
    name = key.rstrip(".")
    assert f"`{name}`" in pages or f"{name}:" in pages, f"{key} of OF_LOOPS: name it where docs/loop.md lists the keys"


def test_each_data_set_is_a_word_of_its_key_and_in_the_docs() -> None:
    page = (ROOT / "docs/config.md").read_text()
    for name in (found := registry.names("datasets")):
        assert f"`{name}`" in page
        assert name in ("text", "tokens") or entry_of(name).build, "a job reads these two, see toolkit.TokenWindows"
    assert {*found} == {*words_by_key()["data.name"]}


def other(value: Any, name: str) -> Any:
    """Return a value that is not the default ``value``."""
    match value:
        case bool():
            return not value
        case int():
            return value + 2
        case list():
            return [{}, {"nodes": 3}] if name == "components" else ["x"]
        case dict():
            return {"comment": "x"}
    return 2.0 if name == "mem_gb" else "x"


#: Keys of ``cluster`` of which `toolkit doctor` tells srun nothing: it holds each node for some seconds, for one task.
NOT_FOR_SRUN = {
    *("nodes", "tasks_per_node", "cpus_per_task", "mem_gb", "time_min", "spare_nodes", "segment"),
    *("save_before_limit_s", "setup", "extra", "components"),
}


@pytest.mark.parametrize("key", [field.name for field in fields(ClusterConfig) if field.name not in NOT_FOR_SBATCH])
def test_each_key_of_cluster_reaches_sbatch_by_a_flag_that_cannot_be_set_twice(key: str) -> None:
    config, run = JobConfig(cluster=ClusterConfig(gpus_per_node=1)), RunDir(Path("/run"))
    script, options = sbatch_script(config, run), srun_options(config)
    setattr(config.cluster, key, other(asdict(config.cluster)[key], key))
    lines = {*sbatch_script(config, run).splitlines()} - {*script.splitlines()}
    assert lines
    flags = re.findall(r"(?m)^#SBATCH --([\w-]+)", "\n".join(lines))
    assert key == "extra" or {*flags} <= REFUSED.keys(), "a flag that is missing in REFUSED of cluster.py"
    assert (srun_options(config) != options) == (key not in NOT_FOR_SRUN), "`srun_options()` of executors.py, or here"


#: How a follow-up job that is submitted inside a job gets a key's value: by Slurm's variables or answer about the job,
#: or a value of its own.
INHERITED = {
    **dict.fromkeys(("nodes", "tasks_per_node", "cpus_per_task", "mem_gb", "time_min", "components"), "its variables"),
    **dict.fromkeys(("partition", "account"), "its variables"),
    **dict.fromkeys(("gpus_per_node", "gpu_type", "constraint", "exclude", "exclusive", "qos"), "Slurm's answer"),
    **dict.fromkeys(("save_before_limit_s", "spare_nodes", "setup", "extra"), "config.yaml"),
    "segment": "its batch script",
}


def test_each_key_of_cluster_reaches_a_follow_up_job_too() -> None:
    """`options_of_job` of follow_up.py, for a run that no `toolkit submit` has sent. Add a new key there, then here."""
    assert {field.name for field in fields(ClusterConfig)} == {*INHERITED, *NOT_FOR_SBATCH}


def commands() -> Mapping[str, argparse.ArgumentParser]:
    [found] = [action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return cast(Mapping[str, argparse.ArgumentParser], found.choices)


@pytest.mark.parametrize("command", list(commands()))
def test_each_command_is_in_the_docs(command: str) -> None:
    assert any(f"toolkit {command}" in page.read_text() for page in PAGES)


def test_the_table_of_requests_for_gpus_has_each_flag_and_its_keys_are_taken() -> None:
    """tests/slurm/test_gpus.py has a case for each row."""
    page = (ROOT / "docs/gpu.md").read_text()
    table = page.partition("## Requests for GPUs\n")[2].partition("|\n\n")[0].splitlines()
    rows = [row.strip("| ").split(" | ") for row in table if row.startswith("| `")]
    flags = {word.partition("=")[0].lstrip("-") for options, _, _ in rows for word in options.strip("`").split()}
    of_gpus = {flag for flag in FLAGS if re.search(r"gpu|gres|tres-per|exclusive|overcommit", flag)}
    assert of_gpus - flags == set(), "a flag without a row"
    for _, _, keys in rows:
        pairs = dict(re.findall(r"`(cluster\.\w+): (.+?)`", keys))
        load_config(None, [f"{key}={value}" for key, value in pairs.items()]).cluster.check()
