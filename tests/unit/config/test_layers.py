"""Layers, strictness and the checks before anything is queued."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from tests.unit.config.conftest import ROOT
from toolkit import config as configs
from toolkit import registry
from toolkit.base import staged
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import (
    JobConfig,
    MeshConfig,
    StrategyConfig,
    check_section,
    job_module,
    load_config,
    schema,
    validate,
)
from toolkit.config.dataset_catalog import data_root
from toolkit.constraints import PATH, OneOf, Range, Where
from toolkit.files import records
from toolkit.files.rundir import RUN_DIR_VARIABLE


@pytest.fixture(autouse=True)
def warns_again() -> None:
    """Forget what another test was warned of in this process."""
    records.warn_once.cache_clear()


def able(trait: str, between: str = " or ") -> str:
    """Return the strategies with this trait as errors list them."""
    return between.join(registry.with_trait(trait))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_layers_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write(tmp_path, "site.yaml", "cluster: {account: acc, partition: site}\noptim: {lr: 1.0}\n")
    monkeypatch.setenv("TOOLKIT_SITE", str(site))
    write(tmp_path, "base.yaml", "optim: {lr: 2.0, momentum: 0.5}\ncluster: {partition: base}\n")
    top = write(tmp_path, "top.yaml", "extends: base.yaml\noptim: {lr: 3.0}\n")
    config = load_config(top, ["optim.lr=4.0"])
    assert (config.optim.lr, config.optim.momentum) == (4.0, 0.5)
    assert (config.cluster.account, config.cluster.partition) == ("acc", "base")
    assert config.name == "top"


def test_sbatchs_variables_count_where_no_layer_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch itself does not get them: it would prefer them to the config."""
    variables = {"SBATCH_ACCOUNT": "0755", "SBATCH_PARTITION": "gpu", "SBATCH_QOS": "", "SBATCH_CONSTRAINT": "${x}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOOLKIT_SITE", str(write(tmp_path, "site.yaml", "cluster: {partition: null}\n")))
    cluster = load_config(None).cluster
    assert (cluster.account, cluster.partition, cluster.qos, cluster.constraint) == ("0755", None, None, "${x}")
    assert load_config(None, ["cluster.account=phys"]).cluster.account == "phys"
    assert load_config(None, site=False).cluster.account is None, "a run keeps what its config.yaml has"


def test_dumped_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(ROOT / "configs/digits_ddp.yaml", ["cluster.extra.nodelist=n[1-2]", "train.max_steps=7"])
    assert load_config(write(tmp_path, "c.yaml", configs.dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lrr=1", ["optim.lrr: unknown key", "did you mean 'optim.lr'?", "momentum"]),
        ("lr=1", ["lr: unknown key", "did you mean 'optim.lr'?"]),
        ("trian.epochs=1", ["trian: unknown key", "did you mean 'train'?"]),
        ("optim.lr=fast", ["optim.lr", "'fast' is text", "must be a number"]),
        ("cluster.nodes=two", ["cluster.nodes", "must be a whole number"]),
        ("optim=3", ["optim is a section"]),
        ("notify.command=mail me", ["notify.command is a list"]),
        ("notify.command=[mail,null]", ["notify.command[1]", "is empty"]),
        ("optim.lr", ["key=value"]),
        ("optim.lr=[", ["not valid YAML"]),
        ("optim.groups.head.*.lr_scale=2", ["optim.groups.head.*.lr_scale is a mapping"]),
        ("optim.groups={a: {b: {c: 1}}}", ["optim.groups.a.b takes text or a whole number"]),
        ("optim.betas=[a, b]", ["optim.betas[0]: 'a' is text; must be a number"]),
        ("optim.arguments={a: [b]}", ["optim.arguments.a[0]: 'b' is text"]),
    ],
)
def test_a_wrong_key_or_type_is_refused_by_its_full_name(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "configs/digits_ddp.yaml", [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {epoch: 3}\n", r"x\.yaml.*train\.epoch: unknown key.*did you mean 'train\.epochs'"),
        *[(f"extends: {base}\n", r"x\.yaml") for base in ("nothing.yaml", ".", '"a\\0b"')],
        ("extends: y.yaml\n", "extends itself"),
        *[(text, r"x\.yaml") for text in ("- a\n- b\n", "a: [1\n", "just words\n")],
        (
            "strategy:\n  name: ddp\n  local_sgd:\n    round_steps: 4\n",
            r"x.yaml, line 4: strategy.local_sgd.round_steps: changes nothing",
        ),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_its_name(tmp_path: Path, text: str, says: str) -> None:
    write(tmp_path, "y.yaml", "extends: x.yaml\n")
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, "x.yaml", text))


