"""What a run logs once, at its fresh start: config, hyper-parameters and some images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit import registry
from toolkit.config import JobConfig, all_keys, dump_config, leaves, value_of
from toolkit.files.rundir import RunDir
from toolkit.metrics.sinks import Sink
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch

_IMAGES = 16
#: Keys by which runs are not compared. TensorBoard shows only the first columns without scrolling.
_LEFT_OUT = (
    *("data.augment", "data.bad_samples", "data.max_bad_samples", "data.share", "data.split", "data.workers"),
    *("strategy.activation_checkpointing", "strategy.compression", "strategy.pipeline.split", "strategy.tensor_plan"),
    *("train.channels_last", "train.compile", "train.cudnn_benchmark", "train.expandable_segments"),
    *("train.log_every", "train.on_nan", "train.pruning.end_step", "train.pruning.every_steps"),
    *("train.pruning.start_step", "train.pruning.structured", "train.rollback_after", "train.skip_bad_steps"),
)
_SECTIONS = ("strategy.", "data.", "model.", "optim.", "train.")


def describe_run(config: JobConfig, sample: Batch | None, sink: Sink) -> None:
    """Log the config as text and hyper-parameters, and the first images of ``sample``."""
    sink.text("config", dump_config(config))
    # Keys of the strategies that this run does not use say nothing about it.
    others = tuple(f"strategy.{name}." for name in registry.names("strategies") if name != config.strategy.name)
    shown = [key for key in all_keys() if key.startswith(_SECTIONS) and not key.startswith(others)]
    values = _shown((key, value_of(config, key)) for key in shown if key not in _LEFT_OUT)
    sink.hparams(_own(config) | values, metrics=("eval/accuracy", "eval/loss"))
    for leaf in () if sample is None else nested.leaves(sample.data):
        if isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[1] in (1, 3):
            sink.images("samples", leaf[:_IMAGES])
            return


def describe_script(config: JobConfig, run_dir: Path, sink: Sink) -> None:
    """Log the config as text, and the hyper-parameters of a script with a loop of its own, if it has any."""
    sink.text("config", dump_config(config))
    if values := hparams_of_script(config, run_dir):
        sink.hparams(values)


def hparams_of_script(config: JobConfig, run_dir: Path) -> dict[str, bool | int | float | str]:
    """Return the script's own keys and options, and the keys that the run's sweep varies, as hyper-parameters."""
    point = RunDir(run_dir).point()
    return _own(config) | ({} if point is None else _shown(point.values.items()))


def _own(config: JobConfig) -> dict[str, bool | int | float | str]:
    """Return the job's own keys, and a script's options, as hyper-parameters."""
    return _shown([*leaves(config.params), *leaves(config.args, "args")])


def _shown(values: Iterable[tuple[str, Any]]) -> dict[str, bool | int | float | str]:
    """Return lists and mappings as text. Leave out null and what is empty: TensorBoard has no way to show them."""
    shown: dict[str, bool | int | float | str] = {}
    for key, value in values:
        if isinstance(value, (bool, int, float, str)):
            shown[key] = value
        elif isinstance(value, (list, dict)) and value:
            shown[key] = str(value)
    return shown
