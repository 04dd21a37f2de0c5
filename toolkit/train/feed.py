"""The batches of a loop of one's own, at any step again: from our loader, torch's DataLoader, or any other iterable.

A place in the data is an epoch and a number of batches in it. Our loader gives the batch of any place at once. Of a
stateful loader (torchdata's) the state is saved. Any other one is put forward by reading the batches before the place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch

from toolkit import logs
from toolkit.data.loader import Loader
from toolkit.data.permutation import hash64
from toolkit.train.seeds import reseed

log = logs.get(__name__)

Reseed: TypeAlias = Callable[[int], None]


class Feed(Protocol):
    """Where a loop's batches come from."""

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        """Yield the batches of epoch ``number`` from batch ``first`` on; ``step`` is the step of the first of them.

        Before it fetches the batch of a step it seeds the random generators for that step.
        """

    def batches_in(self, number: int) -> int | None:
        """How many batches epoch ``number`` has; None where nobody knows before its end."""

    def indices(self, step: int) -> list[int]:
        """Which samples of the data set this rank has in ``step``; empty where nobody knows."""

    @property
    def samples(self) -> int:
        """How many samples all ranks' batches of a step have together; 0 where nobody knows."""


class OwnFeed:
    """Batches of our loader. An epoch begins with the first batch that has a sample of it."""

    def __init__(self, loader: Loader, seed: Reseed) -> None:
        self._loader, self._seed = loader, seed
        self.samples = loader.global_batch_size

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        start = self._start(number)
        for at in range(start + first, self._start(number + 1)):
            self._seed(at)
            yield self._loader.at(at)

    def batches_in(self, number: int) -> int:
        return self._start(number + 1) - self._start(number)

    def indices(self, step: int) -> list[int]:
        return self._loader.samples(step)

    def _start(self, number: int) -> int:
        return -(-number * self._loader.dataset_size // self._loader.global_batch_size)


class ForeignFeed:
    """Batches of an iterable that is begun anew for each epoch, as a DataLoader is."""

    def __init__(self, loader: Any, seed: Reseed, world_size: int, *, is_there: bool) -> None:
        """``is_there``: the loader has a state of its own, and was put to the place by it."""
        self._loader, self._seed = loader, seed
        self._generators = {generator: generator.initial_seed() for generator in _generators(loader)}
        size = getattr(loader, "batch_size", None)
        self.samples = size * world_size if isinstance(size, int) else 0
        self._is_there = is_there

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        batches = self._begun(number)
        skip, self._is_there = 0 if self._is_there else first, False
        began = time.monotonic()
        for at in range(step - skip, step):
            self._seed(at)
            next(batches, None)
        if skip:
            log.info(
                "the loader was put forward by reading %d batches again, in %.1f s; run.loader, or a loader with a "
                "state (torchdata's StatefulDataLoader), would have gone there at once",
                skip,
                time.monotonic() - began,
            )
        while True:
            self._seed(step)
            try:
                yield next(batches)
            except StopIteration:
                return
            step += 1

    def batches_in(self, number: int) -> int | None:
        try:
            return len(self._loader)
        except TypeError:  # an iterable data set
            return None

    def indices(self, step: int) -> list[int]:
        return []

    def _begun(self, number: int) -> Iterator[Any]:
        """Begin an epoch as it was begun the first time: shuffling draws from torch's generator, or by the epoch."""
        for owner in (self._loader, *(getattr(self._loader, name, None) for name in _WITH_EPOCHS)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(number)
        for generator, seed in self._generators.items():
            generator.manual_seed(hash64(seed, number) >> 1)
        self._seed(-1 - number)
        return iter(self._loader)


#: Parts of a DataLoader that may follow the epoch, as torch's DistributedSampler does.
_WITH_EPOCHS = ("sampler", "batch_sampler", "dataset")


def _generators(loader: Any) -> set[torch.Generator]:
    """Return the generators of its own by which a DataLoader shuffles; accelerate gives it one."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(owner, name, None) for owner in owners for name in ("generator", "synchronized_generator")]
    return {generator for generator in found if isinstance(generator, torch.Generator)}


def seeder(seed: int, rank: int) -> Reseed:
    """Seed the generators of a rank as a function of the step, or of -1 - epoch for the beginning of an epoch."""
    return lambda step: reseed(seed, step, rank)