def test_a_missing_file_lists_what_is_there() -> None:
    with pytest.raises(ConfigError, match=r"configs/digit_ddp\.yaml.*did you mean 'configs/digits_ddp\.yaml'"):
        load_config("configs/digit_ddp.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy.name=dddp", ["strategy.name", "did you mean 'ddp'?"]),
        ("strategy.name=dp", ["strategy.name", "one process", "cluster.tasks_per_node to 1"]),
        ("strategy.compression=topc", ["strategy.compression", "did you mean 'topk'?"]),
        (
            "strategy={name: fsdp, compression: topk}",
            ["strategy.compression", f"topk goes with strategy.name {able('compression')} only"],
        ),
        ("'strategy={name: zero, compression: bf16, compression_layers: {a: none}}'", ["compression_layers", "leave"]),
        ("strategy={compression: topk, compression_ratio: 0}", ["strategy.compression_ratio", "above 0"]),
        ("strategy={compression: topk, compression_average: 1}", ["strategy.compression_average", "such as 0.9"]),
        ("strategy={compression: bf16, compression_average: 0.9}", ["strategy.compression_average", "use topk"]),
        (
            "strategy={compression: powersgd, compression_rank: 0}",
            ["strategy.compression_rank", "must be between 1 and"],
        ),
        ("'strategy={compression_layers: {\"*\": none}}'", ["strategy.compression_layers", "nothing is compressed"]),
        ("'strategy={compression: topk, compression_layers: {\"0.*\": 2}}'", ["compression_layers: 0.*", "at most 1"]),
        ("'strategy={compression: powersgd, compression_layers: {a: 0.5}}'", ["compression_layers: a", "a rank of 1"]),
        ("'strategy={compression: int8, compression_layers: {a: 4}}'", ["compression_layers: a", "or not listed"]),
        ("job=jobs.clasify", ["job", "did you mean 'jobs.classify'?"]),
        ("model.init_from=nowhere.pt", ["model.init_from", "nowhere.pt is not a file", "or a run"]),
        ("model.name=resnet19", ["model.name", "did you mean 'resnet18'?"]),
        ("data.name=digts", ["data.name", "did you mean 'digits'?"]),
        ("data.global_batch_size=1", ["data.global_batch_size", "2 ranks"]),
        ("train.accumulate=33", ["train.accumulate", "32"]),
        ("data.balance=atuo", ["data.balance", "did you mean 'auto'?"]),
        (
            "data.balance=auto strategy.name=fsdp",
            ["data.balance", "fsdp", f"use {able('local_stopwatch', ', ')}, or even"],
        ),
        ("data.partition=hsah", ["data.partition", "did you mean 'hash'?"]),
        ("data.partition=hash data.balance=auto", ["data.balance", "data.partition: hash"]),
        ("data.partition=blocks data.bad_samples=skip", ["data.bad_samples", "data.partition: blocks"]),
        ("data.partition=blocks retry.allow_fewer_nodes=true", ["retry.allow_fewer_nodes", "data.partition: blocks"]),
        ("checkpoint.keep=1", ["checkpoint.keep", "2 or more"]),
        ("checkpoint.keep_every=0", ["checkpoint.keep_every", "1 or more"]),
        ("checkpoint.keep_best=--loss", ["checkpoint.keep_best", "-eval/loss"]),
        ("checkpoint.copy_to=backup", ["checkpoint.copy_to", "absolute path"]),
        ("dist.backend=nccl", ["dist.backend", "gpus_per_node"]),
        ("dist.backend=ncl", ["did you mean 'nccl'?"]),
        ("cluster.gpus_per_node=1", ["cluster.tasks_per_node", "2 ranks cannot share 1 GPUs", "tasks_per_gpu=2"]),
        ("optim.lr=.inf", ["optim.lr", "inf"]),
        ("optim.lr=.nan", ["optim.lr"]),
        ("train.eval_every=0", ["train.eval_every"]),
        ("train.eval_every=never", ["train.eval_every", "'epoch'"]),
        ("checkpoint.every_steps=0", ["checkpoint.every_steps"]),
        ("checkpoint.every_steps=often", ["checkpoint.every_steps", "'auto'"]),
        ("checkpoint.memory_every_steps=0", ["checkpoint.memory_every_steps"]),
        ("checkpoint.memory_every_steps=often", ["checkpoint.memory_every_steps", "'auto'"]),
        ("checkpoint.every_min=0", ["checkpoint.every_min", "must be between 0.01 and"]),
        ("cluster.container=x.sif", ["cluster.container", "absolute path"]),
        ("cluster.container=python:3.11", ["cluster.container", "apptainer:python:3.11 or pyxis:python:3.11"]),
        ("cluster.spare_nodes=-1", ["cluster.spare_nodes", "must be between 0 and"]),
        (
            "'cluster.components=[{tasks_per_node: 0}]'",
            ["cluster.components[0].tasks_per_node", "must be between 1 and"],
        ),
        ("'cluster.components=[{}, {nodes: two}]'", ["cluster.components[1].nodes: 'two'", "a whole number"]),
        ("'cluster.components=[{tasks_per_nod: 1}]'", ["cluster.components[0]", "did you mean 'tasks_per_node'?"]),
        ("'cluster.components=[{extra: 1}]'", ["cluster.components[0].extra", "valid: nodes, tasks_per_node"]),
        ("'cluster.components=[{}, {gpus_per_node: 1}]'", ["cluster.components[1].tasks_per_node", "2 ranks cannot"]),
        ("'cluster.components=[{gpus_per_node: 1, tasks_per_node: 1}, {}]'", ["dist.backend", "gloo only"]),
        ("cluster.components=[{exclude: 'n[1'}]", ["cluster.components[0].exclude", "n[1"]),
        ("cluster.components=[{},{}] cluster.container=pyxis:a", ["cluster.components", "Pyxis", "one component"]),
        ("cluster.components=[{},{nodes: 63}] data.global_batch_size=100", ["data.global_batch_size", "128 ranks"]),
        ("job=jobs.classify.Classify", ["job: jobs.classify.Classify: name the module alone, `job: jobs.classify`"]),
        ("name=../x", ["name"]),
        ('notify.command=[""]', ["notify.command", "a program and its arguments"]),
        ('notify.command=["mail", "a\\0b"]', ["notify.command[1]", "control character"]),
        ("cluster.extra.nodes=3", ["cluster.nodes"]),
        ("train.clip_norm=0", ["train.clip_norm", "1e-12 or more"]),
        ("train.spike_factor=5", ["train.spike_factor", "train.skip_bad_steps: true"]),
        ("train.rollback_after=5", ["train.rollback_after", "train.skip_bad_steps: true"]),
        ("train.skip_bad_steps=true train.spike_factor=1", ["train.spike_factor", "1.01 or more"]),
        ("train.skip_bad_steps=true strategy.name=fsdp", ["train.skip_bad_steps", "adamw"]),
        ("strategy.compression=int8 train.skip_bad_steps=true train.spike_factor=3", ["train.spike", "compression"]),
        ("train.ema_decay=1", ["train.ema_decay", "between 0 and 1"]),
        ("train.precision=fp16 strategy.name=zero", ["train.precision", "bf16"]),
        ("train.precision=fp16 strategy.compression=int8", ["train.precision", "compression"]),
        ("train.channels_last=true strategy.name=fsdp", ["train.channels_last", "ddp"]),
        ("train.pruning.amount=1", ["train.pruning.amount", "below 1"]),
        ("train.pruning.amount=0.5", ["train.pruning.end_step", "in which step"]),
        ("'train.pruning={amount: 0.5, start_step: 9, end_step: 8}'", ["train.pruning.end_step", "start_step 9"]),
        ("'cluster.extra={\"x y\": 1}'", ["cluster.extra"]),
    ],
)
def test_what_cannot_work_is_refused_with_key_and_remedy(
    override: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_DATA", str(tmp_path / "nothing"))
    config = load_config(ROOT / "configs/digits_ddp.yaml", _words(override))
    with pytest.raises(RequestError) as caught:
        validate(config)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


def _words(overrides: str) -> list[str]:
    """Split overrides as a shell would; a space within a value stays."""
    return re.split(r" (?=[a-z_.]+=)", overrides.strip("'"))


def test_a_run_that_goes_on_does_not_need_what_it_was_started_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, "runs/digits-ddp/20260102-030405-abcd")
    validate(load_config(ROOT / "configs/digits_ddp.yaml", ["model.init_from=gone.pt"]), login_node=False)


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "exclude"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\rb", "", "a\x00b"])
def test_a_control_character_cannot_start_a_shell_line(key: str, value: str) -> None:
    config = JobConfig()
    setattr(config.cluster, key, value)
    with pytest.raises(ConfigError, match=rf"cluster\.{key}"):
        validate(config)


