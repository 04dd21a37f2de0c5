"""A classifier on JPEG files, killed in mid-epoch, ends like an undisturbed one.

They agree bit for bit.
"""

import json
import multiprocessing
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from jobs.classify import Classify, Params
from tests.dist.ranks import in_run, run_ranks
from tests.unit.checkpoint.ranks import tensor_of
from toolkit.checkpoint.folder import newest_step
from toolkit.config import CheckpointConfig, DataConfig, ImageConfig, JobConfig, ModelConfig, TrainConfig
from toolkit.files.rundir import TRACE_VARIABLE, RunDir
from toolkit.ranks.session import Session
from toolkit.train import job

pytestmark = pytest.mark.dist

STEPS, SAVE_EVERY, KILLED_AT = 10, 3, 8  # 21 images in batches of 6: the kill is in the third epoch


def write_photographs(root: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(21):
        path = root / "train" / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)
    (root / "val").symlink_to("train")


def train(session: Session, run_dir: Path, attempt: int, root: Path, workers: int, blow: Any) -> dict[str, Tensor]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have workers
    os.environ[TRACE_VARIABLE] = json.dumps({"strikes": {str(attempt): blow} if blow else {}})
    torch.manual_seed(attempt)  # as a process that has just started has its own
    config = JobConfig(
        data=DataConfig(
            "image_folder",
            str(root),
            global_batch_size=6,
            workers=workers,
            image_size=32,
            augment=True,
            images=ImageConfig(policy="trivial_augment", erase=0.5),
        ),
        model=ModelConfig("mlp"),
        train=TrainConfig(max_steps=STEPS, log_every=5, seed=3),
        checkpoint=CheckpointConfig(every_steps=SAVE_EVERY),
    )
    here = in_run(session, run_dir, attempt)
    with closing(job.training_of(Classify, config, Params(mixup=0.2), here)) as training:
        training.fit()
        return {name: tensor_of(entry).clone() for name, entry in training.strategy.state().items()}


def test_a_run_on_jpeg_files_killed_within_an_epoch_ends_like_the_undisturbed_one(tmp_path: Path) -> None:
    root, killed = tmp_path / "photographs", RunDir(tmp_path / "killed")
    write_photographs(root)
    expected = run_ranks(2, train, tmp_path / "whole", 1, root, 0, None)[0]
    blow = {"rank": 1, "step": KILLED_AT, "late": 0.5, "how": "kill"}
    with pytest.raises(AssertionError, match=r"the process ended without an answer|Connection"):
        run_ranks(2, train, killed.path, 1, root, 2, blow)
    assert newest_step(killed.checkpoints) == KILLED_AT // SAVE_EVERY * SAVE_EVERY
    for found in run_ranks(2, train, killed.path, 2, root, 1, None):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
