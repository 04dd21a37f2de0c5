"""Random numbers of samples by their batch, for loaders whose earlier batches a resume does not draw again.

What a data set or a collator draws (masks of words, crops of pictures) comes from generators that go on from batch to
batch. A resume that skips batches would draw other numbers for the rest of the epoch.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from toolkit.data.randomness import seed_cpu


class SeededFetch:
    """Stands for the data set and the collator of a DataLoader with a batch sampler.

    What they draw for a batch depends on the seed, the epoch and the batch's indices only. What the process draws
    elsewhere does not depend on them.
    """

    def __init__(self, loader: DataLoader[Any], seed: object) -> None:
        """Take the place of what ``loader`` has. ``seed`` counts as text."""
        self._dataset, self._collate, self._seed = loader.dataset, loader.collate_fn, seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that persist see it, too
        self._batch: list[Any] = []  #: what tells the next batch from the others of its epoch
        loader.collate_fn = self.collate
        # DataLoader refuses another data set, since its sampler has the old one's length; here it stays the same.
        object.__setattr__(loader, "dataset", self)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # not unpickled yet, in a worker
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the samples of a batch. torch's DataLoader calls it before the collator."""
        self._batch = list(indices)
        fetch = getattr(self._dataset, "__getitems__", None)
        with self._seeded("samples", self._batch):
            return [self._dataset[index] for index in indices] if fetch is None else fetch(indices)

    def collate(self, samples: Any) -> Any:
        """Return the batch of ``samples``."""
        with self._seeded("batch", self._batch):
            return self._collate(samples)

    def begin_epoch(self, number: int) -> None:
        """Draw as in epoch ``number`` from here on."""
        self._epoch.fill_(number)

    @contextmanager
    def _seeded(self, *what: object) -> Iterator[None]:
        """Draw from generators that ``what`` has for itself in this epoch."""
        kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
        text = repr((self._seed, int(self._epoch), *what))
        seed_cpu(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
        try:
            yield
        finally:
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])


class SeededStream(SeededFetch, IterableDataset[Any]):
    """Stands for an iterable data set. What is drawn depends on the numbers of sample and batch in this process."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        place = 0 if worker is None else worker.id
        samples, is_over = iter(self._dataset), object()
        self._batch = [place, 0]
        for number in itertools.count():
            with self._seeded("sample", place, number):
                sample = next(samples, is_over)
            if sample is is_over:
                return
            yield sample

    def collate(self, samples: Any) -> Any:
        batch = super().collate(samples)
        self._batch[1] += 1
        return batch