def test_a_job_without_main_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nomain.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"nomain.*has no function main"):
        validate(JobConfig(job="nomain"))


def test_who_makes_the_step_is_known_before_anything_is_queued() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.name: custom is for a job with a step of its own.*use ddp"):
        validate(load_config(ROOT / "configs/digits_ddp.yaml", ["strategy.name=custom"]))
    with pytest.raises(ConfigError, match=r"strategy\.name: fsdp is not what jobs\.custom does.*set it to custom"):
        validate(load_config(ROOT / "configs/gan.yaml", ["strategy.name=fsdp"]))


def test_a_jobs_folder_that_is_no_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/mine.py").write_text("def main(config): print(config)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"add jobs/__init__\.py"):
        validate(JobConfig(job="jobs.mine"))


def test_the_shipped_list_of_models_is_torchvisions() -> None:
    models = pytest.importorskip("torchvision").models
    assert job_module.torchvision_models() == models.list_models(module=models)


def test_every_default_is_valid() -> None:
    validate(JobConfig())


@pytest.mark.parametrize(
    ("name", "given", "ranks", "expected"),
    [
        ("ddp", {}, 8, (8, 1, 1, 1)),
        ("fsdp", {}, 8, (1, 8, 1, 1)),
        ("fsdp", {"replicas": 2}, 8, (2, 4, 1, 1)),
        ("zero", {"shards": 2}, 8, (4, 2, 1, 1)),
        ("auto", {}, 8, (8, 1, 1, 1)),
        ("tensor", {}, 8, (1, 1, 8, 1)),
        ("tensor", {"tensor": 2}, 8, (4, 1, 2, 1)),
        ("tensor", {"tensor": 2, "shards": 4}, 8, (1, 4, 2, 1)),
        ("tensor", {"shards": 2}, 8, (1, 2, 4, 1)),
        ("pipeline", {}, 4, (1, 1, 1, 4)),
        ("pipeline", {"stages": 2}, 6, (3, 1, 1, 2)),
        ("pipeline", {"replicas": 3}, 6, (3, 1, 1, 2)),
        ("pipeline", {"stages": 3, "replicas": 2}, 6, (2, 1, 1, 3)),
        ("pipeline", {}, 1, (1, 1, 1, 1)),
    ],
)
def test_what_a_mesh_leaves_open_is_what_is_left(
    name: str, given: dict[str, int], ranks: int, expected: tuple[int, int, int, int]
) -> None:
    found = configs.mesh_of(StrategyConfig(name, mesh=MeshConfig(**given)), ranks)
    assert (found.replicas, found.shards, found.tensor, found.stages) == expected


