"""Values that cannot be meant, key by key, and their error messages. No job is queued with one."""

import math
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import JobConfig, all_keys, load_config, validate, value_of
from toolkit.config.cluster import FLAGS, REFUSED, SHORT, check_extra


def refusal(*overrides: str, login_node: bool = True) -> str:
    with pytest.raises(RequestError) as caught:
        validate(load_config(None, overrides), login_node=login_node)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("name='a b'", "name: 'a b' names a folder: 100 letters, digits, . _ - at most"),
        ("name=../x", "name: '../x' names a folder"),
        ("name=-x", "name: '-x' names a folder"),
        ('name="a\\n#SBATCH --uid=0"', "name: "),
        (f"name={'a' * 101}", "name: "),
        ('job=""', "job: '' is empty"),
        ("job=..", "job: no module '..'"),
        ("job=a b", "job: no module 'a b'"),
        ("job=/etc/passwd", "job: no module '/etc/passwd'"),
        ("job=sys", "job: no module 'sys'"),
        (f"job={'a' * 5000}", "job: no module 'aaa"),
        ("cluster.nodes=0", "cluster.nodes: 0 is out of range; must be between 1 and 65533"),
        ("cluster.nodes=70000", "cluster.nodes: 70000 is out of range; must be between 1 and 65533"),
        ("cluster.tasks_per_node=0", "cluster.tasks_per_node: 0"),
        ("cluster.cpus_per_task=100000", "cluster.cpus_per_task: 100000"),
        ("cluster.gpus_per_node=-1", "cluster.gpus_per_node: -1"),
        ("cluster={gpu_type: 'a100:2', gpus_per_node: 1}", "cluster.gpu_type: 'a100:2' is not a type of a GPU"),
        ("cluster.mem_gb=0.0001", "cluster.mem_gb: 0.0001 is less than a megabyte; 0 is all memory of a node"),
        ("cluster.mem_gb=.inf", "cluster.mem_gb: inf is out of range"),
        ("cluster.time_min=0", "cluster.time_min: 0 is out of range"),
        ("cluster.time_min=10000000", "cluster.time_min: 10000000 is out of range"),
        ('cluster.partition=" "', "cluster.partition: ' ' is empty"),
        ('cluster.account=""', "cluster.account: '' is empty"),
        ('cluster.qos="a\\tb"', "cluster.qos: 'a\\tb' is empty or holds a line break"),
        ('cluster.constraint="a\\u2028b"', "cluster.constraint: 'a\\u2028b' is empty or holds a line break"),
        ("cluster.exclude='n[1-'", "cluster.exclude: host list 'n[1-', character 2: unclosed bracket"),
        (
            "cluster.exclude='n[2-1]'",
            "cluster.exclude: host list 'n[2-1]', character 3: the range '2-1' runs back",
        ),
        ("cluster.exclude='n1,$(x)'", "cluster.exclude: '$(x)' is not a host's name"),
        ("cluster.exclude=','", "cluster.exclude: ',' is not a host's name"),
        ("cluster.exclude=/no/list", "cluster.exclude: there is no file /no/list"),
        ("cluster.spare_nodes=1000000000000", "cluster.spare_nodes: 1000000000000 is out of range"),
        ("cluster.save_before_limit_s=-1", "cluster.save_before_limit_s: -1"),
        ("cluster.save_before_limit_s=70000", "cluster.save_before_limit_s: 70000 is out of range; must be "),
        ('cluster.setup=["ls\\nrm"]', "cluster.setup[0]: 'ls\\nrm' is empty or holds a line break"),
        ('cluster.setup=["ls\\0"]', "cluster.setup[0]: 'ls\\x00' is empty or holds a line break"),
        ("cluster.setup=['#SBATCH --uid=0']", "cluster.setup: '#SBATCH --uid=0' is an option of sbatch"),
        ("cluster.setup=['module load x \\']", "cluster.setup: 'module load x \\\\' ends with a backslash"),
        ('cluster.setup=["echo \'a"]', "cluster.setup: bash cannot read these lines: "),
        ("cluster.setup=['if true; then']", "cluster.setup: bash cannot read these lines: "),
        ("cluster.setup=['cat <<END', text]", "cluster.setup: bash cannot read these lines: "),
        ("cluster.container=/no/image.sif", "cluster.container: there is no /no/image.sif"),
        (
            "cluster={container_mounts: [/no/folder], container: 'pyxis:a'}",
            "cluster.container_mounts: there is no folder /no/folder",
        ),
        ("cluster.extra={test-only: true}", "cluster.extra.test-only: sbatch would submit nothing"),
        ("retry.max_failures=-1", "retry.max_failures: -1"),
        ("retry.max_requeues=-1", "retry.max_requeues: -1"),
        ("retry.no_progress_attempts=0", "retry.no_progress_attempts: 0 is out of range; must be "),
        ("retry.no_progress_attempts=-1", "retry.no_progress_attempts: -1 is out of range"),
        ("dist.timeout_s=1000000000", "dist.timeout_s: 1000000000 is out of range"),
        ("data.root=~nobody9/x", "data.root: there is no user whose home folder '~nobody9/x' could be in"),
        ("model.init_from=~nobody9/x", "model.init_from: there is no user whose home folder '~nobody9/x' could be in"),
        ("checkpoint.copy_to=~nobody9", "checkpoint.copy_to: there is no user whose home folder '~nobody9' could be"),
        (
            "cluster={container_mounts: [~nobody9], container: 'pyxis:a'}",
            "cluster.container_mounts[0]: there is no user whose home folder",
        ),
        (f"data.root={'a' * 5000}", "data.root: 'aaa"),
        ("data.root=/no/such/folder", "data.root: there is no folder /no/such/folder"),
        ("data.global_batch_size=1000000000000", "data.global_batch_size: 1000000000000 is out of range"),
        ("data.workers=100000", "data.workers: 100000 is out of range"),
        ("data.image_size=0", "data.image_size: 0 is out of range"),
        ("optim.lr=-1", "optim.lr: -1.0 is out of range"),
        ("optim.momentum=1.5", "optim.momentum: 1.5 is out of range; must be between 0 and 1"),
        ("optim.momentum=1", "optim.momentum: 1 never forgets anything; use less than 1"),
        ("optim.weight_decay=.nan", "optim.weight_decay: nan is out of range"),
        ("optim.name=adamv", "optim.name: unknown value 'adamv'; did you mean 'adam"),
        ("optim.name=my-package.Sgd", "optim.name: unknown value 'my-package.Sgd'; "),
        ("optim.schedule=cosin", "optim.schedule: unknown value 'cosin'; did you mean 'cosine'"),
        ("optim.min_lr=1", "optim.min_lr: 1.0 is more than optim.lr 0.05"),
        ("optim.min_lr=0.01", "optim.min_lr: optim.schedule constant never falls"),
        ("optim.decay_steps=9", "optim.decay_steps: constant falls from the end of the warm-up on; use"),
        ("optim={nesterov: true, name: adam}", "optim.nesterov: is for optim.name sgd, muon, not adam; leave it out"),
        (
            "optim={eps: 1e-6, name: a.B}",
            "optim.eps: is for optim.name adam, adamw, muon, not a.B; set the argu",
        ),
        (
            "optim.arguments.dampening=0.1",
            "optim.arguments: is for optim.name muon, not sgd; for others",
        ),
        ("optim={nesterov: true, momentum: 0}", "optim.nesterov: needs momentum, and optim.momentum is 0"),
        (
            "optim={name: adam, betas: [0.9]}",
            "optim.betas: [0.9] is out of range; must be two numbers from 0 to below 1",
        ),
        ("optim={name: adam, betas: [0.9, 1]}", "optim.betas: [0.9, 1.0] is out of range"),
        ("optim.groups.head.*={lr_scal: 2}", "optim.groups.head.*: unknown value 'lr_scal'; did you mean 'lr_scale'"),
        ("optim.groups.head.*={lr_scale: -1}", "optim.groups.head.*.lr_scale: -1 is out of range"),
        ("optim.groups.head.*={lr_scale: fast}", "optim.groups.head.*.lr_scale: 'fast' is not valid; must be a"),
        ("optim.groups.head.*={optimizer: adamw}", "optim.groups.head.*: unknown value 'optimizer'"),
        ("optim={name: a.B, groups: {x: {lr: 1}}}", "optim.groups.x.lr: the schedule sets the rate; give its part as"),
        ("optim={name: muon, groups: {x: {optimizer: sgd}}}", "optim.groups.x.optimizer: unknown value 'sgd'"),
        (
            "optim={name: muon, arguments: {ns_step: 4}}",
            "optim.arguments: unknown value 'ns_step'; did you mean",
        ),
        (
            "optim={name: muon, arguments: {ns_steps: 0.5}}",
            "optim.arguments.ns_steps: 0.5 is not valid; must",
        ),
        (
            "optim={name: muon, arguments: {ns_coefficients: [1]}}",
            "optim.arguments.ns_coefficients: [1.0] is not valid",
        ),
        ("optim={name: muon, arguments: {adjust_lr_fn: rms}}", "optim.arguments.adjust_lr_fn: unknown value 'rms'"),
        ("train.seed=-1", "train.seed: -1 is out of range; must be "),
        ("train.seed=18446744073709551616", "train.seed: 18446744073709551616 is out of range"),
        (
            "train.eval_every=10000000000000000",
            "train.eval_every: 10000000000000000 is not valid; must be a number of steps",
        ),
        ("checkpoint.every_min=1e30", "checkpoint.every_min: 1e+30 is out of range"),
        ("checkpoint.copy_to=/proc/copies", "checkpoint.copy_to: /proc/copies cannot be written: /proc: "),
        ("checkpoint.copy_to=/dev/null/copies", "checkpoint.copy_to: /dev/null/copies cannot be written: /dev/null: "),
        ('checkpoint.copy_to=""', "checkpoint.copy_to: '' is empty"),
        ('checkpoint.keep_best=""', "checkpoint.keep_best: '' is empty"),
        ("notify.command=[no-such-program, now]", "notify.command: there is no program 'no-such-program'"),
        ("notify.command=[/etc/passwd]", "notify.command: there is no program '/etc/passwd'"),
        ('notify.command=[sh, -c, "a\\0"]', "notify.command[2]: 'a\\x00' is empty or holds a line break"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_its_key(override: str, says: str) -> None:
    assert refusal(override).startswith(says)


@pytest.mark.parametrize(
    "override",
    [
        'cluster.setup=["module load x", "\\techo $HOME", "for f in a b; do", "echo $f", "done", ""]',
        "cluster.exclude='n[01-04,07],login'",
        "cluster.exclude=/etc/hosts",
        "cluster={gpu_type: nvidia_a100_1g.5gb, gpus_per_node: 1}",
        "cluster.account='日本 語'",
        "optim={name: mine.Lion, arguments: {betas: [0.9, 0.99], use: fast}, groups: {head.*: {rho: 0.1}}}",
        "train.seed=9223372036854775807",
    ],
)
def test_a_value_that_is_only_unusual_is_taken(override: str) -> None:
    validate(load_config(None, [override]))


def test_lines_of_bash_are_fine_in_a_locale_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """bash warns of it, as do the locales that ssh takes along from a laptop."""
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    validate(load_config(None, ["cluster.setup=['echo é']"]))
    assert refusal("cluster.setup=['if é']").startswith("cluster.setup: bash cannot read these lines: ")


def test_no_number_of_a_config_can_be_huge_or_none() -> None:
    """Every key that takes a number has limits."""
    for key in all_keys():
        section, _, leaf = key.rpartition(".")
        hint = get_type_hints(type(value_of(JobConfig(), section) if section else JobConfig()))[leaf]
        kinds = set(get_args(hint) or [hint])
        odd = ([10**30, -(10**30)] if int in kinds else []) + (
            [math.inf, -math.inf, math.nan] if float in kinds else []
        )
        for value in odd:
            config = JobConfig()
            setattr(value_of(config, section), leaf, value)
            with pytest.raises(RequestError, match=key.replace(".", r"\.")):
                validate(config)


def test_what_is_not_there_is_for_the_login_node_to_say() -> None:
    overrides = ["notify.command=[no-such-program]", "checkpoint.copy_to=/proc/copies", "data.root=/no/such/folder"]
    validate(load_config(None, overrides), login_node=False)


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
        ("nodelist", "n[1-", "unclosed bracket"),
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
        (["cluster.extra={no_requeue: true, no-requeue: true}"], "is given twice"),
        (["cluster.extra={requeue: true, no-requeue: true}"], "does not go with requeue"),
        (["cluster.extra={mem-per-cpu: 2G}", "cluster.mem_gb=4"], "does not go with cluster.mem_gb"),
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
