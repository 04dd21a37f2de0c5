"""The batches of a user's own loop, resumable at any step.

They come from our loader, torch's DataLoader, or any other iterable. Our loader gives the batch of any position at
once. A stateful loader (torchdata's) has its state saved. Any other one is moved forward by reading the batches before
the position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from toolkit.base import logs
from toolkit.base.errors import ConfigError, JobCodeError
from toolkit.data.loader import Loader
from toolkit.data.permutation import hash64
from toolkit.data.randomness import RandomGenerator, generators_in, origin_of, reseed, seed_generator
from toolkit.ranks.session import Session
from toolkit.train.user_state import UserState

log = logs.get(__name__)

Reseed: TypeAlias = Callable[[int], None]
#: The epoch's rounds: the number of an epoch, and of a later ``run.steps`` in it, in one, below any loader's bounds.
ROUNDS = 1 << 20
#: A loop has one loader, or a few in turn.
MAX_FEEDS = 15
#: Parts of a DataLoader that may shuffle by the epoch, as torch's DistributedSampler does.
PARTS = ("sampler", "batch_sampler", "dataset")


class Feed(Protocol):
    """Where a loop's batches come from."""

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        """Yield the batches of round ``number`` from batch ``first`` on. That one is of step ``step``.

        A round is an epoch, and ``ROUNDS`` for each earlier ``run.steps`` in it. The random generators are seeded for
        each step before its batch is fetched.
        """

    def batches_in(self, number: int) -> int | None:
        """Return the number of batches in epoch ``number``. None: it is not known before the epoch's end."""

    def indices(self, step: int) -> list[int]:
        """Return the indices of this rank's samples in ``step``; empty where they are not known."""

    @property
    def samples(self) -> int:
        """Return the number of samples in a step, over all ranks. 0: it is not known."""