def test_groups_of_layers_merge_by_pattern_and_keep_their_types(tmp_path: Path) -> None:
    top = write(tmp_path, "top.yaml", "optim: {betas: [0.9, 1e-1], groups: {'*.bias': {weight_decay: 0}}}\n")
    overrides = ["optim.groups.*.bias={lr_scale: 2}", "optim.groups.head.*={lr_scale: '${optim.lr}'}"]
    config = load_config(top, overrides).optim
    assert (config.betas, list(config.groups)) == ([0.9, 0.1], ["*.bias", "head.*"])
    assert config.groups == {"*.bias": {"weight_decay": 0, "lr_scale": 2}, "head.*": {"lr_scale": 0.05}}


def test_the_root_of_the_data_is_the_node_s_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copy/images").mkdir(parents=True)
    monkeypatch.setenv(staged.VARIABLE, json.dumps({"/shared": str(tmp_path / "copy")}))
    assert data_root("/shared/images") == tmp_path / "copy/images"
    assert data_root("/other") == Path("/other")


@dataclass
class Inner:
    depth: Annotated[int, Range(1, 9)] = 2
    limit: Annotated[float, Range(0, 1), Where(lambda limit: limit != 1, "1 is no limit")] | None = None


@dataclass
class Outer:
    mode: Annotated[str, OneOf("wide", "deep")] = "wide"
    folders: Annotated[list[str], PATH] = field(default_factory=list)
    label: str = "a"
    inner: Inner = field(default_factory=Inner)

    def check(self) -> None:
        if self.mode == "deep" and self.inner.depth < 3:
            raise ConfigError("own.mode: deep needs own.inner.depth 3")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (Outer(mode="depp"), "own.mode: unknown value 'depp'; did you mean 'deep'? valid: wide, deep"),
        (Outer(folders=["/a", ""]), "own.folders[1]: '' is empty"),
        (Outer(label="a\nb"), "own.label: 'a\\nb' is empty or holds a line break"),
        (Outer(inner=Inner(depth=0)), "own.inner.depth: 0 is out of range; must be between 1 and 9"),
        (Outer(inner=Inner(limit=2)), "own.inner.limit: 2 is out of range"),
        (Outer(inner=Inner(limit=1)), "own.inner.limit: 1 is no limit"),
        (Outer(mode="deep"), "own.mode: deep needs own.inner.depth 3"),
        (Outer(mode="deep", inner=Inner(depth=0)), "own.inner.depth: 0 is out of range"),  # its keys first
    ],
)
def test_what_a_section_does_not_allow_is_refused_by_the_name_of_its_key(section: Outer, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_section(section, "own.")
    assert str(caught.value).startswith(says)


def test_the_defaults_and_the_bounds_themselves_pass() -> None:
    check_section(Outer(), "own.")
    check_section(Outer("deep", ["~/x"], inner=Inner(9, 0.0)), "own.")


def test_a_strategy_of_another_package_says_which_options_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.STRATEGIES, "theirs", registry.StrategySpec("a:b", options=("fp16", "find_unused")))
    configs.check_step(configs.TrainConfig(precision="fp16"), StrategyConfig("theirs"))
    StrategyConfig("theirs", find_unused=True).check()
    with pytest.raises(
        ConfigError, match=f"last: this goes with strategy.name {able('channels_last')} only, not theirs"
    ):
        configs.check_step(configs.TrainConfig(channels_last=True), StrategyConfig("theirs"))


