"""Batches by step number, equal after any restart and on any number of ranks.

On a GPU the copies to it run on a stream of their own, while the GPU computes the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import choose
from toolkit.data.fingerprint import fingerprint, gives_batches
from toolkit.data.permutation import GivenOrder, Indices
from toolkit.data.sampler import (
    BatchPart,
    EvalSampler,
    Order,
    Sampler,
    TrainSampler,
    eval_calls,
    refuse_other_share,
)
from toolkit.data.workers import NO_SAMPLE, PREFETCH, Collate, InlineSource, SampleReader, Samples, WorkerSource
from toolkit.devices.accelerator import module_of, with_streams
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.state import Json

if TYPE_CHECKING:
    from toolkit.config import DataConfig


__all__ = ["BatchedSamples", "Batches", "Loader", "Samples", "build_loader", "eval_batches"]


@runtime_checkable
class BatchedSamples(Protocol):
    """A data set that gives many samples at once, cheaply and without randomness. It needs no worker."""

    def __len__(self) -> int: ...

    def batch(self, indices: Indices) -> Any:
        """Return the samples ``indices`` (n,) as the data of a batch, such as inputs (n, ...) and targets (n, ...)."""


@runtime_checkable
class InBlocks(Protocol):
    """A data set whose samples lie in blocks that are read at once. Files of many samples are an example."""

    def block_order(self, seed: int, batch_size: int) -> Order:
        """Return the order of a training run, with the samples of a block close together."""

    def read_ahead(self, order: Order | None, part: BatchPart) -> None:
        """Begin to read what ``part`` and the parts after it in ``order`` need. None: the data set's own order."""


class Batches(Protocol):
    """The interface that the loop needs of a loader: of :class:`Loader` or a ``StreamLoader``."""

    dataset_size: int  #: samples in an epoch
    global_batch_size: int
    data_wait_s: float  #: seconds that the last ``at`` kept its caller waiting, including the fetch itself
    #: How many samples of the whole run may be replaced because they cannot be loaded. None: the first one raises.
    max_bad_samples: int | None
    balances: bool  #: True if the loop may :meth:`rebalance` the batches anew
    is_partitioned: bool  #: True if each share reads its own part of the data
    ahead: int  #: steps beyond the last one returned that workers may hold already; equal on all ranks

    def at(self, step: int) -> Batch | None:
        """Return this rank's samples of global batch ``step``, counted from 0. A rank without a share gets None."""

    def rebalance(self, step: int, counts: Sequence[int]) -> None:
        """Give each share i ``counts[i]`` samples of the global batch from ``step`` on.

        Called where the loader ``balances``, alike on every rank. ``step`` must be at least ``ahead`` after the next
        step to be asked for: workers may hold earlier ones already.
        """

    def fingerprint(self) -> str | None:
        """Return a text that identifies the data set, equal for equal data sets. None: it is not known."""

    def sample_indices(self, step: int) -> list[int]:
        """Return the samples that this rank gets in ``step``."""

    def global_indices(self, step: int) -> list[int]:
        """Return the samples that all ranks together get in ``step``."""

    def state(self) -> Json:
        """Return what this rank must store of the loader in a checkpoint. None: the step says all."""

    def restore(self, state: Json) -> None:
        """Continue from a :meth:`state`, independent of what was read before.

        Raises ConfigError where the state is another share's, and what it has read matters.
        """


class BatchSource(Protocol):
    """The source of a loader's batches, on the CPU or on the device."""

    def fetch(self, step: int) -> Batch: ...

    def close(self) -> None: ...


@runtime_checkable
class MakesLoader(Protocol):
    """A training set that makes its loader itself, since its samples have no index: a :class:`toolkit.Streams`."""

    def loader_of_share(self, config: DataConfig, share: Share, **given: Any) -> Batches:
        """Return a share's batches. ``given``: the run's ``seed``, the rank's ``device``, the job's ``collate``."""


