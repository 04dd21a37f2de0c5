"""Every check of a config that can be made before anything is queued.

A section's own checks are with its keys. Here is what several sections ask for together, and what a strategy refuses
(:class:`StrategyChecks`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from toolkit import registry
from toolkit.base import fsio, secret_values, torch_version
from toolkit.base.errors import ConfigError, DataMissingError
from toolkit.config.dataset_catalog import check_datasets, data_root, entry_of
from toolkit.config.job_module import JobFiles
from toolkit.config.schema import FIXED_ON_RESUME, SCRIPT_JOB, JobConfig, TrainConfig, all_keys, value_of
from toolkit.config.script_arguments import NEWEST
from toolkit.config.strategy import STATELESS, StrategyConfig, mesh_of, refuse_without
from toolkit.constraints import hints_of, limits_of
from toolkit.devices.kinds import is_of_devices
from toolkit.files import origin, rundir
from toolkit.slurm import container


def sendmail_path() -> str | None:
    """Return the program that takes mails. On many systems it is not in a user's PATH."""
    return shutil.which("sendmail", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/lib")


def validate(
    config: JobConfig,
    *,
    ranks: int | None = None,
    login_node: bool = True,
    project: Path | None = None,
    is_resume: bool = False,
    files: JobFiles | None = None,
) -> None:
    """Refuse what cannot work, before anything is queued. Raises ConfigError or DataMissingError with the remedy.

    ``ranks`` is the number of ranks that an allocation really has; None computes it from ``cluster``.
    ``login_node=False`` leaves out what the submitting side checks of its request: GPUs, and the programs and folders
    that it names. ``project`` is the folder that holds the job, the current one if None. A run that ``is_resume`` (a
    resume) needs no first weights: they may be gone. ``files`` remembers the jobs' files from one call to the next.
    """
    try:
        _validate(config, ranks, login_node, files or JobFiles(project), is_resume)
    except OSError as error:  # from a path, for example a name that is too long
        path = str(error.filename)
        # Name the key whose value is the longest part of the path.
        candidates = [(0, "a path")]
        for key in all_keys():
            value = value_of(config, key)
            for part in value if isinstance(value, list) else [value]:
                text = str(part or "")
                # The name of a module is a path with dots.
                if text and (text in path or text.replace(".", "/") in path):
                    candidates.append((len(text), key))
        raise ConfigError(f"{max(candidates)[1]}: {path[:200]}: {error.strerror}") from None


def _validate(config: JobConfig, ranks: int | None, login_node: bool, files: JobFiles, is_resume: bool) -> None:
    secret_values.check_form(config.secrets)  # before the others, whose errors show values
    check_section(config)
    for name in config.args:
        if not re.fullmatch(r"[^\W_][^\s=]*", name):
            raise ConfigError(f"args.{name}: give the option's name without the dashes before it: args.epochs=3")
    check_combinations(config)
    if login_node:
        check_places(config)
    notify = config.notify
    if notify.when != ["end"] and not (notify.command or notify.slack or notify.mail):
        raise ConfigError("notify.when: no message has a recipient; set notify.command, notify.slack or notify.mail")
    if config.job == SCRIPT_JOB:  # the script itself is responsible for the rest
        if any("{newest" in NEWEST.sub("", word) for word in config.restart_args):
            raise ConfigError("restart_args: the newest file that matches a pattern is {newest:ckpt/*.pt}, for example")
        return
    if config.restart_args:
        raise ConfigError("restart_args: is for scripts under `toolkit exec`; any other run continues without it")
    if not files.is_loop(config.job):
        # A job with its own loop checks its own config.
        files.check(config)
        for key in ("argv", "args"):
            if value_of(config, key):
                raise ConfigError(
                    f"{key}: arguments are for a script with a loop of its own, and {config.job} is none: give it keys "
                    "of its own, params.NAME=VALUE, with a class Params (docs/config.md)"
                )
        if config.strategy.name == "dp" and (ranks or config.cluster.ranks) > 1:
            raise ConfigError(
                "strategy.name: dp is one process with all GPUs of a node; use ddp, or set cluster.nodes and "
                "cluster.tasks_per_node to 1"
            )
        # A run that has begun needs no first weights.
        if config.model.init_from is not None and not is_resume and rundir.RUN_DIR_VARIABLE not in os.environ:
            origin.find(config.model.init_from)
        ranks = ranks or config.cluster.ranks
        check_batch(config, ranks)
        if (
            config.dist.backend == "auto"
            and len({part.gpus_per_node > 0 for part in config.cluster.component_requests}) > 1
        ):
            raise ConfigError("dist.backend: components with GPUs and without meet over gloo only; set it to gloo")
        check_datasets(config.data)
        if login_node and config.data.root is not None and not data_root(config.data.root).is_dir():
            raise DataMissingError(f"data.root: there is no folder {data_root(config.data.root)}")
    _check_shared_gpus(config, login_node)
    if (
        login_node
        and config.dist.backend == "nccl"
        and not all(part.gpus_per_node for part in config.cluster.component_requests)
    ):
        raise ConfigError(
            "dist.backend: nccl needs GPUs, and cluster.gpus_per_node is 0; set cluster.gpus_per_node, "
            "or dist.backend to auto or gloo"
        )


def _check_shared_gpus(config: JobConfig, login_node: bool) -> None:
    """Refuse what needs NCCL where ranks share a GPU, and a GPU that nobody has asked for."""
    count = config.cluster.tasks_per_gpu
    has_gpus = any(part.gpus_per_node or "gres" in part.extra for part in config.cluster.component_requests)
    if login_node and count > 1 and not has_gpus:
        raise ConfigError(
            f"cluster.tasks_per_gpu: {count} ranks on each GPU, and cluster.gpus_per_node is 0; set it, or ask for "
            "shares of a GPU (cluster.extra.gres: shard:2)"
        )
    if count > 1 and is_of_devices(config.dist.backend):
        raise ConfigError(
            f"dist.backend: NCCL refuses two ranks on one GPU, and cluster.tasks_per_gpu is {count}; use auto or gloo"
        )
    # gloo cannot carry what these send between GPUs by themselves.
    if count > 1 and {"stages", "tensor"} & {*registry.strategy(config.strategy.name).mesh}:
        raise ConfigError(
            f"strategy.name: {config.strategy.name} needs NCCL, which refuses two ranks on one GPU; set "
            f"cluster.tasks_per_gpu=1 (it is {count}), or use ddp or fsdp"
        )


def check_change(then: JobConfig, now: JobConfig) -> None:
    """Refuse a change that a run cannot continue with. Raises ConfigError with every such key."""
    keys = [key for key in FIXED_ON_RESUME if not may_resume_with(key, value_of(then, key), value_of(now, key))]
    if then.name != now.name:
        keys.insert(0, "name")
    if keys:
        changed = "; ".join(f"{key} was {value_of(then, key)!r}, not {value_of(now, key)!r}" for key in keys)
        raise ConfigError(
            f"a run cannot continue with another {keys[0]}: {changed}. Set {'them' if len(keys) > 1 else 'it'} back, "
            f"or start a new run with `toolkit submit` (fixed: name, {', '.join(FIXED_ON_RESUME)})"
        )


def may_resume_with(key: str, then: Any, now: Any) -> bool:
    """True if a run that had the value ``then`` may have ``now``. Strategies that keep the same state may change."""
    if then == now or key not in ("strategy.name", "strategy.compression"):
        return bool(then == now)
    alike = STATELESS if key == "strategy.compression" else registry.with_trait("same_state")
    return then in alike and now in alike


def check_section(section: Any, prefix: str = "") -> None:
    """Refuse values that a section's annotations do not allow, and then what it refuses itself. Raises ConfigError.

    The same is done with the sections in it. Their own checks rely on the values of single keys.
    """
    kind: Any = type(section)
    for key, limits in limits_of(kind).items():
        value = value_of(section, key)
        for limit in limits:
            limit.check(prefix + key, value)
    _call_checks(section)


def _call_checks(section: Any) -> None:
    kind: Any = type(section)
    for name, hint in hints_of(kind).items():
        if is_dataclass(hint):
            _call_checks(getattr(section, name))
    if hasattr(section, "check"):
        section.check()


def check_places(config: JobConfig) -> None:
    """Refuse a missing program, secret or folder, and one that cannot be written. Raises ConfigError.

    Only the login node is asked: the compute nodes may see other files.
    """
    if config.cluster.container is None:  # else the container's torch is used
        check_torch(config)
    secret_values.check_sources(config.secrets)
    if config.cluster.container is not None:
        container.refuse_missing(config.cluster.container)
    if config.trackers:
        from toolkit.plugins.trackers import refuse_missing

        refuse_missing(config)
    for folder in config.cluster.container_mounts:
        if not fsio.expand(folder).is_dir():
            raise ConfigError(f"cluster.container_mounts: there is no folder {folder}")
    command = config.notify.command
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"notify.command: there is no program {command[0]!r}; give its path, or [sh, -c, 'LINE'] for a shell's"
        )
    if config.notify.mail is not None and sendmail_path() is None:
        raise ConfigError(
            f"notify.mail: {socket.gethostname()} has no sendmail, so its nodes will have none; use notify.slack, a "
            "notify.command, or Slurm's own mails: cluster.extra={mail-type: 'END,FAIL'}"
        )
    if config.notify.slack is not None:
        secret_values.webhook("notify.slack", config.notify.slack)
    if config.checkpoint.copy_to is not None:
        copy_to = fsio.expand(config.checkpoint.copy_to)
        there = next(path for path in (copy_to, *copy_to.parents) if path.exists())
        # Create a folder there: permissions do not show that a disk is read-only, full or /proc.
        try:
            with tempfile.TemporaryDirectory(prefix=".toolkit-", dir=there):
                pass
        except OSError as error:
            raise ConfigError(f"checkpoint.copy_to: {copy_to} cannot be written: {there}: {error.strerror}") from None


