"""After a resume a user's own loop has equal batches and random numbers."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader
from toolkit.ranks.batch import Share
from toolkit.train.feed import MAX_FEEDS, Feeds, IterableFeed, LoaderFeed, seeder, warning_about
from toolkit.train.loop import LoopEngine

EPOCHS, BATCHES = 3, 4


class Noise(Dataset[torch.Tensor]):
    """A data set that draws a sample in its worker, as augmentation does."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3)


def feed_of_workers() -> IterableFeed:
    loader = DataLoader(Noise(), 2, num_workers=1, persistent_workers=True)
    return IterableFeed(loader, seeder(3, 0), 1, is_there=False)


def test_workers_that_persist_draw_in_each_epoch_what_new_ones_draw() -> None:
    whole = feed_of_workers()
    epochs = [torch.stack([*whole.epoch(number, 0, number * BATCHES)]) for number in range(EPOCHS)]
    assert not torch.equal(epochs[0], epochs[1])
    resumed = feed_of_workers()
    last = EPOCHS - 1
    assert torch.equal(torch.stack([*resumed.epoch(last, 1, last * BATCHES + 1)]), epochs[last][1:])


def test_a_loader_whose_batches_come_in_any_order_is_named() -> None:
    def loader(workers: int, in_order: bool) -> Any:
        return DataLoader(Noise(), 2, num_workers=workers, in_order=in_order)

    assert "in_order=False" in warning_about(loader(2, False))
    assert "in_order=False" in warning_about(SimpleNamespace(iterable=loader(2, False)))  # tqdm(loader)
    assert not warning_about(loader(1, False))
    assert not warning_about(loader(2, True))


NUMBERS = np.random.default_rng(4)


class Own(Dataset[torch.Tensor]):
    """Draws from generators of its own, and of its module."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self.transforms = [SimpleNamespace(inside={"generator": kind()})]

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(self.transforms[0].inside["generator"].random()), NUMBERS.random()])


class Shuffled(Sampler[int]):
    """A sampler that shuffles by a generator of its own, and never begins it anew."""

    def __init__(self) -> None:
        self.order = random.Random(7)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.sample(range(2 * BATCHES), 2 * BATCHES))

    def __len__(self) -> int:
        return 2 * BATCHES


def collator() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    drawing = np.random.default_rng(3)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + drawing.standard_normal()

    return collate


@pytest.mark.parametrize("has_workers", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        lambda: random.Random(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda: np.random.RandomState(5),
    ],
    ids=["random", "numpy", "twister", "legacy"],
)
def test_generators_of_a_sampler_and_a_data_set_are_brought_to_their_place(
    kind: Callable[[], Any], has_workers: bool
) -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Own(kind), 2, sampler=Shuffled(), collate_fn=collator(), num_workers=int(has_workers))

    global NUMBERS
    NUMBERS = np.random.default_rng(4)
    whole = IterableFeed(loader(), seeder(3, 0), 1, is_there=False)
    epochs = [torch.stack([*whole.epoch(number, 0, number * BATCHES)]) for number in range(EPOCHS)]
    assert not torch.equal(epochs[0][:, :, 0], epochs[1][:, :, 0])
    NUMBERS = np.random.default_rng(4)
    resumed = IterableFeed(loader(), seeder(3, 0), 1, is_there=False)
    last = EPOCHS - 1
    assert torch.equal(torch.stack([*resumed.epoch(last, 1, last * BATCHES + 1)]), epochs[last][1:])


class Recording(Sampler[int]):
    """A sampler that shuffles by the epoch it was told, as torch's DistributedSampler does."""

    def __init__(self) -> None:
        self.told = 0

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.told).sample(range(2 * BATCHES), 2 * BATCHES))

    def __len__(self) -> int:
        return 2 * BATCHES


def fabrics(loader: DataLoader[torch.Tensor]) -> Any:
    return pytest.importorskip("lightning.fabric.wrappers")._FabricDataLoader(loader)


