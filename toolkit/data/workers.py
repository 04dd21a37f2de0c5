"""Loading of single samples, in this process or in workers ahead of the training."""

from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.reduction import ForkingPickler
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, default_collate

from toolkit import hang
from toolkit.base.errors import JobCodeError, JobFailedError
from toolkit.data.permutation import GivenOrder, hash64
from toolkit.data.randomness import generators_in, generators_kept, origin_of, seed_generator, seed_sample
from toolkit.data.sampler import BatchPart, Sampler
from toolkit.nodes.agent.die_with_parent import PR_SET_PDEATHSIG
from toolkit.ranks import nested
from toolkit.ranks.batch import BadSample, Batch

NO_SAMPLE = -1
#: A worker whose connection is closed has ended within this time.
END_S = 2.0
#: Number of batches that each worker is ahead; the loader relies on it, see ``Loader.ahead``.
PREFETCH = 2
#: What glibc keeps of freed memory, by its numbers of M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. It gives that of a batch
#: back otherwise, and page faults of the next one take longer than the copies into it.
KEPT_BYTES = {-1: 128 << 20, -3: 32 << 20}
#: Samples tried at one position. Even where half of a data set is bad, no run will ever need the last of them.
TRIES = 100
#: Most characters of an error sent with each bad sample.
MOST_TEXT = 500
#: Most bytes of whole numbers that a worker sends without shared memory.
SENT_BYTES = 16 << 10
_EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
#: Keeps this hash apart from those that other parts of the package make of the same run seed.
_REPLACEMENT = 0x52504C43


class Samples(Protocol):
    """A data set that gives one sample at a time. Any map-style torch ``Dataset`` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Return sample ``index``: tensors, arrays, numbers and texts, nested alike in every sample."""


@runtime_checkable
class UnfinishedSamples(Samples, Protocol):
    """A data set whose samples are finished batch by batch, unless the job collates. ``dataset[i]`` is finished."""

    def unfinished(self, index: int) -> Any:
        """Return sample ``index`` as workers load it, with all random changes of it."""

    def finish(self, data: Any) -> Any:
        """Return a batch's data, on its device, made of stacked unfinished samples."""


#: Makes the data of a batch from its samples; a job may give its own instead of :func:`stacked`.
Collate: TypeAlias = Callable[[list[Any]], Any]


def stacked(samples: list[Any]) -> Any:
    """Stack samples into the data of a batch, nested as one sample is. Texts become a list.

    Raises JobCodeError for what cannot be stacked.
    """
    try:
        return nested.map_with_path(_stacked_leaves, *samples)
    except nested.NestingError as error:
        raise JobCodeError(f"data: samples cannot be stacked: {error}; {_SAMPLES}") from error


def _stacked_leaves(path: str, *leaves: Any) -> Any:
    try:
        return default_collate(list(leaves))
    except (RuntimeError, TypeError) as error:
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        # Look for two shapes that differ, to name them in the error.
        other = next((shape for shape in shapes if shape != shapes[0]), None)
        kind = type(leaves[0]).__name__
        why = f"is a {kind}: {error}" if other is None else f"has the shapes {shapes[0]} and {other} in two samples"
        raise nested.NestingError(f"{path} {why}") from error


_SAMPLES = (
    "a sample is made of tensors, arrays, numbers and texts, of the same shapes in every sample; for other ones give a "
    "collate function of your own, or fill sequences up to one length"
)


class PartReader(ABC):
    """The loader of one rank's batches, in its process or in workers."""

    def __init__(self, seed: int, collate: Collate | None = None) -> None:
        self.seed = seed
        self._collate = collate
        if not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
            for what, size in KEPT_BYTES.items():
                ctypes.CDLL(None).mallopt(what, size)
        #: Index and position of the sample being loaded, in memory that outlives a killed worker.
        self.current: Any = [NO_SAMPLE, NO_SAMPLE]
        #: Called before a part is loaded, to begin reading what it and later ones need.
        self.ahead: Callable[[BatchPart], object] = lambda part: None

    @abstractmethod
    def load(self, part: BatchPart) -> Batch:
        """Load and collate the samples of ``part``. The process's generators stay seeded with the last sample's."""

    def collated(self, samples: list[Any]) -> Any:
        """Return the data of a batch of ``samples``. Raises JobFailedError for what cannot be stacked."""
        if self._collate is None:
            return stacked(samples)
        try:
            return self._collate(samples)
        except Exception as error:
            raise JobFailedError(f"data: the job's collate failed: {type(error).__name__}: {error}") from error

    def __getitem__(self, part: BatchPart) -> Batch | JobFailedError:
        """Load a part for torch's DataLoader, in a worker. An error raised there would be hidden under torch's own."""
        try:
            return self.load(part)
        except JobFailedError as error:
            # A note, and not the text: that is shown in one line.
            returned = JobFailedError(str(error))
            returned.add_note(f"In the data worker:\n{traceback.format_exc()}")
            return returned