#: Keys that another one switches off, and what switches them on.
IDLE = [
    ("strategy.local_sgd.round_steps=4", "strategy.name is ddp; set strategy.name=local_sgd, or leave it out"),
    ("strategy.parameter_server.servers=2", "set strategy.name=parameter_server"),
    ("strategy.pipeline.micro_batches=4", "set strategy.name=pipeline"),
    ("'strategy={name: local_sgd, local_sgd: {outer_lr: 0.5}}'", "set strategy.local_sgd.outer=diloco"),
    ("strategy.compression_rank=8", "strategy.compression is none; set strategy.compression=powersgd"),
    ("strategy.activation_checkpointing_every=2", "is false; set strategy.activation_checkpointing, or"),
    ("optim={name: adamw, momentum: 0.8}", "optim.name is adamw; set optim.name=sgd or optim.name=muon"),
    ("optim.decay_norms_and_biases=false", "optim.weight_decay is 0.0 and optim.groups is {}; set optim.weight_decay"),
    ("train.pruning.every_steps=10", "train.pruning.amount is 0.0; set train.pruning.amount, or leave it out"),
    ("data.max_bad_samples=7", "data.bad_samples is fail; set data.bad_samples=skip"),
    ("model.init_from_average=true", "model.init_from is null; set model.init_from, or leave it out"),
    ("cluster={stage: never, stage_dir: /scratch}", "cluster.stage is never and data.stage is []; set cluster.stage="),
    ("cluster.gpu_type=a100", "cluster.gpus_per_node is 0"),
    ("cluster.container_mounts=[/data]", "cluster.container is null; set cluster.container, or leave it out"),
]


