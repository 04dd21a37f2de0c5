from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.config import load_config
from toolkit.files.run_files import SweepPoint
from toolkit.metrics.sinks import Sink
from toolkit.train.loop import hparams_of_script, log_run_config


class HparamsKept(Sink):
    """A sink that keeps the hyper-parameters."""

    values: Mapping[str, Any]

    def hparams(self, values: Mapping[str, Any], metrics: Sequence[str] = ()) -> None:
        self.values = values


def test_settings_of_an_optimizer_are_hyper_parameters_as_far_as_there_are_any() -> None:
    overrides = ["optim.name=adamw", "optim.betas=[0.9, 0.95]", "optim.groups.head.*={lr_scale: 10}"]
    kept = HparamsKept()
    log_run_config(load_config(None, overrides, site=False), None, kept)
    shown = {key: value for key, value in kept.values.items() if key.startswith("optim.")}
    assert shown == {
        "optim.name": "adamw",
        "optim.lr": 0.05,
        "optim.betas": "[0.9, 0.95]",
        "optim.weight_decay": 0.0,
        "optim.decay_norms_and_biases": True,
        "optim.groups": "{'head.*': {'lr_scale': 10}}",
        "optim.schedule": "constant",
        "optim.min_lr": 0.0,
        "optim.warmup_steps": 0,
    }


def test_what_a_sweep_varies_is_a_hyper_parameter(tmp_path: Path) -> None:
    assert hparams_of_script(load_config(None, [], site=False), tmp_path) == {}
    point = SweepPoint(
        "mine", "p", {"optim.lr": 0.25, "train.seed": 3, "optim.betas": [0.9, 0.95], "params.name": None}
    )
    fsio.write_json(tmp_path / "point.json", point.to_json())
    assert hparams_of_script(load_config(None, [], site=False), tmp_path) == {
        "optim.lr": 0.25,
        "train.seed": 3,
        "optim.betas": "[0.9, 0.95]",
    }
    (tmp_path / "point.json").write_text("[]")
    assert hparams_of_script(load_config(None, [], site=False), tmp_path) == {}, "a damaged one ends no training"
