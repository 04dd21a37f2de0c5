"""What scripts of others do in a loop of their own: it loses nothing, or is told what to do."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.prune import l1_unstructured
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.dist.ranks import run_ranks, told_by_us
from tests.dist.test_own_loop import BATCH, SAMPLES, begun, dataset
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.folder import newest_step
from toolkit.ranks.session import Session
from toolkit.train.user_loop import TrainingRun

pytestmark = pytest.mark.dist


def prepared(run: TrainingRun, **more: Any) -> tuple[nn.Module, SGD]:
    model: nn.Module = nn.Linear(8, 2)
    if run.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), 0.01)
    run.resumable(model=model, optimizer=optimizer, **more)
    return model, optimizer


def step(model: nn.Module, optimizer: SGD, inputs: Tensor) -> Tensor:
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def save_whole(session: Session, folder: Path) -> list[int]:
    run = begun(session, folder)
    model, _ = prepared(run)
    counts = [run._activity.count]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 8)), model(torch.ones(1, 8)))
    counts.append(run._activity.count)
    run.close()
    return counts


def test_a_model_that_was_handed_over_can_be_saved_whole(tmp_path: Path) -> None:
    ((before, after),) = run_ranks(1, save_whole, tmp_path)
    assert after == before + 1  # the model's own pass; the copy's is none of the run


def compiled(session: Session, folder: Path) -> list[int]:
    run = begun(session, folder)
    frames = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal frames
        frames += 1
        return module.forward

    model = nn.Sequential(nn.Linear(8, 2))
    wrapped = DistributedDataParallel(torch.compile(model, backend=backend))
    run.resumable(model=wrapped)
    before = run._activity.count
    for _ in range(12):
        wrapped(torch.ones(1, 8))
    run.close()
    return [frames, run._activity.count - before]


def test_a_compiled_model_is_compiled_once_and_its_passes_count(tmp_path: Path) -> None:
    ((frames, passes),) = run_ranks(1, compiled, tmp_path)
    assert (frames, passes >= 12) == (1, True)


def leave_by_break(session: Session, folder: Path, limit: int) -> tuple[list[int], list[int]]:
    run = begun(session, folder, every=limit)
    run.config.train.log_every = limit
    model, optimizer = prepared(run)
    saved, written = [], []
    for _ in run.epochs(3):
        for number, (x, _) in run.steps(DataLoader(dataset(), 6)).enumerate():
            saved.append(run._saved)
            written.append(len(run._metrics))
            run.log(loss=step(model, optimizer, x))
            if number + 1 == limit:
                break
    run.finish()
    run.close()
    return saved, written


def test_a_save_that_is_due_where_an_epoch_is_left_comes_after_the_next_step(tmp_path: Path) -> None:
    ((saved, written),) = run_ranks(1, leave_by_break, tmp_path, 4)
    assert saved == [0] * 5 + [5] * 4 + [9] * 3
    assert [bool(count) for count in written] == [False] * 5 + [True] * 7
    assert newest_step(tmp_path / "checkpoints") == 12


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(10, 8))


def few_steps(session: Session, folder: Path) -> dict[str, float]:
    run = begun(session, folder)
    run.config.train.log_every = 20
    model, optimizer = prepared(run)
    for _ in run.epochs(1):
        for x in run.steps(DataLoader(Stream(), 2)):
            step(model, optimizer, x)
            run.log(loss=run.step)
    run.finish()
    metrics = dict(run._metrics)
    run.close()
    return metrics


def test_what_was_logged_last_is_written_though_no_write_was_due(tmp_path: Path) -> None:
    (metrics,) = run_ranks(1, few_steps, tmp_path)
    assert metrics["train/loss"] == 2.0  # the mean of 0 to 4


def masked(session: Session, folder: Path) -> int | None:
    run = begun(session, folder)
    model = nn.Linear(8, 2)
    model.mask = nn.Parameter(torch.full((3, 3), -torch.inf).triu(1), requires_grad=False)
    optimizer = SGD(model.parameters(), 0.01)
    run.resumable(model=model, optimizer=optimizer)
    for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=6):
        step(model, optimizer, batch.inputs)
    run.finish()
    run.close()
    return newest_step(folder / "checkpoints")


def test_a_frozen_weight_that_is_infinite_by_design_is_saved(tmp_path: Path) -> None:
    assert run_ranks(1, masked, tmp_path) == [6]


def with_loader(session: Session, folder: Path, batch: int, samples: int, total: int) -> str:
    run = begun(session, folder, max_steps=total)
    messages = told_by_us()
    model, optimizer = prepared(run)
    said = "trained"
    try:
        data = torch.utils.data.Subset(dataset(), range(samples))
        loader = run.loader(data, global_batch_size=batch)  # after run.resumable, as in README
        assert len(loader) == -(-samples // batch)
        for each in run.steps(loader, total=100):
            step(model, optimizer, each.inputs)
        run.finish()
    except ConfigError as error:
        said = str(error)
    run.close()
    return "; ".join([said, *(each for each in messages if "differ" in each or "bit for bit" in each)])


def test_a_resume_with_other_data_is_refused_wherever_the_loader_is_made(tmp_path: Path) -> None:
    assert run_ranks(2, with_loader, tmp_path, BATCH, SAMPLES, 3) == ["trained"] * 2
    for said in run_ranks(2, with_loader, tmp_path, BATCH + 2, SAMPLES, 6):
        assert "cannot be continued: global batch size was 12 and is now 14" in said
    for said in run_ranks(2, with_loader, tmp_path, BATCH, SAMPLES - 1, 6):
        assert "cannot be continued: the data set was" in said
    (said,) = run_ranks(1, with_loader, tmp_path, BATCH, SAMPLES, 6)
    assert said.startswith("trained; from here on results equal those of an undisturbed run to rounding only")


def two_loaders(session: Session, folder: Path, steps: int | None) -> int:
    run = begun(session, folder, max_steps=steps)
    model, optimizer = prepared(run)
    for total, batch in ((4, BATCH), (9, 2 * BATCH)):
        for each in run.steps(run.loader(dataset(), global_batch_size=batch), total=total):
            step(model, optimizer, each.inputs)
    run.finish()
    run.close()
    return run.step


@pytest.mark.parametrize("stop", [3, 4, 7])
def test_two_loaders_one_after_the_other_are_not_taken_for_a_change(stop: int, tmp_path: Path) -> None:
    assert run_ranks(1, two_loaders, tmp_path, stop) == [stop]
    assert run_ranks(1, two_loaders, tmp_path, None) == [9]


def another_rate(session: Session, folder: Path, lr: float, total: int) -> tuple[float, list[str]]:
    run = begun(session, folder, max_steps=total)
    messages = told_by_us()
    model = nn.Linear(8, 2)
    optimizer = SGD(model.parameters(), lr)
    run.resumable(model=model, optimizer=optimizer)
    for each in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=100):
        step(model, optimizer, each.inputs)
    run.finish()
    run.close()
    return optimizer.param_groups[0]["lr"], [each for each in messages if "now gives it" in each]


def test_a_rate_that_the_checkpoint_overrules_is_named(tmp_path: Path) -> None:
    assert run_ranks(1, another_rate, tmp_path, 0.1, 3) == [(0.1, [])]
    assert run_ranks(1, another_rate, tmp_path, 0.1, 5) == [(0.1, [])]
    ((rate, (said,)),) = run_ranks(1, another_rate, tmp_path, 0.01, 7)
    assert rate == 0.1
    assert said.startswith("optimizer: the script now gives it lr=0.01 (it was 0.1), and the checkpoint's values count")


class Resumable(RandomSampler):
    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def hand_over_a_part(session: Session, folder: Path) -> str:
    run = begun(session, folder)
    sampler = Resumable(dataset())
    model, optimizer = prepared(run, sampler=sampler)
    try:
        for x, _ in run.steps(DataLoader(dataset(), 6, sampler=sampler), total=5):
            step(model, optimizer, x)
    except ConfigError as error:
        return str(error)
    finally:
        run.close()
    return "trained"


def test_a_part_of_a_loader_whose_position_the_run_keeps_is_refused(tmp_path: Path) -> None:
    (said,) = run_ranks(1, hand_over_a_part, tmp_path)
    assert said.startswith("run.resumable: the sampler of the loader in run.steps was handed over: run.steps keeps its")


def several_loops(session: Session, folder: Path, kill_at: int) -> tuple[list[int], list[list[int]]]:
    """Return the steps of each loop of each epoch; in the attempt ``kill_at`` the script breaks off within a step."""
    run = begun(session, folder, every=1)
    model, optimizer = prepared(run)
    counts, batches = [], []
    for _ in run.epochs(3):
        for loader in (range(40), range(20), range(40)):
            counts.append(0)
            for number, _ in run.steps(loader).enumerate():
                step(model, optimizer, torch.ones(2, 8))
                counts[-1] += 1
                batches.append([number, run.batch_index])
                if run.step == kill_at:
                    run.close()
                    return counts, batches
    run.finish()
    run.close()
    return counts, batches


def test_each_loop_of_an_epoch_goes_through_all_of_its_loader(tmp_path: Path) -> None:
    ((whole, batches),) = run_ranks(1, several_loops, tmp_path / "whole", -1)
    assert whole == [40, 20, 40] * 3
    assert (
        batches
        == [[number, number + before] for count, before in ((40, 0), (20, 40), (40, 60)) for number in range(count)] * 3
    )
    ((first, _),) = run_ranks(1, several_loops, tmp_path / "again", 150)
    ((second, rest),) = run_ranks(1, several_loops, tmp_path / "again", -1)
    assert first == [40, 20, 40, 40, 11]
    resumed = 300 - sum(second)  # the last save may still have been written
    assert 140 < resumed <= 150
    assert second == [0, 160 - resumed, 40, 40, 20, 40]
    assert rest == batches[resumed:]


def other_loader_with_a_total(session: Session, folder: Path) -> list[int]:
    run = begun(session, folder)
    prepared(run)
    seen = list(run.steps(range(10), total=14))
    seen += run.steps(range(100, 110), total=26)
    run.finish()
    run.close()
    return seen


def test_another_loader_with_a_total_begins_at_its_first_batch(tmp_path: Path) -> None:
    (seen,) = run_ranks(1, other_loader_with_a_total, tmp_path)
    assert seen == [*range(10), *range(4), *range(100, 110), 100, 101]


def nested(run: TrainingRun) -> None:
    for _ in run.epochs(2):
        for _ in run.steps(range(8)):
            for _ in run.steps(range(2)):
                pass


def one_by_one(run: TrainingRun) -> None:
    for _ in range(8):
        next(iter(run.steps(range(8), total=8)))


def total_in_an_epoch(run: TrainingRun) -> None:
    for _ in run.epochs(2):
        for _ in run.steps(range(8), total=8):
            pass


def refused(session: Session, folder: Path, script: Any) -> str:
    run = begun(session, folder)
    prepared(run)
    with pytest.raises(ConfigError) as caught:
        script(run)
    run.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (nested, "within a step of this run.steps another one was begun"),
        (one_by_one, "run.steps was started again for each batch"),
        (total_in_an_epoch, "total=8 counts steps of the whole run"),
    ],
)
def test_a_loop_that_would_lose_batches_or_saves_is_refused_by_its_line(
    script: Any, words: str, tmp_path: Path
) -> None:
    (error,) = run_ranks(1, refused, tmp_path, script)
    assert error.startswith("test_own_habits.py:")
    assert words in error


def replace_the_optimizer(session: Session, folder: Path) -> tuple[list[int], list[str]]:
    run = begun(session, folder, every=10)
    messages = told_by_us()
    model, optimizer = prepared(run)
    saved = []
    for number, _ in run.steps(range(60), total=60).enumerate():
        if number == 35:
            optimizer = SGD(model.parameters(), 0.02)
        step(model, optimizer, torch.ones(2, 8))
        saved.append(run._saved)
    run.finish()
    run.close()
    return saved, messages


def test_a_replaced_optimizer_is_told_of_and_does_not_put_saves_off(tmp_path: Path) -> None:
    ((saved, messages),) = run_ranks(1, replace_the_optimizer, tmp_path)
    assert set(saved) >= {10, 20, 30, 40, 50}
    assert len([each for each in messages if "run.resumable has made a step since step 35" in each]) == 1


def prune_in_the_loop(session: Session, folder: Path) -> str:
    run = begun(session, folder, every=2)
    model, optimizer = prepared(run)
    try:
        for number, _ in run.steps(range(6), total=6).enumerate():
            if number == 3:
                l1_unstructured(model, "weight", amount=0.5)
            step(model, optimizer, torch.ones(2, 8))
    except ConfigError as error:
        return f"{newest_step(folder / 'checkpoints')} {error}"
    finally:
        run.close()
    return "nothing was refused"


def test_a_model_with_other_names_later_is_refused_before_a_checkpoint(tmp_path: Path) -> None:
    (error,) = run_ranks(1, prune_in_the_loop, tmp_path)
    assert error.startswith("2 run.resumable: model/weight, model/weight_orig, model/weight_mask came, went")
    assert "prune there with amount=0" in error