def check_torch(config: JobConfig) -> None:
    """Refuse what the installed torch is too old for. Raises ConfigError that names the key."""
    if config.job == SCRIPT_JOB:
        torch_version.refuse_older()
        return
    asked = [torch_version.MUON] if config.optim.name == "muon" else []
    shards = config.strategy.name in ("fsdp", "zero") or (config.strategy.mesh.shards or 1) > 1
    if shards and not any(part.gpus_per_node for part in config.cluster.component_requests):
        asked.append(torch_version.SHARDS_ON_CPUS)
    if config.strategy.name == "tensor":
        asked.append(torch_version.TENSOR)
    torch_version.refuse_older(asked)
    if torch_version.installed() and (needed := entry_of(config.data.name).package):  # else this is no Python of ranks
        torch_version.refuse_missing(*needed)


def may_lose_nodes(config: JobConfig, nodes: int) -> bool:
    """True if a job of ``nodes`` nodes continues when one of them dies.

    Slurm then leaves the job alone, and another node must watch the batch host. False for a single node: no process
    would be left to requeue the job.
    """
    return nodes > 1 and (config.cluster.spare_nodes > 0 or config.retry.allow_fewer_nodes)


def check_combinations(config: JobConfig) -> None:
    """Refuse what the chosen strategy, or another section, cannot do. Raises ConfigError."""
    checks_of(config.strategy.name).config(config)
    data, train, strategy = config.data, config.train, config.strategy
    if (
        len(config.cluster.component_requests) > 1
    ):  # srun would start their ranks in one step, which has nodes of one component
        image = config.cluster.container
        srun = "dist.backend: mpi" if config.dist.backend == "mpi" else ""
        if image is not None and container.parse(image).runtime == container.PYXIS:
            srun = "a container for Pyxis"
        if srun:
            raise ConfigError(
                f"cluster.components: {srun} needs one step of srun, which has nodes of one component only"
            )
    if data.balance == "auto" and not registry.strategy(strategy.name).local_stopwatch:
        raise ConfigError(
            "data.balance: auto needs each rank's own time of a step, and shares of any size; with strategy.name "
            f"{strategy.name} ranks wait for each other all through a step, or shapes are fixed: use "
            f"{', '.join(registry.with_trait('local_stopwatch'))}, or even"
        )
    if data.partition != "global" and config.retry.allow_fewer_nodes:
        raise ConfigError(
            f"retry.allow_fewer_nodes: does not go with data.partition: {data.partition}: fewer ranks would have "
            "other parts; "
            "use false, or data.partition: global"
        )
    check_step(train, strategy)
    if train.skip_bad_steps and config.optim.name == "sgd" and registry.strategy(strategy.name).sharded:
        raise ConfigError(
            f"train.skip_bad_steps: torch's sgd cannot leave out a step of weights that {strategy.name} cuts; "
            "use optim.name adam, adamw or muon, or strategy.name ddp"
        )
    kind = strategy.compression
    if kind != "none" and train.precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"strategy.compression: {kind} needs gradients whose scale stays the same; with train.precision: "
            f"{train.precision} set it to none, or train in bf16"
        )
    if kind not in STATELESS and train.spike_factor is not None:
        raise ConfigError(
            f"train.spike_factor: with strategy.compression: {kind} a part of what a step left out is added to later "
            "ones; leave it out, or use bf16"
        )


