"""Skipped steps in the loop: receipt, rollback to a checkpoint, kills, and giving up."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist import test_trainer as trainer
from tests.dist.ranks import run_ranks
from tests.dist.test_trainer import BATCH, CONFIG, SAMPLES, assert_same, images, logged
from toolkit.base.errors import NotFiniteError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.config import PruningConfig, TrainConfig
from toolkit.data.loader import Loader
from toolkit.data.permutation import ShuffledOrder
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session

pytestmark = pytest.mark.dist

#: 10 steps, saved after 4, 8 and 10; read after 2, 4, 6, 8, 10.
SKIPPING = replace(CONFIG, log_every=2, skip_bad_steps=True, ema_decay=0.8, clip_norm=1.0)
ROLLING = replace(SKIPPING, rollback_after=2)
PRUNING = replace(ROLLING, pruning=PruningConfig(0.5, start_step=2, end_step=9, every_steps=2))


@contextmanager
def spoilt(bad: Iterable[int], dies_at: int | None = None) -> Iterator[None]:
    """Put a NaN into the last share's batches of the steps ``bad``. All ranks' disks fail in step ``dies_at``."""
    plain_at, bad = Loader.at, set(bad)

    def at(self: Loader, step: int) -> Any:
        if step == dies_at:
            raise OSError("the disk is gone")
        batch = plain_at(self, step)
        share = self._sampler._share
        if step not in bad or share.index < share.count - 1:
            return batch
        return Batch((batch.inputs * torch.nan, batch.targets), batch.positions, batch.global_count)

    Loader.at = at
    try:
        yield
    finally:
        Loader.at = plain_at


def run(
    session: Session, run_dir: Path, attempt: int, config: TrainConfig, *bad: int, dies_at: int | None = None
) -> Any:
    """In a process group that has had others; ``attempt`` keeps their messages apart."""
    with spoilt(bad, dies_at):
        try:
            return trainer.train(replace(session, attempt=attempt), run_dir, config, trainer.plain_model)
        except OSError:
            return None
        except NotFiniteError as error:
            return str(error)


def stories(session: Session, folder: Path) -> dict[str, Any]:
    return {
        "undisturbed": run(session, folder / "undisturbed", 1, ROLLING, 5, 6, 7),
        "never made": run(session, folder / "never", 2, SKIPPING, 4, 5, 6, 7),
        "whole": run(session, folder / "whole", 11, PRUNING, 5, 6, 7),
        "killed": run(session, folder / "killed", 3, PRUNING, 5, 6, 7, dies_at=9),
        "resumed": run(session, folder / "killed", 4, PRUNING, 5, 6, 7),
        "twice": run(session, folder / "twice", 5, ROLLING, 5, 6, 7, 8, 9),
        "too early": run(session, folder / "early", 6, ROLLING, 0, 1),
        "switched on": run(session, folder / "on", 7, replace(CONFIG, max_steps=4)),
        "continues": run(session, folder / "on", 8, replace(CONFIG, ema_decay=0.8)),
        "switched off": run(session, folder / "off", 9, replace(SKIPPING, max_steps=4, spike_factor=5.0)),
        "continues plain": run(session, folder / "off", 10, CONFIG),
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("stories")
    return folder, run_ranks(2, stories, folder, limit_s=240.0)


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith(("model/", "optim/", "ema/"))}


def test_after_bad_steps_in_a_row_weights_are_the_last_checkpoints_and_data_go_on(told: Any) -> None:
    folder, ranks = told
    for rank in ranks:
        result, state = rank["undisturbed"]
        assert_same(weights(state), weights(rank["never made"][1]))  # step 4 was made, and given up with the rest
        assert result.metrics["train/rollbacks"] == 1
        assert result.metrics["train/skipped_steps"] == 3
        assert rank["never made"][0].metrics["train/skipped_steps"] == 4
    assert logged(folder / "undisturbed", "train/rollbacks") == {2: 0, 4: 0, 6: 0, 8: 1, 10: 1}


def test_no_checkpoint_is_made_of_weights_that_are_about_to_be_given_up(told: Any) -> None:
    checkpoints = CheckpointFolder(told[0] / "undisturbed" / "checkpoints")
    assert [checkpoints.verify(path).step for path in checkpoints.list()] == [10, 4]


def receipts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "skipped_steps.jsonl").read_text().splitlines()]


def test_the_receipt_names_each_step_left_out_once_with_the_samples_of_all_ranks(told: Any) -> None:
    lines = receipts(told[0] / "undisturbed")
    assert [line["step"] for line in lines] == [5, 6, 7]
    order = ShuffledOrder(SAMPLES, CONFIG.seed)
    for line in lines:
        first, last = line["positions"]
        assert (first, last) == (line["step"] * BATCH, line["step"] * BATCH + BATCH - 1)
        assert line["samples"] == [int(order.at(torch.tensor([p]).numpy())[0]) for p in range(first, last + 1)]
        assert line["why"] == "its gradient is not finite"


def test_a_run_killed_after_a_rollback_goes_on_bit_for_bit_like_the_undisturbed_one(told: Any) -> None:
    folder, ranks = told
    for rank in ranks:
        assert rank["killed"] is None
        result, state = rank["resumed"]
        assert result == rank["whole"][0]
        assert_same(state, rank["whole"][1])
    assert receipts(folder / "killed") == receipts(folder / "whole")
    for tag in ("train/loss", "train/grad_norm", "train/sparsity", "eval/loss"):
        assert logged(folder / "killed", tag) == logged(folder / "whole", tag), tag


def test_the_loss_that_is_logged_is_the_mean_over_the_steps_that_were_made(told: Any) -> None:
    losses = logged(told[0] / "undisturbed", "train/loss")
    assert losses.keys() == {2, 4, 6, 10}, "both steps up to the eighth were left out"
    assert all(loss == loss for loss in losses.values())


def test_a_run_that_cannot_roll_back_or_would_do_so_for_ever_ends_with_the_samples(told: Any) -> None:
    for rank in told[1]:
        assert rank["twice"].startswith(
            "train.rollback_after: 2 steps in a row, 8 to 9 of the 10 so far, were left out"
        )
        assert "there is no newer checkpoint than at the last rollback" in rank["twice"]
        assert "skipped_steps.jsonl" in rank["twice"]
        assert "there is no checkpoint yet to go back to" in rank["too early"]


def test_what_happens_to_a_step_may_be_switched_on_and_off_at_a_resume(told: Any) -> None:
    for rank in told[1]:
        assert rank["continues"][0].step == 10
        state = rank["continues"][1]
        apart = max((state[f"ema/{n}"] - state[f"model/{n}"]).abs().max().item() for n in ("1.weight", "3.weight"))
        assert 0 < apart < 0.1, "the average began at the loaded weights"
        assert rank["continues plain"][0].step == 10


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(4, 5))


def lay_out(session: Session, folder: Path) -> list[Any]:
    """Plain; with the channels last; and half of the way each, over a checkpoint."""
    last = replace(CONFIG, channels_last=True)
    ways = {"plain": [CONFIG], "last": [last], "both": [replace(last, max_steps=4), CONFIG]}
    found = []
    for number, (name, configs) in enumerate(ways.items()):
        for turn, config in enumerate(configs):
            here = replace(session, attempt=1 + number * 10 + turn)
            result, state = trainer.train(here, folder / name, config, convolution)
        found.append((result, {n: v.clone(memory_format=torch.contiguous_format) for n, v in state.items()}))
    return found


def test_channels_last_changes_only_strides_and_does_not_show_in_a_checkpoint(tmp_path: Path) -> None:
    for plain, last, both in run_ranks(2, lay_out, tmp_path, limit_s=120.0):
        for result, state in (last, both):
            assert result.metrics == pytest.approx(plain[0].metrics, abs=1e-4)
            for name, value in plain[1].items():
                torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0, msg=name)


def test_a_loader_names_the_samples_of_all_shares() -> None:
    loaders = [Loader(images(SAMPLES, 1), global_batch_size=BATCH, seed=3, share=Share(index, 3)) for index in range(3)]
    for step in (0, 2, 7):
        assert loaders[1].global_indices(step) == [
            sample for loader in loaders for sample in loader.sample_indices(step)
        ]
