"""What ranks of a user's loop do differently does not matter, or is named at once; where a loop continues."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.dist.ranks import in_run, run_ranks
from tests.waiting import wait_for
from toolkit.base.errors import JobCodeError, StoppedError, ToolkitError
from toolkit.config import JobConfig
from toolkit.data.randomness import seed_for_init
from toolkit.ranks.agreement.rounds import STOP
from toolkit.ranks.session import Session
from toolkit.train import same_calls
from toolkit.train.user_loop import TrainingRun

pytestmark = pytest.mark.dist


def begun(session: Session, folder: Path, attempt: int, every: int = 1000) -> TrainingRun:
    config = JobConfig()
    config.train.seed, config.train.log_every = 3, 1000
    config.checkpoint.every_steps = every
    seed_for_init(config.train.seed)
    (folder / "logs").mkdir(exist_ok=True, parents=True)
    return TrainingRun(config, replace(in_run(session, folder, attempt), blocks=count()))


#: Mistakes, and what the first rank that finds one says.
SAID = {
    "nothing": "trained",
    "gather": "rank 1 has not called run.gather() at step 2, as rank 0 has: it has come to the end of epoch 0",
    "twice": "rank 1 has not called run.gather() at step 2, as rank 0 has: it has come to the end of epoch 0",
    "order": "rank 1 has not called run.gather() at step 2, as rank 0 has: it has called run.save() at step 2",
    "save": "rank 1 has not called run.save() at step 2, as rank 0 has: it has come to the end of epoch 0",
    "due save": "trained",
    "main_first": "rank 0 has not called run.main_first() at step 2, as rank 1 has: it has come to the end of epoch 0",
    "within main_first": "rank 0 has called run.gather() within `with run.main_first():`",
    "break": "rank 1 has not ended epoch 0 at step 2, as rank 0 has: it has come to the end of epoch 0, of 3 batches",
    "epochs": "rank 1 has not called run.epochs(2) at step 0, as rank 0 has: it has called run.epochs(3) at step 0",
    "lengths": "rank 1 has not begun epoch 0 of 3 batches at step 0, as rank 0 has: it has begun epoch 0 of 4 batches",
    "unknown lengths": "rank 1 has not come to the end of epoch 0, of 3 batches at step 3, as rank 0 has: it ",
    "resumable": "rank 1 has not called run.resumable(state) at step 0, as rank 0 has: it has called "
    "run.resumable(more, state)",
    "log": "trained",
    "text": "run.log: train/note is 'x', of type str; log single numbers",
    "none": "run.log: train/loss is None, of type NoneType",
    "list": "run.log: train/loss is [1, 2], of type list",
}


def trained(session: Session, folder: Path, mistake: str) -> str:
    attempt = list(SAID).index(mistake) + 1
    run = begun(session, folder / mistake, attempt, 2 if mistake == "due save" else 1000)
    more = {"more": [0]} if mistake == "resumable" and run.rank else {}
    epochs = 2 + run.rank if mistake == "epochs" else 2
    try:
        run.resumable(state=[0], **more)
        for epoch in run.epochs(epochs):
            loader: Any = range(3 + run.rank if mistake == "lengths" else 3)
            if mistake == "unknown lengths":
                loader = iter(range(3 + run.rank))
            for _ in run.steps(loader):
                if run.step == 1:
                    make(run, mistake)
                    if mistake == "break" and run.rank == 0:
                        break
            if mistake == "log" and run.rank == epoch:
                run.log(**{"eval/x": 5.0 + epoch})
        run.finish()
        return "trained"
    except ToolkitError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        # The other rank still asks this one where it is.
        session.store.set(f"{mistake}/{session.rank}", "done")
        session.store.wait([f"{mistake}/{rank}" for rank in range(2)])
        run.close()


def make(run: TrainingRun, mistake: str) -> None:
    calls: dict[str, list[Callable[[], Any]]] = {
        "gather": [lambda: run.gather(1)] if run.rank == 0 else [],
        "twice": [lambda: run.gather(1)] * (2 - run.rank),
        "order": [lambda: run.gather(1), run.save][:: 1 - 2 * run.rank] if run.rank == 0 else [run.save],
        "save": [run.save] if run.rank == 0 else [],
        "due save": [run.save] if run.rank == 0 else [],
        "text": [lambda: run.log(note="x")],  # type: ignore[arg-type]
        "none": [lambda: run.log(loss=None)],
        "list": [lambda: run.log(loss=[1, 2])],  # type: ignore[arg-type]
    }
    for call in calls.get(mistake, []):
        call()
    if mistake == "within main_first" or (mistake == "main_first" and run.rank == 1):
        with run.main_first():
            if mistake == "within main_first":
                run.gather(1)


def all_mistakes(session: Session, folder: Path) -> list[str]:
    same_calls.ASK_AFTER_S = 0.1
    return [trained(session, folder, mistake) for mistake in SAID]


def test_a_call_that_only_some_ranks_make_does_not_matter_or_is_named(tmp_path: Path) -> None:
    by_rank = run_ranks(2, all_mistakes, tmp_path)
    for mistake, *said in zip(SAID, *by_rank, strict=True):
        first = [text for text in said if text.removeprefix("JobCodeError: ").startswith(SAID[mistake])]
        assert first, (mistake, said)
    lines = [json.loads(line) for line in (tmp_path / "log/tensorboard/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval/x"]) for line in lines if "eval/x" in line] == [(3, 5.0), (6, 6.0)]


def alone(session: Session, folder: Path) -> None:
    """Rank 0 asks for a save. Rank 1 continues, and waits for it in the next step's collective."""
    same_calls.ASK_AFTER_S = 0.1
    run = begun(session, folder, 1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    run.resumable(model=model)
    for x in run.steps(torch.ones(20, 1), total=20):
        if run.rank == 0 and run.step == 4:
            run.save()
        model(x).sum().backward()


def test_a_rank_that_waits_in_a_collective_of_the_loop_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 has not called run.save\(\) at step 5, as rank 0 has: it is in"):
        run_ranks(2, alone, tmp_path)
    assert JobCodeError.comes_again


Loop = Callable[[TrainingRun], Iterator[Any]]


def uneven(run: TrainingRun) -> Iterator[Any]:
    """The epochs of the ranks end at other steps."""
    yield from run.steps([10 * run.rank + number for number in range(3 + run.rank)], total=17)


def numbered(run: TrainingRun) -> Iterator[Any]:
    for epoch in run.epochs(3):
        for number, item in run.steps(range(5)).enumerate(1):
            assert run.batch_index == number - 1
            yield epoch, number, item


def numbered_of_all(run: TrainingRun) -> Iterator[Any]:
    yield from run.steps(range(5), total=17).enumerate()


def phases(run: TrainingRun) -> Iterator[Any]:
    """Epochs left by a break, more epochs, steps up to a total, and epochs again."""
    for epoch in run.epochs(2):
        for item in run.steps(range(4)):
            yield "a", epoch, item
            if epoch == 1 and item == 2:
                break
    for epoch in run.epochs(1):
        for item in run.steps(range(4)):
            yield "b", epoch, item
    for item in run.steps(range(4), total=13):
        yield "c", item
    for epoch in run.epochs(1):
        for item in run.steps(range(4)):
            yield "d", epoch, item


class Bar:
    """Goes through a loader as tqdm does: it has the loader, asks for its length, and can be begun anew."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def bar_within(run: TrainingRun) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(range(5), shuffle=True)  # type: ignore[arg-type]
    for _ in run.epochs(3):
        for item in run.steps(Bar(loader)):
            yield item.item()


def bar_around(run: TrainingRun) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(range(5), shuffle=True)  # type: ignore[arg-type]
    for _ in run.epochs(3):
        bar = Bar(run.steps(loader))
        assert len(bar) == 5
        for item in bar:
            yield item.item()


def counted_within(run: TrainingRun) -> Iterator[Any]:
    for epoch in run.epochs(3):
        for number, item in run.steps(enumerate(range(5))):
            yield epoch, number, item


LOOPS: list[Loop] = [uneven, numbered, numbered_of_all, phases, bar_within, bar_around, counted_within]


def went_on(session: Session, folder: Path) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return what each loop has seen undisturbed, and in three attempts of which two are killed."""
    seen: dict[str, tuple[list[Any], list[Any]]] = {}
    for index, loop in enumerate(LOOPS):
        whole, again = list[Any](), list[Any]()
        for number, (place, kept, stop) in enumerate(
            [("whole", whole, 99), ("again", again, 7), ("again", again, 5), ("again", again, 99)]
        ):
            run = begun(session, folder / loop.__name__ / place, 10 * index + number + 1, every=2)
            run.resumable(state=[0])
            del kept[run.step :]
            for made, item in enumerate(loop(run), 1):
                kept.append(item)
                if made == stop:
                    break
            else:
                run.finish()
            run.close()
        seen[loop.__name__] = whole, again
    return seen


def test_a_loop_goes_on_where_it_was_in_each_rank_phase_and_count(tmp_path: Path) -> None:
    by_rank = run_ranks(2, went_on, tmp_path)
    for seen in by_rank:
        for name, (whole, again) in seen.items():
            assert again == whole, name
            assert len(whole) == {"uneven": 17, "numbered_of_all": 17, "phases": 17}.get(name, 15), name
    assert [item for _, item in by_rank[0]["numbered_of_all"][0]] == [number % 5 for number in range(17)]
    assert by_rank[0]["phases"][0][7:11] == [("b", 0, item) for item in range(4)]
    assert by_rank[1]["uneven"][0][3:5] == [13, 10]


def odd_loaders(session: Session, folder: Path) -> list[str]:
    """Return what is said of loaders that cannot be begun anew, and of those without a length."""

    def metered() -> Iterator[int]:
        """Fail as a metric logger does that prints a mean before the loop has given it one."""
        meter: list[int] = []
        for item in range(5):
            yield item
            assert len(meter) == 1, "nothing to divide by"
        meter.append(1)

    said = []
    run = begun(session, folder / "once", 1, every=1)
    run.resumable(state=[0])
    try:
        for _ in run.steps(iter(range(3)), total=5):
            pass
    except ToolkitError as error:
        said.append(str(error))
    run.close()
    try:
        len(run.steps(iter(range(3)), total=5)), len(run.steps(iter(range(3))))
    except TypeError as error:
        said.append(str(error))
    for attempt in (1, 2):
        run = begun(session, folder / "metered", attempt + 1, every=1)
        run.resumable(state=[0])
        try:
            for _ in run.epochs(2):
                for _ in run.steps(range(5) if attempt == 1 else metered()):
                    if attempt == 1 and run.step == 3:
                        raise KeyError
        except KeyError:
            pass
        except ToolkitError as error:
            said.append(str(error))
        run.close()
    return said


def test_what_cannot_be_begun_anew_or_has_no_length_is_said(tmp_path: Path) -> None:
    ((once, length, metered),) = run_ranks(1, odd_loaders, tmp_path)
    assert once.startswith("run.steps: the loader has no batch: a range_iterator cannot be restarted. Wrap the steps")
    assert length == "run.steps: this loader has no len()"
    assert "the loader raises AssertionError: nothing to divide by: a generator cannot be restarted. Wrap" in metered


def stopped_outside(session: Session, folder: Path) -> str:
    """Break the loop of epochs in the evaluation after the second one, because of a stop that rank 0 asks for."""
    run = begun(session, folder, 1)
    run.resumable(state=[0])
    said = "completed"
    try:
        for epoch in run.epochs(4):
            for _ in run.steps(range(3)):
                if epoch == 1 and run.rank == 0:
                    assert not run.stopping
            if epoch == 1:
                if run.rank == 0:
                    session.gate.request(STOP)
                wait_for(lambda: run.stopping, 60, "the request")
                break
        run.finish()
    except StoppedError as stopped:
        said = str(stopped)
    run.close()
    return said


def test_a_loop_of_epochs_that_is_left_because_of_a_stop_is_not_completed(tmp_path: Path) -> None:
    assert run_ranks(2, stopped_outside, tmp_path) == ["stopped at step 6 of 12; committed"] * 2
    assert (tmp_path / "checkpoints/step-00000006").is_dir()
