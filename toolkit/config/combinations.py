"""Checks of what several sections of a config ask for together; a section's own are with its keys."""

from __future__ import annotations

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.config.schema import JobConfig, TrainConfig, value_of
from toolkit.config.strategy import STATELESS, StrategyConfig, mesh_of


def check_combinations(config: JobConfig) -> None:
    """Refuse what the chosen strategy, or another section, cannot do. Raises ConfigError."""
    checks_of(config.strategy.name).config(config)
    _check_data(config)
    check_step(config.train, config.strategy)
    _check_optim(config)
    _check_compression(config)


def _check_data(config: JobConfig) -> None:
    data, strategy = config.data, config.strategy
    if data.share == "auto" and not registry.traits(strategy.name).own_time:
        raise ConfigError(
            "data.share: auto needs each rank's own time of a step, and shares of any size; with strategy.name "
            f"{strategy.name} ranks wait for each other all through a step, or shapes are fixed: use "
            f"{', '.join(registry.with_trait('own_time'))}, or even"
        )
    if data.split != "global" and config.retry.allow_fewer_nodes:
        raise ConfigError(
            f"retry.allow_fewer_nodes: does not go with data.split: {data.split}: fewer ranks would have other parts; "
            "use false, or data.split: global"
        )


def check_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what this strategy cannot do between the gradients and the weights of a step. Raises ConfigError."""
    checks_of(strategy.name).step(train, strategy)
    # Single keys that go with some strategies only.
    if train.precision == "fp16" and strategy.name != "ddp":
        raise ConfigError(f"train.precision: fp16 goes with strategy.name ddp only, not {strategy.name}; use bf16")
    if train.channels_last and strategy.name != "ddp":
        raise ConfigError(
            f"train.channels_last: goes with strategy.name ddp only, not {strategy.name}; set it to false"
        )
    if train.sync_batch_norm and (not registry.traits(strategy.name).sync_batch_norm or train.compile):
        other = "train.compile" if train.compile else f"strategy.name {strategy.name}"
        raise ConfigError(
            f"train.sync_batch_norm: goes with strategy.name {', '.join(registry.with_trait('sync_batch_norm'))} and "
            f"without train.compile, and not with {other}; set it to false"
        )


def _check_optim(config: JobConfig) -> None:
    optim, strategy = config.optim, config.strategy
    if config.train.skip_bad_steps and optim.name == "sgd" and registry.traits(strategy.name).sharded:
        raise ConfigError(
            f"train.skip_bad_steps: torch's sgd cannot leave out a step of weights that {strategy.name} cuts; "
            "use optim.name adam, adamw or muon, or strategy.name ddp"
        )


def _check_compression(config: JobConfig) -> None:
    kind = config.strategy.compression
    if kind != "none" and config.train.precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"strategy.compression: {kind} needs gradients whose scale stays the same; with train.precision: "
            f"{config.train.precision} set it to none, or train in bf16"
        )
    if kind not in STATELESS and config.train.spike_factor is not None:
        raise ConfigError(
            f"train.spike_factor: with strategy.compression: {kind} a part of what a step left out is added to later "
            "ones; leave it out, or use bf16"
        )


def check_batch(config: JobConfig, ranks: int) -> None:
    """Refuse a global batch that ``ranks`` ranks cannot share. Raises ConfigError."""
    checks_of(config.strategy.name).batch(config, ranks)


def checks_of(strategy: str) -> StrategyChecks:
    """Return the checks of a strategy: its plugin's, or those that hold of any."""
    checks: type[StrategyChecks] = registry.find("checks", strategy) or StrategyChecks  # of another package's plugin
    return checks()


class StrategyChecks:
    """What a strategy refuses in a config besides what its traits say. A plugin may bring a subclass for its own.

    All methods raise ConfigError.
    """

    def config(self, config: JobConfig) -> None:
        """Refuse keys of any section."""

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        """Refuse what the strategy cannot do between the gradients and the weights of a step."""
        for key in () if registry.traits(strategy.name).whole_update else step_options(train):
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
        if config.train.compile and config.strategy.name == "tensor" and size // ranks // config.train.accumulate < 2:
            raise ConfigError(
                "train.compile: with torch 2.15 compiled layers that are cut fail, or train to wrong weights, where a "
                f"part of a batch is a single sample (data.global_batch_size {size} on {ranks} {who} in "
                f"train.accumulate {config.train.accumulate} parts); use more samples, fewer parts, or set it to false"
            )


class CustomChecks(StrategyChecks):
    """Those of ``strategy.name: custom``: the job's own step would ignore these keys."""

    def config(self, config: JobConfig) -> None:
        defaults = JobConfig()
        for key in (
            "model.freeze",
            "strategy.activation_checkpointing",
            "train.accumulate",
            "train.compile",
            "train.precision",
        ):
            if value_of(config, key) != value_of(defaults, key):
                raise ConfigError(
                    f"{key}: the step of {config.job} is its own (strategy.name: custom), and it would have to do this "
                    f"itself; leave it at {value_of(defaults, key)!r}"
                )
        if config.optim.layer_decay is not None:
            raise whole_model_only("optim.layer_decay", config.strategy)


def step_options(train: TrainConfig) -> list[str]:
    """Return the keys of ``train`` that ask for work between the gradients and the weights."""
    asked = [key for key in ("clip_norm", "skip_bad_steps", "ema_decay") if getattr(train, key)]
    return [*asked, "pruning"] if train.pruning.amount else asked


def whole_model_only(key: str, strategy: StrategyConfig) -> ConfigError:
    """Return the error for a key that needs the blocks of the whole model."""
    return ConfigError(
        f"{key}: needs all blocks of one model, and with strategy.name {strategy.name} a rank or a "
        "network has some; give rates as optim.groups.PATTERN.lr_scale"
    )