@pytest.mark.parametrize("wrapped", [lambda loader: loader, fabrics], ids=["plain", "fabric"])
@pytest.mark.parametrize("is_by_batch", [False, True])
def test_a_loader_begins_the_epoch_of_the_resume(wrapped: Callable[[Any], Any], is_by_batch: bool) -> None:
    """Before, Fabric's began at 0, by its own count, and a sampler within a batch sampler was not told at all."""

    def feed() -> IterableFeed:
        by_batch: Any = {"batch_sampler": BatchSampler(Recording(), 2, drop_last=False)}
        arguments = by_batch if is_by_batch else {"batch_size": 2, "sampler": Recording()}
        data: Any = torch.arange(2 * BATCHES)
        loader: DataLoader[torch.Tensor] = DataLoader(data, **arguments)
        return IterableFeed(wrapped(loader), seeder(3, 0), 1, is_there=False)

    whole, resumed = feed(), feed()
    epochs = [torch.stack([*whole.epoch(number, 0, number * BATCHES)]) for number in range(3)]
    assert not torch.equal(epochs[1], epochs[2])
    assert torch.equal(torch.stack([*resumed.epoch(2, 1, 2 * BATCHES + 1)]), epochs[2][1:])


def test_a_loader_made_anew_for_each_epoch_keeps_the_origin_of_its_generators() -> None:
    def epoch(own: Own, origins: dict[Any, int], number: int) -> torch.Tensor:
        feed = IterableFeed(DataLoader(own, 2), seeder(3, 0), 1, is_there=False, origins=origins)
        return torch.stack([*feed.epoch(number, 0, number * BATCHES)])

    kept, origins = Own(lambda: random.Random(5)), dict[Any, int]()
    second = [epoch(kept, origins, number) for number in range(2)][1]
    assert torch.equal(second, epoch(Own(lambda: random.Random(5)), {NUMBERS: origins[NUMBERS]}, 1))


def test_our_loader_seeds_a_data_sets_own_generator_for_each_sample() -> None:
    def loader() -> Loader:
        return Loader(Own(lambda: np.random.default_rng(5)), global_batch_size=2, seed=3, share=Share(0, 1))

    first, again = loader(), loader()
    [first.at(step) for step in range(3)]
    batch, expected = again.at(3), first.at(3)
    assert torch.equal(batch.data[:, :2], expected.data[:, :2])


def test_after_an_epoch_of_our_loader_the_loop_draws_the_same_as_a_resume_there() -> None:
    data = InMemory(torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.int64))
    feed = LoaderFeed(Loader(data, global_batch_size=2, seed=3, share=Share(0, 1)), seeder(3, 0))
    drawn = []
    for first in (0, BATCHES):
        torch.manual_seed(first)
        assert len([*feed.epoch(0, first, first)]) == BATCHES - first
        drawn.append(torch.rand(()))
    assert drawn[0] == drawn[1]


def test_loaders_that_a_loop_has_left_behind_are_freed() -> None:
    feeds = Feeds(seeder(3, 0), SimpleNamespace(world_size=1, is_main=True))  # type: ignore[arg-type]
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(3 * MAX_FEEDS):
        loader = DataLoader(Noise(), 2)
        alive.add(loader)
        feed = feeds.of(loader, None)
        assert feeds.of(loader, None) is feed
    del loader, feed
    gc.collect()
    assert len(alive) == MAX_FEEDS + 1


def test_the_speed_is_logged_once_at_a_step_and_never_at_the_resumed_one() -> None:
    parts = {"_session": SimpleNamespace(device=torch.device("cpu")), "_history": SimpleNamespace(scalars=lambda _: {})}
    speed = SimpleNamespace(samples_per_s=9.0, data_wait_fraction=0.0)
    loop: Any = SimpleNamespace(step=4, _figured=4, _throughput=speed, **parts)
    assert LoopEngine._figures(loop) == {}
    loop.step = 5
    assert [LoopEngine._figures(loop).get("train/samples_per_s") for _ in range(2)] == [9.0, None]