class LoaderFeed:
    """Batches of our loader. An epoch begins with the first batch that begins in it."""

    def __init__(self, loader: Loader, seed: Reseed) -> None:
        self._loader, self._seed = loader, seed
        self.samples = loader.global_batch_size

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        start = self._start(number)
        for at in range(start + first, self._start(number + 1)):
            self._seed(at)
            yield self._loader.at(at)
        # What the loop draws between two epochs is then the same after a resume from there.
        self._seed(self._start(number + 1))

    def batches_in(self, number: int) -> int:
        return self._start(number + 1) - self._start(number)

    def indices(self, step: int) -> list[int]:
        return self._loader.sample_indices(step)

    def _start(self, number: int) -> int:
        return -(-number * self._loader.dataset_size // self._loader.global_batch_size)


class Feeds:
    """The feeds of a loop's loaders. A loader keeps its feed over the epochs: only in the first is a position set."""

    def __init__(self, seed: Reseed, session: Session) -> None:
        self._seed, self._session = seed, session
        self._feeds: dict[int, IterableFeed] = {}
        self._has_warned = False  #: of a loader that a resume cannot repeat

    def of(self, loader: Any, state: UserState | None) -> Feed:
        """Return the feed of ``loader``. ``state`` is what the loop has handed over."""
        if isinstance(loader, Loader):
            return LoaderFeed(loader, self._seed)
        feed = self._feeds.pop(id(loader), None)
        if feed is None:
            inner = inner_of(loader)
            if state is not None:
                _refuse_a_part(inner, state)
            if (warning := warning_about(loader)) and self._session.is_main and not self._has_warned:
                self._has_warned = True
                log.warning("run.steps: %s", warning)
            is_there = state is not None and state.has_filled(inner)
            origins = None if state is None else state.origins
            feed = IterableFeed(loader, self._seed, self._session.world_size, is_there=is_there, origins=origins)
        # Only the last ones: a script may make a loader for each epoch, and each has workers and a data set.
        self._feeds = {**dict([*self._feeds.items()][-MAX_FEEDS:]), id(loader): feed}
        return feed


def _refuse_a_part(loader: Any, state: UserState) -> None:
    """Raise ConfigError where a part that has the position was handed over without the loader."""
    owners = {name: part for name in PARTS if (part := getattr(loader, name, None)) is not None}
    if isinstance(owners.get("dataset"), Sized):  # one with an index, whose state is something else
        del owners["dataset"]
    held = [name for name, part in owners.items() if state.has(part)]
    if held and not state.has(loader):
        raise ConfigError(
            f"run.resumable: the {held[0]} of the loader in run.steps was handed over: run.steps keeps its position, "
            "and a resume would move it on twice; leave it out, or hand over a loader with a state (torchdata's "
            "StatefulDataLoader)"
        )


class IterableFeed:
    """Batches of an iterable that is begun again for each epoch, as a DataLoader is."""

    def __init__(
        self,
        loader: Any,
        seed: Reseed,
        world_size: int,
        *,
        is_there: bool,
        origins: dict[RandomGenerator, int] | None = None,
    ) -> None:
        """Wrap ``loader``; ``is_there``: a resume has restored its position by a state of its own.

        ``origins`` are those that generators had before a resume filled them, or an earlier loader used them.
        """
        self._loader, self._inner, self._seed = loader, inner_of(loader), seed
        # The seed of each epoch is derived from what the script has given the generator.
        origins = {} if origins is None else origins
        self._origins = {each: origins.setdefault(each, origin_of(each)) for each in generators_in(self._inner)}
        size = getattr(self._inner, "batch_size", None)
        self.samples = size * world_size if isinstance(size, int) else 0
        self._is_there = is_there

    def epoch(self, number: int, first: int, step: int) -> Iterator[Any]:
        if self._is_there and hasattr(self._loader, "restart_on_stop_iteration"):
            # torchdata's nodes would begin the next epoch at once where the position is this one's end.
            with set_for_now(self._loader, restart_on_stop_iteration=False):
                batches = self._begun(number)
        else:
            batches = self._begun(number)
        # After a resume in the middle of an epoch: read the batches before it, unless the loader's state did that.
        skip, self._is_there = 0 if self._is_there else first, False
        began = time.monotonic()
        for at in range(step - skip, step):
            self._seed(at)
            try:
                next(batches, None)
            except Exception as error:
                if advice := advice_about(self._loader):
                    raise JobCodeError(
                        "run.steps: the batches before this step are read again after a resume within an epoch, and "
                        f"the loader raises {type(error).__name__}: {error}{advice}"
                    ) from error
                raise
        if skip:
            log.info(
                "the loader was put forward by reading %d batches again, in %.1f s; run.loader, or a loader with a "
                "state (torchdata's StatefulDataLoader), would have gone there at once",
                skip,
                time.monotonic() - began,
            )
        # A DataLoader may draw random numbers as it fetches, so seeds come before each batch.
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
        """Begin an epoch as it was begun the first time. A resume then gets the same order.

        Loaders shuffle by the epoch's number, by generators of their own, or by torch's: all three are set.
        """
        parts = [getattr(self._inner, name, None) for name in PARTS]
        for owner in (self._inner, *parts, *(getattr(part, "sampler", None) for part in parts)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(number % ROUNDS)
        # Fabric's loader sets the epoch once more, by its own count, which begins at 0 after a resume.
        if hasattr(self._inner, "_num_iter_calls"):
            self._inner._num_iter_calls = number % ROUNDS
        for generator, origin in self._origins.items():
            seed_generator(generator, hash64(origin, number))
        self._seed(-1 - number)
        end_workers(self._inner)
        return iter(self._loader)


@contextmanager
def set_for_now(owner: object, **values: Any) -> Iterator[None]:
    """Set attributes of a library's object. Put the script's own values back at the end."""
    own = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(own)


def end_workers(loader: Any) -> None:
    """End workers that persist over epochs, so that the next epoch begins with new ones.

    They were seeded in an earlier epoch, and a resume has no such workers. A stateful loader keeps theirs.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's wraps one
    has_workers = getattr(loader, "persistent_workers", False) and not hasattr(loader, "load_state_dict")
    if has_workers and loader._iterator is not None:
        loader._iterator._shutdown_workers()
        loader._iterator = None


def inner_of(loader: Any) -> Any:
    """Return the loader that a progress bar such as tqdm goes through, or ``loader`` itself."""
    return getattr(loader, "iterable", loader)


def advice_about(loader: Any) -> str:
    """Return the end of a sentence for what can be gone through once, such as a generator; "" for any other loader."""
    if not isinstance(loader, Iterator):
        return ""
    return (
        f": a {type(loader).__name__} cannot be restarted. Wrap the steps instead: "
        "`for batch in metric_logger.log_every(run.steps(loader), ...)`"
    )


def warning_about(loader: Any) -> str:
    """Return what a resume cannot repeat of this loader; "" where it can."""
    if advice := advice_about(loader):
        return f"a resume reads earlier batches again{advice}"
    inner = inner_of(loader)
    if getattr(inner, "num_workers", 0) > 1 and not getattr(inner, "in_order", True):
        return (
            "with in_order=False batches come in the order in which workers are done. A resume within an epoch has "
            "another one, and may repeat and leave out samples of the epoch"
        )
    return ""


def seeder(seed: int, rank: int) -> Reseed:
    """Return a function that seeds a rank's generators by the step. An epoch's beginning has step -1 - epoch."""
    return lambda step: reseed(seed, step, rank)


class StepBatches:
    """Batches, to be gone through once, one for each step::

    >>> def epoch(run: toolkit.TrainingRun, loader: torch.utils.data.DataLoader) -> None:
    ...     for number, batch in run.steps(loader).enumerate():  # continues after a resume within the epoch
    ...         rate = 0.1 * number / len(loader)
    """

    def __init__(self, batches: Iterator[Any], length: Callable[[], int | None], number: Callable[[], int]) -> None:
        """Take the ``batches``. In a step ``number()`` is its number within what ``length()`` counts."""
        self._batches, self._length, self._number = batches, length, number

    def __iter__(self) -> Iterator[Any]:
        return self._batches  # no call of ours between the loop and its next batch

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, or the ``total``, also after a resume within it.

        Progress bars and metric loggers divide by it. Raises TypeError where the loader has no length.
        """
        length = self._length()
        if length is None:
            raise TypeError("run.steps: this loader has no len()")
        return length

    def __bool__(self) -> bool:
        return True

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield each batch with its number within the epoch, or of the run where ``run.steps`` has a ``total``.

        After a resume the numbers continue, where Python's ``enumerate`` would begin at 0 again.
        """
        for batch in self._batches:
            number = start + self._number()
            yield number, batch
            del batch  # else it would stay in memory until the end
            yield from enumerate(self._batches, number + 1)  # C code: no call of ours in a step
