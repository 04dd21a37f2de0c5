"""What `cluster.extra` may ask of sbatch."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, load_config, validate
from toolkit.config.cluster import FLAGS, REFUSED, SHORT, check_extra


def config_with(**extra: object) -> JobConfig:
    config = JobConfig()
    config.cluster.extra = dict(extra)
    return config


@pytest.mark.parametrize(
    "extra",
    [
        {"begin": "16:00", "deadline": "2030-01-01", "comment": 'it\'s "quoted"; $(rm -rf /)', "nice": True},
        {"mail_type": "FAIL", "mail-user": "me@example.org", "licenses": "matlab:1", "hold": True, "nice": 100},
        {"requeue": "expedite", "oversubscribe": True, "gres": "nvme:1", "mem-per-cpu": "2G", "hint": "nomultithread"},
        {"no_requeue": True, "nodelist": "n[01-04,07]", "reservation": "maintenance", "dependency": "afterok:7"},
    ],
)
def test_flags_that_change_nothing_that_the_toolkit_relies_on_are_taken(extra: dict[str, object]) -> None:
    validate(config_with(**extra))


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("test-only", True, "sbatch would submit nothing with it; `toolkit submit --dry-run`"),
        ("help", True, "sbatch would submit nothing"),
        ("usage", True, "sbatch would submit nothing"),
        ("version", True, "sbatch would submit nothing"),
        ("wait", True, "`toolkit submit --wait` waits"),
        ("parsable", True, "changes what sbatch prints"),
        ("quiet", True, "changes what sbatch prints"),
        ("chdir", "/tmp", "ranks start in the folder in which the run is submitted"),
        ("clusters", "other", "ask the cluster of this login node"),
        ("uid", "root", "belongs to the user who submits it"),
        ("get_user_env", True, "need the environment"),
        ("input", "/dev/null", "reads no input"),
        ("container", "/image", "use cluster.container"),
        ("gpus", 4, "use cluster.gpus_per_node"),
        ("gres", "gpu:a100:4", "asks for 4 GPUs of each node; set cluster.gpus_per_node=4 as well"),
        ("gres", "nvme:1,gres/gpu", "asks for 1 GPUs of each node"),
        ("mem", 0, "use cluster.mem_gb; 0 is all memory of a node"),
        ("exclusive", True, "use cluster.exclusive; only user, mcs and topo"),
        ("nodes", 2, "use cluster.nodes"),
        ("nodes", "2-4", "2-4 goes with cluster.nodes from 2 on"),
        ("distribution", "cyclic", "which rank is on which node"),
        ("N", 2, "use cluster.nodes"),
        ("-p", "gpu", "use cluster.partition"),
        ("H", True, "write the long name of the flag, hold"),
        ("mail-tpye", "FAIL", "sbatch has no flag --mail-tpye; did you mean 'mail-type'?"),
        ("Comment", "x", "sbatch has no flag --Comment; did you mean 'comment'?"),
        ("x y", "1", "sbatch has no flag --x y"),
        ("comment", True, "wants a value"),
        ("hold", "yes", "takes no value; write true"),
        ("comment", "a\n#SBATCH --uid=0", "a line break"),
        ("nice", float("inf"), "must be a text"),
        ("comment", "", "must be a text"),
        ("comment", ["a"], "must be a text"),
        ("requeue", False, "write no-requeue: true"),
        ("nodelist", "n[1-", "this bracket never closes"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused_with_the_reason(flag: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(**{flag: value}))
    assert str(caught.value).startswith(f"cluster.extra.{flag}: ")
    assert says in str(caught.value)


def test_every_flag_that_is_refused_is_one_of_sbatchs_and_says_what_to_do() -> None:
    for flag, reason in REFUSED.items():
        assert flag in FLAGS
        for name in (flag, flag.replace("-", "_")):
            with pytest.raises(ConfigError) as caught:
                check_extra(config_with(**{name: "1"}).cluster)
            assert reason in str(caught.value)


def test_every_short_option_stands_for_a_flag() -> None:
    assert set(SHORT.values()) <= FLAGS.keys()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["cluster.extra={no_requeue: true, no-requeue: true}"], "is there twice"),
        (["cluster.extra={requeue: true, no-requeue: true}"], "does not go with requeue"),
        (["cluster.extra={mem-per-cpu: 2G}", "cluster.mem_gb=4"], "does not go with cluster.mem_gb"),
        (["cluster.exclude=n[1-"], "cluster.exclude: host list 'n[1-', character 2: this bracket never closes"),
        (["cluster.exclude=/no/such/file"], "there is no file /no/such/file"),
    ],
)
def test_flags_that_contradict_each_other_and_no_hosts_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(None, overrides))
    assert says in str(caught.value)


def test_a_flag_of_the_sites_plugins_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(**{"local-scratch": "10G"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no flag --local-scratch"):
        validate(config, login_node=False)
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho '      --local-scratch=SIZE   (of a plugin)'\n")
    (tmp_path / "sbatch").chmod(0o755)
    validate(config, login_node=False)