def check_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what this strategy cannot do between the gradients and the weights of a step. Raises ConfigError."""
    checks_of(strategy.name).step(train, strategy)
    if train.precision == "fp16":
        refuse_without("fp16", "train.precision: fp16", strategy.name, "use bf16")
    if train.channels_last:
        refuse_without("channels_last", "train.channels_last: this", strategy.name)
    if train.sync_batch_norm and (not registry.strategy(strategy.name).sync_batch_norm or train.compile):
        other = "train.compile" if train.compile else f"strategy.name {strategy.name}"
        raise ConfigError(
            f"train.sync_batch_norm: goes with strategy.name {', '.join(registry.with_trait('sync_batch_norm'))} and "
            f"without train.compile, and not with {other}; set it to false"
        )


def check_batch(config: JobConfig, ranks: int) -> None:
    """Refuse a global batch that ``ranks`` ranks cannot share. Raises ConfigError."""
    checks_of(config.strategy.name).batch(config, ranks)


def checks_of(strategy: str) -> StrategyChecks:
    """Return the checks of a strategy."""
    checks: StrategyChecks = registry.load_part("strategies", strategy, registry.strategy(strategy).checks)()
    return checks


class StrategyChecks:
    """What a strategy refuses in a config besides what its traits say. A strategy may have a subclass of its own.

    All methods raise ConfigError.
    """

    def config(self, config: JobConfig) -> None:
        """Refuse keys of any section."""

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        """Refuse what the strategy cannot do between the gradients and the weights of a step."""
        for key in () if registry.strategy(strategy.name).whole_update else step_options(train):
            raise ConfigError(f"train.{key}: does not go with strategy.name {strategy.name}; leave it out")

    def idle(self, config: JobConfig, ranks: int) -> int:
        """Return how many of ``ranks`` ranks get no samples."""
        return 0

    def batch(self, config: JobConfig, ranks: int) -> None:
        """Refuse a global batch that ``ranks`` ranks cannot share."""
        size = config.data.global_batch_size
        # Ranks that compute a layer together get the same samples.
        together = mesh_of(config.strategy, ranks).tensor or 1
        ranks = (ranks - self.idle(config, ranks)) // together
        who = "ranks" if together == 1 else f"groups of {together} ranks"
        # Every share needs a sample, and so does each part of a share.
        if size < ranks:
            raise ConfigError(
                f"data.global_batch_size: {size} samples cannot be shared by {ranks} {who}; use {ranks} or more, "
                "or fewer ranks (cluster.nodes x cluster.tasks_per_node)"
            )
        if config.train.accumulate > size // ranks:
            raise ConfigError(
                f"train.accumulate: {config.train.accumulate} parts of a share of {size // ranks} samples "
                f"(data.global_batch_size {size} on {ranks} {who}) would be empty; use {size // ranks} or less"
            )


class CustomChecks(StrategyChecks):
    """Those of ``strategy.name: custom``: the job's own step would ignore these keys."""

    def config(self, config: JobConfig) -> None:
        defaults = JobConfig()
        of_step = ("train.accumulate", "train.compile", "train.precision")
        for key in ("model.freeze", "strategy.activation_checkpointing", *of_step):
            if value_of(config, key) != value_of(defaults, key):
                raise ConfigError(
                    f"{key}: the step of {config.job} is its own (strategy.name: custom), and it would have to do this "
                    f"itself; leave it at {value_of(defaults, key)!r}"
                )
        if config.optim.layer_decay is not None:
            raise whole_model_error("optim.layer_decay", config.strategy)


def step_options(train: TrainConfig) -> list[str]:
    """Return the keys of ``train`` that ask for work between the gradients and the weights."""
    asked = [key for key in ("clip_norm", "skip_bad_steps", "ema_decay") if getattr(train, key)]
    return [*asked, "pruning"] if train.pruning.amount else asked


def whole_model_error(key: str, strategy: StrategyConfig) -> ConfigError:
    """Return the error for a key that needs the blocks of the whole model."""
    return ConfigError(
        f"{key}: needs all blocks of one model, and with strategy.name {strategy.name} a rank or a "
        "network has some; give rates as optim.groups.PATTERN.lr_scale"
    )