class SampleReader(PartReader):
    """A reader of a part sample by sample. It first seeds the random generators from each sample's position.

    A sample whose loading raises ends the run. With ``skips`` another sample takes its place, chosen by the seed, the
    position and the number tried there, from the same epoch of the job's ``order``, if there is one: the rest of the
    data set may be kept for evaluation.
    """

    def __init__(
        self,
        dataset: Samples,
        seed: int,
        *,
        skips: bool = False,
        collate: Collate | None = None,
        order: GivenOrder | None = None,
    ) -> None:
        super().__init__(seed, collate)
        self.dataset = dataset
        self.skips = skips
        self._order = order
        # Kept beside the data set, so that one pickle for a worker holds both.
        self._generators = [(each, origin_of(each)) for each in generators_in(dataset)]
        #: What is left to do with the data of a batch; None: nothing.
        self.finish = dataset.finish if collate is None and isinstance(dataset, UnfinishedSamples) else None

    def load(self, part: BatchPart) -> Batch:
        self.ahead(part)
        positions = part.positions()
        pairs = zip(part.indices.tolist(), positions.tolist(), strict=True)
        bad: list[BadSample] = []
        samples = [self._sample(index, position, bad) for index, position in pairs]
        # A share is empty where the global batch is smaller than the number of shares, but must have a batch's shape.
        data = self.collated(samples or [self._sample(0, part.start, [])])
        self.current[:] = [NO_SAMPLE, NO_SAMPLE]
        batch = Batch(
            data, torch.from_numpy(positions), part.global_count, tuple(bad), is_stacked=self._collate is None
        )
        return batch if samples else replace(batch, data=nested.slice_samples(data, 1, slice(0)))

    def _sample(self, index: int, position: int, bad: list[BadSample]) -> Any:
        """Return sample ``index``, or the first good one drawn in its place. Add the bad ones to ``bad``."""
        for tried in range(TRIES):
            chosen = self._replacement(position, tried) if tried else index
            # Written before the load: if the worker is killed, this says what it was loading.
            self.current[:] = [chosen, position]
            seed_sample(self.seed, position)
            for generator, origin in self._generators:
                seed_generator(generator, hash64(origin, self.seed, position))
            try:
                if self.finish is not None:
                    return self.dataset.unfinished(chosen)  # type: ignore[attr-defined]
                return self.dataset[chosen]
            except Exception as error:
                found = BadSample(chosen, position, f"{type(error).__name__}: {error}"[:MOST_TEXT])
                # Where memory or descriptors ran out the sample may be good, and any other would fail now.
                is_machines = isinstance(error, OSError) and error.errno in _EXHAUSTED
                if not self.skips or is_machines or isinstance(error, MemoryError):
                    raise JobFailedError(f"{found} cannot be loaded: {found.error}") from error
                bad.append(found)
        raise JobFailedError(
            f"neither sample {index} (position {position} of the run) nor any of {TRIES - 1} drawn in its place can be "
            f"loaded, the last one because of {bad[-1].error}; see whether the storage is there"
        )

    def _replacement(self, position: int, tried: int) -> int:
        word = hash64(_REPLACEMENT, self.seed, position, tried)
        if self._order is None:
            return word % len(self.dataset)
        size = self._order.n
        return int(self._order.at(np.array([position // size * size + word % size]))[0])


class InlineSource:
    """A source that loads in the calling process. With ``draws`` it restores its random generators afterwards."""

    def __init__(self, reader: PartReader, sampler: Sampler, *, draws: bool = True) -> None:
        self.draws = draws
        self.reader = reader
        self.sampler = sampler

    def fetch(self, step: int) -> Batch:
        with generators_kept() if self.draws else nullcontext():
            return self.reader.load(self.sampler.at(step))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class WorkerSource:
    """A source that loads in ``workers`` forked processes, kept for the whole run. Call it from the main thread.

    The kernel kills the workers when the thread that forked them ends: those of a killed rank would hold its sockets
    open and make its peers wait for it.
    """

    def __init__(self, reader: PartReader, sampler: Sampler, *, workers: int, pin: bool) -> None:
        self._steps = _StepsFrom(sampler)
        self._sampler = sampler
        # Index and position of each worker's sample, readable when the worker is dead.
        self._current = RawArray(ctypes.c_int64, 2 * workers)
        self._pids: list[int] = []
        self._batches: Any = None
        self._next = NO_SAMPLE
        self._at_exit = partial(_close, weakref.ref(self))
        self._loader: DataLoader[Any] = DataLoader(
            reader,  # type: ignore[arg-type]  # asked by part instead of by index
            sampler=self._steps,
            batch_size=None,  # a part is a batch already
            num_workers=workers,
            prefetch_factor=PREFETCH,
            pin_memory=pin,
            persistent_workers=True,
            multiprocessing_context="fork",  # takes milliseconds; a fresh interpreter takes seconds to import torch
            worker_init_fn=_WorkerStart(self._current),
            generator=torch.Generator(),  # else each start draws from the process's own generator, and dropout changes
        )

    def fetch(self, step: int) -> Batch:
        """Return the batch of ``step``. It is ready where the workers are ahead; a step out of order restarts them.

        Raises JobFailedError for an error in a worker, or for one that died.
        """
        if step != self._next:
            self._steps.start = step
            if self._batches is None:
                with _death_unnoticed():
                    before = _child_pids()
                    self._batches = iter(self._loader)
                    self._pids = sorted(_child_pids() - before)
                atexit.register(self._at_exit)
            else:
                self._batches = iter(self._loader)  # the same workers; batches loaded ahead are dropped
        # torch notices a death only when a batch is late, and then takes up to 5 s.
        if len(self._alive()) < len(self._pids):
            raise self._death(step, "")
        try:
            batch: Batch | JobFailedError = next(self._batches)
        except RuntimeError as error:
            raise self._death(step, f": {error}") from None
        except (ConnectionError, EOFError) as error:  # it died just after it had sent a batch, which is in its memory
            deadline = time.monotonic() + END_S  # its sockets are closed before it has ended
            while len(self._alive()) == len(self._pids) and time.monotonic() < deadline:
                time.sleep(0.01)
            raise self._death(step, f": {error or type(error).__name__}") from None
        if isinstance(batch, JobFailedError):
            self.close()
            raise batch
        self._next = step + 1
        return batch

    def close(self) -> None:
        """End the workers. One that does not end within torch's 5 s is killed."""
        batches, self._batches, self._next = self._batches, None, NO_SAMPLE
        if batches is not None:
            batches._shutdown_workers()  # dropping the last reference does the same, but tracebacks hold references
        self._loader._iterator = None
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)  # an exit that waits for one that hangs would never end
        self._pids = []
        atexit.unregister(self._at_exit)

    def _alive(self) -> list[int]:
        return sorted({*self._pids} & _child_pids())

    def _death(self, step: int, detail: str) -> JobFailedError:
        """Return the error for a dead worker. It names the sample, which memory shared with this process holds."""
        dead = sorted(set(self._pids) - set(self._alive()))
        work = "; ".join(self._last_words(number) for number, pid in enumerate(self._pids) if pid in dead or not dead)
        start = self._sampler.at(step).start
        self.close()
        return JobFailedError(
            f"a data worker died (pid {', '.join(map(str, dead)) or 'unknown'}) before the batch of step {step}, from "
            f"position {start} on, was there{detail}. {work}. A worker that is killed has mostly run out of memory: "
            "look for the out-of-memory killer in this node's kernel log; lower data.workers or raise cluster.mem_gb"
        )

    def _last_words(self, worker: int) -> str:
        index, position = self._current[2 * worker : 2 * worker + 2]
        if position == NO_SAMPLE:
            return f"Worker {worker} was between two batches"
        return f"Worker {worker} was loading sample {index} of the data set (position {position} of the run)"


def _close(source: weakref.ref[WorkerSource]) -> None:
    """Close the source at exit, before multiprocessing waits for its children."""
    alive = source()
    if alive is not None:
        alive.close()


class _StepsFrom:
    """The parts from step ``start`` on. torch's DataLoader reads them anew at each start."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.start = 0

    def __iter__(self) -> Iterator[BatchPart]:
        with suppress(IndexError):  # the step after the last
            for step in count(self.start):
                yield self.sampler.at(step)


class _WorkerStart:
    """Sets a new data worker up. torch has set its number of threads to 1 before."""

    def __init__(self, current: Any) -> None:
        self.current = current
        self.parent = os.getpid()

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:  # the parent died before the line above
            os._exit(1)
        hang.install_worker_dump(worker)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        ForkingPickler.register(torch.Tensor, _sent)
        reader: Any = info.dataset
        reader.current = np.frombuffer(self.current, np.int64)[2 * worker : 2 * worker + 2]


def _sent(tensor: torch.Tensor) -> Any:
    """Send a few whole numbers as they are. torch sends a descriptor of shared memory, which takes 0.4 ms each."""
    is_whole = (tensor.dtype, tensor.layout, tensor.device.type) == (torch.int64, torch.strided, "cpu")
    if is_whole and tensor.nbytes <= SENT_BYTES:
        return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


@contextmanager
def _death_unnoticed() -> Iterator[None]:
    """Undo torch's own handler for a child's death, which it sets when it starts its first worker.

    That handler raises wherever the main thread is, such as in the middle of a checkpoint.
    """
    in_main = threading.current_thread() is threading.main_thread()
    on_death = signal.getsignal(signal.SIGCHLD)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads. Workers run none of the code that those threads lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if in_main:
            signal.signal(signal.SIGCHLD, on_death)


def _child_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}