class Loader:
    """This rank's part of any global batch of the training; see :class:`Batches`.

    Asking for steps in sequence is fast, because workers run ahead. Any other step costs a start. The batch is put on
    ``device``, through pinned memory for CUDA.
    """

    def __init__(
        self,
        dataset: Samples | BatchedSamples,
        *,
        global_batch_size: int,
        seed: int,
        share: Share,
        workers: int = 0,
        max_bad_samples: int | None = None,
        partition: str = "global",
        repeats: int = 1,
        balances: bool = False,
        device: torch.device | str = "cpu",
        collate: Collate | None = None,
        order: Callable[[int], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Set the loader up; no sample is loaded yet.

        ``partition`` is global, or one of :func:`~.sampler.samples_of`. ``repeats``: how often a global batch has each
        sample, see :class:`~.permutation.ShuffledOrder`. ``balances``: the loop may call :meth:`rebalance`. ``collate``
        makes a batch's data of a list of samples, by default :func:`~.workers.stacked`. ``order(epoch)`` returns the
        samples of an epoch, by default each once; see :class:`~.permutation.GivenOrder`.
        """
        self._dataset = dataset
        _refuse_two_orders(dataset, has_order=order is not None, partition=partition, repeats=repeats)
        self._given = None if order is None else GivenOrder(order, len(dataset))
        run_order: Order | None = self._given
        if run_order is None and isinstance(dataset, InBlocks):
            run_order = dataset.block_order(seed, global_batch_size)
        self.dataset_size = len(dataset) if self._given is None else self._given.n
        self.global_batch_size = global_batch_size
        self.data_wait_s = 0.0
        self.max_bad_samples = max_bad_samples
        self.balances = balances
        self.ahead = PREFETCH * workers if _uses_workers(dataset) else 0
        self.is_partitioned = partition != "global"
        self._share = share
        self._device = torch.device(device)
        self._clock = clock
        self._samplers = partial(
            TrainSampler,
            len(dataset),
            global_batch_size=global_batch_size,
            seed=seed,
            partition=partition,
            order=run_order,
            repeats=repeats,
        )
        self._sampler = self._samplers(share=share)
        self._source: BatchSource = _source(
            dataset,
            self._sampler,
            seed=seed,
            device=self._device,
            workers=workers,
            skips=max_bad_samples is not None,
            collate=collate,
            order=self._given,
        )

    def __len__(self) -> int:
        """Return the number of steps that begin in the first epoch."""
        return -(-self.dataset_size // self.global_batch_size)

    def at(self, step: int) -> Batch | None:
        """See :class:`Batches`. The batch is empty, of the right shape, with more shares than samples."""
        started = self._clock()
        batch = self._source.fetch(step) if self._share.count else None
        self.data_wait_s = self._clock() - started
        return batch

    def sample_indices(self, step: int) -> list[int]:
        return self._sampler.at(step).indices.tolist() if self._share.count else []

    def rebalance(self, step: int, counts: Sequence[int]) -> None:
        self._sampler.rebalance(step, counts)

    def state(self) -> Json:
        """Return None: the step number is the whole state. With a partition, this rank's share."""
        return {"share": [self._share.index, self._share.count]} if self.is_partitioned else None

    def fingerprint(self) -> str | None:
        """Return what identifies the data set, see fingerprint.py, and the job's own order."""
        if self.is_partitioned:  # a rank may have only its part of the data
            return f"{self.dataset_size} samples"
        return fingerprint(self._dataset) + ("" if self._given is None else f", in the order {self._given.digest}")

    def global_indices(self, step: int) -> list[int]:
        if self.is_partitioned:
            return [sample for sampler in self._all_samplers for sample in sampler.at(step).indices.tolist()]
        start = step * self.global_batch_size
        found: list[int] = self._sampler.order.at(np.arange(start, start + self.global_batch_size)).tolist()
        return found

    @cached_property
    def _all_samplers(self) -> list[TrainSampler]:
        # Kept, because each finds the samples of its part among all of the data set.
        count = self._share.count
        return [self._samplers(share=Share(index, count)) for index in range(count)]

    def restore(self, state: Json) -> None:
        refuse_other_share(state, self._share)

    def close(self) -> None:
        """End the workers, if any."""
        self._source.close()


def build_loader(dataset: Samples | BatchedSamples, config: DataConfig, share: Share, **given: Any) -> Loader:
    """Return the training loader for the ``data:`` section. ``given`` is the rest of what :class:`Loader` takes."""
    return Loader(
        dataset,
        global_batch_size=config.global_batch_size,
        share=share,
        workers=config.workers,
        max_bad_samples=choose("data.bad_samples", config.bad_samples, {"fail": None, "skip": config.max_bad_samples}),
        partition=config.partition,
        repeats=config.augment_repeats,
        balances=choose("data.balance", config.balance, {"even": False, "auto": True}),
        **given,
    )


def eval_batches(
    dataset: Samples | BatchedSamples,
    share: Share,
    batch_size: int,
    *,
    workers: int = 0,
    device: torch.device | str = "cpu",
    collate: Collate | None = None,
) -> Iterator[Batch | None]:
    """Yield this share's contiguous part of the eval set, unpadded. Over all shares each sample comes exactly once.

    Every share yields ``sampler.eval_calls(len(dataset), share.count, batch_size)`` items. An item is None where the
    share's range has ended before the longest one. With a share count of 0 nothing is yielded.
    """
    sampler = EvalSampler(len(dataset), batch_size=batch_size, share=share)
    # Workers load only the calls that have samples.
    mine = eval_calls(sampler.stop - sampler.start, 1, batch_size)
    placed = torch.device(device)
    source = _source(dataset, sampler, seed=0, workers=min(workers, mine), device=placed, collate=collate)
    with closing(source):
        for call in range(sampler.calls):
            yield source.fetch(call) if call < mine else None


class _DeviceSource:
    """A source that moves another source's batches to ``device``, and finishes them there."""

    def __init__(self, source: BatchSource, device: torch.device, finish: Callable[[Any], Any] | None) -> None:
        self._source = source
        self._device = device
        self._finish = finish
        self.close = source.close

    def fetch(self, step: int) -> Batch:
        batch = to_device(self._source.fetch(step), self._device)
        return batch if self._finish is None else replace(batch, data=self._finish(batch.data))


def _refuse_two_orders(dataset: Any, *, has_order: bool, partition: str, repeats: int) -> None:
    """Raise ConfigError where the job's order, or that of shards, meets a partition or repeats."""
    if has_order and partition != "global":
        raise ConfigError(
            f"data.partition: {partition} goes by an order of its own; set it to global for one of the job's"
        )
    if has_order and repeats > 1:
        raise ConfigError(
            "data.augment_repeats: the job gives an order of its own, which may repeat samples; set it to 1"
        )
    if isinstance(dataset, InBlocks) and (partition != "global" or repeats > 1):
        raise ConfigError(
            "data.partition, data.augment_repeats: shards have an order of their own; leave them at global and 1"
        )


def _uses_workers(dataset: Any) -> bool:
    """True for samples that are read one by one, or from files: batches of tensors in memory need no worker."""
    return isinstance(dataset, InBlocks) or not gives_batches(dataset)


def _source(
    dataset: Any,
    sampler: Sampler,
    *,
    seed: int,
    workers: int,
    device: torch.device,
    skips: bool = False,
    collate: Collate | None = None,
    order: GivenOrder | None = None,
) -> BatchSource:
    """Return the cheapest source for ``dataset``: whole batches, workers, or this process."""
    in_batches = gives_batches(dataset) and collate is None
    reader = (BatchReader if in_batches else SampleReader)(dataset, seed, skips=skips, collate=collate, order=order)
    if isinstance(dataset, InBlocks):
        reader.ahead = partial(dataset.read_ahead, getattr(sampler, "order", None))
    # Whole batches draw nothing, and saving the generators takes 0.1 ms. ``skips`` may lead to single samples.
    source: BatchSource = InlineSource(reader, sampler, draws=skips or not in_batches)
    if workers > 0 and _uses_workers(dataset):
        source = WorkerSource(reader, sampler, workers=workers, pin=device.type != "cpu")
    return _DeviceSource(source, device, reader.finish)


class BatchReader(SampleReader):
    """A reader of whole parts from a data set that gives batches; with ``skips``, a bad part sample by sample."""

    def load(self, part: BatchPart) -> Batch:
        indices = part.indices if part.indices.size else np.zeros(1, np.int64)  # a batch's shape, without samples
        self.current[:] = [int(indices[0]), part.start]
        self.ahead(part)
        try:
            data = self.dataset.batch(indices)  # type: ignore[attr-defined]
        except JobFailedError:
            raise
        except Exception as error:
            if self.skips and hasattr(self.dataset, "__getitem__"):
                return super().load(part)
            raise JobFailedError(
                f"the samples from position {part.start} on cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self.current[:] = [NO_SAMPLE, NO_SAMPLE]
        batch = Batch(data, torch.from_numpy(part.positions()), part.global_count)
        return batch if part.indices.size else replace(batch, data=nested.slice_samples(data, 1, slice(0)))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` on ``device``, for use on the stream that is current now. The host does not wait for a GPU.

    Tensors are first copied to page-locked memory where they are not in it: from other memory the host would wait.
    """
    # To look at each tensor costs more than to fetch a small batch.
    if device.type == "cpu":
        return batch
    module = with_streams(device)
    if module is None:
        return batch.to(device)
    copies, computes = _copy_stream(device), module.current_stream(device)

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.pin_memory().to(device, non_blocking=True)
        # Else the memory, of the stream of the copies, would be overwritten as soon as Python lets go of the tensor.
        moved.record_stream(computes)
        return moved

    with module.stream(copies):
        batch = batch.map(move)
    # Only what is enqueued from here on waits. The step before, of which the host is ahead, is not held up.
    computes.wait_stream(copies)
    return batch


@cache
def _copy_stream(device: torch.device) -> Any:
    """Return the one stream for copies. The allocator keeps memory for each stream, and does not share it."""
    return module_of(device).Stream(device)
