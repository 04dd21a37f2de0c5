"""Data without an index: each rank reads its own stream, whose position a checkpoint holds.

Guaranteed: a resume on as many ranks gives exactly the samples that would have followed, seeded by the seed and their
positions, with or without a worker that reads ahead. A stream that ends begins its next epoch. Uneven streams do so at
different times: samples of a short stream come more often, and the epochs that the loop counts follow from
``dataset_size`` alone.

Not guaranteed: that another number of ranks sees the same samples. Only the stream knows what it has left, so a resume
on another number of ranks or with other shares is refused. The code that builds a stream from its share must see to it
that ranks do not read the same samples, and must handle samples that cannot be read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.data.loader import to_device
from toolkit.data.randomness import seed_sample
from toolkit.data.sampler import BatchPart, refuse_other_share
from toolkit.data.workers import NO_SAMPLE, Collate, InlineSource, PartReader, WorkerSource
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.state import Json

if TYPE_CHECKING:
    from toolkit.config import DataConfig

_END = object()


class Stream(Protocol):
    """Samples one after the other, and a state that holds the position. torchdata's stateful data sets are streams.

    Draw what must last longer than a sample (an epoch's order) from a generator of your own: the process's are seeded
    anew before each sample, from the position in the run.
    """

    def __iter__(self) -> Iterator[Any]:
        """Continue from the state. Where it is the end of an epoch, begin the next one.

        Called at the beginning, after :meth:`load_state_dict` and at each end.
        """

    def state_dict(self) -> Mapping[str, Json]:
        """Return the position after the last sample returned. A generator must count a sample before its yield."""

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go back to the position of ``state``, whatever the current one is. ``state`` has been through JSON."""


#: Builds the stream of a share, on its rank. ``share`` says which of how many streams; the int is the run's seed.
MakeStream: TypeAlias = Callable[[Share, int], Stream]


@dataclass(frozen=True)
class Streams:
    """A training set of streams. ``make(share, seed)`` gives a rank's own, and ``epoch_size`` samples are an epoch::
    >>> class Numbers:  # torchdata's stateful data sets have the same three methods
    ...     def __init__(self, share, seed):
    ...         self.share, self.at = share, share.index
    ...     def __iter__(self):
    ...         while self.at < 1000:
    ...             self.at += self.share.count
    ...             yield self.at - self.share.count
    ...         self.at = self.share.index
    ...     def state_dict(self):
    ...         return {"at": self.at}
    ...     def load_state_dict(self, state):
    ...         self.at = state["at"]
    >>> train_set = toolkit.Streams(Numbers, epoch_size=1000)
    >>> list(train_set.make(toolkit.Share(1, 4), 0))[:3]
    [1, 5, 9]
    """

    make: MakeStream
    epoch_size: int

    def loader_of_share(self, config: DataConfig, share: Share, **given: Any) -> StreamLoader:
        """Return the loader for the ``data:`` section; see :class:`StreamLoader`. Raises ConfigError."""
        # Refuse keys that need a data set with an index, or shares of different sizes.
        if config.bad_samples != "fail":
            raise ConfigError(
                "data.bad_samples: skip needs a data set with an index, from which another sample can be drawn; let "
                "the stream leave out what it cannot read, and set it to fail"
            )
        if config.balance != "even" or config.partition != "global" or config.augment_repeats > 1:
            raise ConfigError(
                "data.balance, data.partition, data.augment_repeats: each rank reads a stream of its own, once, and "
                "as much "
                "of it as the others of theirs; leave them at even, global and 1"
            )
        sizes: dict[str, Any] = {"dataset_size": self.epoch_size, "global_batch_size": config.global_batch_size}
        return StreamLoader(self.make, share=share, workers=config.workers, **sizes, **given)


class StreamLoader:
    """This rank's part of each global batch, from its own stream. The loop uses it like a ``Loader``.

    Steps must be asked for in order. With ``workers`` one process reads ahead: several would give the samples in
    another order.
    """

    max_bad_samples: int | None = None
    is_partitioned = True  # only the job knows which samples a stream has
    balances = False  # with unequal counts the position of each stream would depend on the clock
    ahead = 0

    def __init__(
        self,
        make: MakeStream,
        *,
        dataset_size: int,
        global_batch_size: int,
        seed: int,
        share: Share,
        workers: int = 0,
        device: torch.device | str = "cpu",
        collate: Collate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build this rank's stream. ``dataset_size`` samples are an epoch. Raises ConfigError for an empty share."""
        if global_batch_size < share.count:
            raise ConfigError(
                f"data.global_batch_size: {global_batch_size} samples cannot be shared by {share.count} streams; "
                f"use {share.count} or more"
            )
        self.dataset_size = dataset_size
        self.global_batch_size = global_batch_size
        #: Seconds that the last ``at`` kept its caller waiting, including the fetch itself.
        self.data_wait_s = 0.0
        self._device = torch.device(device)
        self._clock = clock
        self._share = share
        self._sampler = _StreamSampler(global_batch_size, share)
        self._source: InlineSource | WorkerSource | None = None
        # A rank without a share reads nothing.
        if share.count:
            reader = _StreamReader(make(share, seed), seed, share, collate)
            self._source = (
                WorkerSource(reader, self._sampler, workers=1, pin=self._device.type != "cpu")
                if workers
                else InlineSource(reader, self._sampler)
            )
        self._next = 0
        self._first: Batch | None = None  # the strategy is primed on step 0's batch, and step 0 needs it again
        self._state: str | None = None

    def at(self, step: int) -> Batch | None:
        """Return this rank's samples of global batch ``step``; None if its share count is 0.

        Step 0 may be asked for again until another step is. Raises ValueError for any other step that is not the next.
        """
        started = self._clock()
        # The strategy may be primed on step 0 before the first step asks for it.
        batch = self._first if step == 0 and self._first is not None else self._read(step)
        self._first = batch if step == 0 else None
        self.data_wait_s = self._clock() - started
        return batch

    def _read(self, step: int) -> Batch | None:
        if step != self._next:
            raise ValueError(f"a stream is read in order: step {step} was asked for, and {self._next} is the next one")
        batch = None if self._source is None else to_device(self._source.fetch(step), self._device)
        self._next = step + 1
        self._state = None if batch is None else batch.stream_state
        return batch

    def sample_indices(self, step: int) -> list[int]:
        """Return the positions of the samples that ``at(step)`` gives; they have no index."""
        return list(range(*self._sampler.bounds_of(step)))

    def rebalance(self, step: int, counts: Sequence[int]) -> None:
        raise AssertionError("streams keep their shares")

    def fingerprint(self) -> str | None:
        """Return None: a stream does not reveal what it holds."""
        return None

    def global_indices(self, step: int) -> list[int]:
        """Return the positions of the samples that all streams give in ``step``."""
        return list(range(step * self.global_batch_size, (step + 1) * self.global_batch_size))

    def state(self) -> Json:
        """Return this rank's share, and its stream's position after the last batch returned."""
        stream = None if self._state is None else json.loads(self._state)
        return {"next_step": self._next, "stream": stream, "share": [self._share.index, self._share.count]}

    def restore(self, state: Json) -> None:
        """Go back to the position that a :meth:`state` holds. Raises ConfigError for that of another share."""
        refuse_other_share(state, self._share)
        assert isinstance(state, Mapping)
        assert isinstance(state["next_step"], int)
        self.close()  # a worker has read ahead from the old position
        self._next, self._first = state["next_step"], None
        self._state = None if state["stream"] is None else json.dumps(state["stream"])
        self._sampler.begin(self._next, self._state)

    def close(self) -> None:
        """End the worker, if any."""
        if self._source is not None:
            self._source.close()


@dataclass(frozen=True)
class _StreamBatchPart(BatchPart):
    """The next samples to read from a stream; indices are positions. With ``state`` the stream goes there first."""

    state: str | None = None


class _StreamSampler:
    """The part of each global batch that a share takes. Its bounds follow from the step number."""

    def __init__(self, global_batch_size: int, share: Share) -> None:
        self.global_batch_size = global_batch_size
        self.bounds = share.bounds(global_batch_size)
        self.begin(0, None)

    def begin(self, step: int, state: str | None) -> None:
        """Have ``step`` begin at the stream's ``state``."""
        self._begins, self._state = step, state

    def bounds_of(self, step: int) -> tuple[int, int]:
        """Return the position of the first sample of ``step``, and the one after the last."""
        first, (start, stop) = step * self.global_batch_size, self.bounds
        return first + start, first + stop

    def at(self, step: int) -> _StreamBatchPart:
        start, stop = self.bounds_of(step)
        state = self._state if step == self._begins else None
        return _StreamBatchPart(np.arange(start, stop, dtype=np.int64), start, self.global_batch_size, state)


class _StreamReader(PartReader):
    """A reader that takes the samples of a part from a stream. It runs in this process or in the one worker."""

    def __init__(self, stream: Stream, seed: int, share: Share, collate: Collate | None) -> None:
        super().__init__(seed, collate)
        self._stream = stream
        self._share = share
        self._iterator: Iterator[Any] | None = None

    def load(self, part: BatchPart) -> Batch:
        assert isinstance(part, _StreamBatchPart)
        where = part.start
        try:
            # Only the first part after a restore has a state: the stream moves there.
            if part.state is not None:
                self._stream.load_state_dict(json.loads(part.state))
                self._iterator = None
            samples = [self._take(where := position) for position in part.indices.tolist()]
            # The state goes with the batch, so that a checkpoint has it for the last batch that was trained on.
            state = json.dumps(self._stream.state_dict(), allow_nan=False)
        except Exception as error:
            which = f"the stream of share {self._share.index} of {self._share.count}"
            raise JobFailedError(f"{which} failed at position {where}: {type(error).__name__}: {error}") from error
        self.current[:] = [NO_SAMPLE, NO_SAMPLE]
        data = self.collated(samples)
        return Batch(data, torch.from_numpy(part.indices), part.global_count, stream_state=state)

    def _take(self, position: int) -> Any:
        self.current[:] = [position, position]
        for _ in range(2):  # the second time after the end of an epoch
            if self._iterator is None:
                self._iterator = iter(self._stream)
            seed_sample(self.seed, position)
            sample = next(self._iterator, _END)
            if sample is not _END:
                return sample
            self._iterator = None
        raise ValueError("it ended twice without a sample; a share must not be empty")