@pytest.mark.parametrize(("override", "says"), IDLE)
def test_a_key_that_another_one_switches_off_is_refused(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_config(None, _words(override))
    assert "changes nothing while" in str(caught.value)


def test_what_a_later_layer_has_switched_off_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = write(tmp_path, "base.yaml", "strategy: {name: local_sgd, local_sgd: {round_steps: 41}}\n")
    load_config(base, ["strategy.name=ddp"])
    load_config(write(tmp_path, "top.yaml", "extends: base.yaml\nstrategy: {name: fsdp}\n"))
    load_config(base, ["strategy.local_sgd.round_steps=43"])
    assert [message.partition("; ")[0] for message in caplog.messages] == [
        f"strategy.local_sgd.round_steps: changes nothing while strategy.name is {name}" for name in ("ddp", "fsdp")
    ]
    # Of two arguments the order does not matter.
    for words in (["strategy.local_sgd.round_steps=4", "strategy.name=ddp"],) * 2:
        words.reverse()
        with pytest.raises(ConfigError, match="changes nothing"):
            load_config(None, words)


def test_defaults_what_a_run_has_and_what_others_refer_to_are_not_idle(tmp_path: Path) -> None:
    load_config(write(tmp_path, "run.yaml", configs.dump_config(JobConfig())), ["optim.lr=2"])
    other = write(tmp_path, "idle.yaml", "strategy: {local_sgd: {round_steps: 4}}\n")
    assert load_config(other, ["optim.lr=2"], site=False).strategy.local_sgd.round_steps == 4
    every = "checkpoint.every_steps=${strategy.local_sgd.round_steps}"
    assert load_config(None, [every, "strategy.local_sgd.round_steps=4"]).checkpoint.every_steps == 4


def test_in_a_sweep_a_key_may_be_for_some_of_its_points(caplog: pytest.LogCaptureFixture) -> None:
    load_config(None, ["strategy.pipeline.micro_batches=7", "strategy.name=ddp"], sweep=True)
    assert caplog.messages == [
        "strategy.pipeline.micro_batches: changes nothing while strategy.name is ddp; set strategy.name=pipeline, or "
        "leave it out"
    ]
    with pytest.raises(ConfigError, match="changes nothing"):
        load_config(None, ["strategy.pipeline.micro_batches=7"], sweep=True)


def test_each_key_that_needs_another_is_a_key_and_so_is_what_it_needs() -> None:
    known = {*configs.all_keys()}
    for name, needs in schema._ACTS_WITH.items():
        assert any(key == name or key.startswith(name) for key in known), name
        assert {need.partition("=")[0] for need in needs} <= known
