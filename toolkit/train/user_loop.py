"""A user's own training loop: `TrainingRun`.

It stops, saves and resumes as the Trainer's does.

    with toolkit.start() as run:
        model = DistributedDataParallel(Net().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loader = run.loader(dataset, global_batch_size=256)
        run.resumable(model=model, optimizer=optimizer)
        for batch in run.steps(loader, total=10_000):
            ...
            run.log(loss=loss)

A checkpoint holds the state right after a step. A run that resumes from the last step of an epoch does again what the
loop does between two epochs (an evaluation, a scheduler's step).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, filled
from toolkit.data.loader import BatchedSamples, Loader, Samples
from toolkit.data.randomness import reseed
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.stop import STOP
from toolkit.run.rank.main import joined
from toolkit.train.checkpoints import USER_LOOP, Checkpoints
from toolkit.train.feed import (
    PARTS,
    ROUNDS,
    Feed,
    IterableFeed,
    LoaderFeed,
    advice_about,
    inner_of,
    seeder,
    warning_about,
)
from toolkit.train.handed_over import PassCounter, bare, is_metric, layers
from toolkit.train.loss_windows import by_tag, gather_json, number_of
from toolkit.train.user_state import UserState
from toolkit.train.user_steps import LoopPosition, UserSteps

#: Environment variable with the id of the process that has called :func:`toolkit.train.start.start`.
STARTED_VARIABLE = "TOOLKIT_STARTED"

log = logs.get(__name__)

Kind = TypeVar("Kind")


def join_once(caller: str, name: str | None = None) -> JobConfig:
    """Return this process's config. Raises ConfigError, naming the ``caller``, for a second run in the process.

    ``name`` is the run's where no config names it.
    """
    if os.environ.get(STARTED_VARIABLE) == str(os.getpid()):
        raise ConfigError(
            f"{caller}: called twice in one process: a run has one loop. Several trainings, as the folds of a "
            "cross-validation, are several runs: toolkit sweep train.py args.fold=0,1,2"
        )
    os.environ[STARTED_VARIABLE] = str(os.getpid())
    return joined(name)


_SAME_LENGTH = (
    "each rank needs as many batches as the others: use run.loader, or a DistributedSampler with one batch size for "
    "all ranks, or give run.steps a total="
)
#: A loop has one loader, or a few in turn.
MAX_FEEDS = 15


class TrainingRun(UserSteps):
    """One rank's side of a run with the user's own loop. Every rank makes the same calls in the same order::

    >>> def prepared(run: toolkit.TrainingRun) -> float:
    ...     with run.main_first():  # rank 0 downloads, the others find it there
    ...         numbers = fetch(run.dir)
    ...     return sum(run.gather(numbers[run.rank :: run.world_size].mean())) / run.world_size
    """

    def __init__(self, config: JobConfig, session: Session) -> None:
        super().__init__(config, session)
        self.rank = session.rank  #: this rank, from 0
        self.world_size = session.world_size  #: the number of ranks
        self.local_rank = session.local_rank  #: this rank's number on its node
        self.device = session.device  #: this rank's GPU, which is the current one, or the CPU
        self.dir = session.run_dir  #: the run's folder, which all ranks share
        self._seed = seeder(config.train.seed, session.rank)
        self._loader: Loader | None = None
        self._feeds: dict[int, IterableFeed] = {}
        self._has_warned = False  #: of a loader that a resume cannot repeat
        self._called = 0  #: calls of run.steps in this attempt, of the epoch if there is one
        self._last: object = None  #: the loader of the last one
        self._turn = self._turn_from = 0  #: the number of the last one, and the step at which it began
        self._singles = 0  #: how many of the last ones were left after one batch
        self._script_seed = 0  #: the script's own, of which an epoch's beginning draws: equal ranks stay equal there

    # ------------------------------------------------------------------------------------------------------- facts

    @property
    def batch(self) -> int:
        """Return the number of the step in progress within its epoch, from 0. After a resume it goes on."""
        return self._at.earlier + self._at.batch

    @property
    def stopping(self) -> bool:
        """True once this rank knows of a request to stop. A long evaluation may then end early.

        In a step it is False: after the step all ranks stop together, which a ``break`` of some would prevent.
        """
        return not self._in_step and self._session.gate.pending == STOP

    def every(self, steps: int) -> bool:
        """True in every ``steps``-th step of the run. The step in progress counts as done."""
        return (self.step + self._in_step) % steps == 0

    def params(self, kind: type[Kind]) -> Kind:
        """Return the config's ``params`` as an object of ``kind``, the script's dataclass ``Params``."""
        return filled(kind, self.config.params)

    # --------------------------------------------------------------------------------------------------- what is kept

    def loader(
        self, dataset: Samples | BatchedSamples, *, global_batch_size: int | None = None, workers: int | None = None
    ) -> Loader:
        """Return batches of ``dataset`` that any number of ranks can resume at any step.

        ``global_batch_size`` counts the samples of all ranks in one step. It and ``workers`` default to the config's. A
        batch has ``inputs`` and ``targets`` on this rank's device.
        """
        data = self.config.data
        loader = Loader(
            dataset,
            global_batch_size=data.global_batch_size if global_batch_size is None else global_batch_size,
            seed=self.config.train.seed,
            share=Share(self.rank, self.world_size),
            workers=data.workers if workers is None else workers,
            device=self.device,
        )
        self._stack.callback(loader.close)
        return loader

    def resumable(self, **objects: Any) -> None:
        """Hand over by name what a resume needs. Fill it from the newest good checkpoint, if there is one.

        Takes anything with ``state_dict`` and ``load_state_dict``: modules (wrapped or sharded as they are trained),
        optimizers, schedulers, scalers, metrics, stateful loaders. Tensors, lists and dictionaries are filled in place.
        Call it once, when all objects are made. Raises ConfigError, by name, for what cannot be saved.
        """
        if self._is_open:
            raise ConfigError(
                "run.resumable: called twice; hand over everything in one call. Several trainings, as the folds of a "
                "cross-validation, are several runs: toolkit sweep train.py args.fold=0,1,2"
            )
        if not objects:
            raise ConfigError("run.resumable: nothing was handed over: run.resumable(model=model, optimizer=optimizer)")
        self._calls.meet(f"called run.resumable({', '.join(sorted(objects))})")
        self._script_seed = torch.initial_seed()
        self._state = UserState(objects, self.rank, self.world_size, self.device)
        self._accumulation = self._state.accumulation
        self._checkpoints = Checkpoints(self.config.checkpoint, self._session, self._state, {"kind": USER_LOOP})
        if self._open() is not None and self._session.is_main:
            log.info("filled from the checkpoint: %s; all else in the script begins anew", ", ".join(objects))
        # Report each pass as progress, because an evaluation makes no steps.
        models = [value for value in objects.values() if isinstance(value, nn.Module) and not is_metric(bare(value))]
        for layer in chain.from_iterable(map(layers, models)):
            if not isinstance(layer, torch.jit.ScriptModule):
                layer.register_forward_pre_hook(PassCounter(self._activity.note_progress))

    def save(self) -> None:
        """Request a save after this step. Every rank calls it in the same step, or the run ends with an error."""
        self._save_asked = True

    def log(self, **values: Tensor | float) -> None:
        """Log numbers by name, as their mean over ranks and steps since the last write.

        ``loss`` becomes ``train/loss``; other tags are given as ``run.log(**{"eval/accuracy": x})``. Values are written
        every ``train.log_every`` steps. A tensor of one element is read off the device then. Ranks may log different
        names, or nothing. What is logged outside of a step is written before the next epoch, or at the end.
        """
        numbers = {tag: number_of(tag, value) for tag, value in by_tag(values).items()}
        self._window.add(numbers)
        if self._trace is not None:
            self._latest |= numbers
        self._activity.note_progress()
        if not self._in_step:
            # One rank may log alone here. The write is a collective, so it waits for a place that all come to.
            self._require_open("run.log")
            self._has_logged = True

    # ------------------------------------------------------------------------------------------------------- the loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield 0, 1, ... below ``count``: the epochs of this call that are still to be made; see :meth:`steps`.

        A script may call it several times, one phase after the other. After a resume the phases that were over yield
        nothing. What stands between two phases is executed again.
        """
        self._require_open("run.epochs")
        phase, self._phases = self._phases, self._phases + 1
        if phase < self._phase:
            return
        self._count_step()  # of an earlier loop that was left by a ``break``
        self._meet(f"called run.epochs({count})", "all ranks make as many epochs")
        if phase > self._phase:
            # A checkpoint of this phase has its first epoch, so that a resume counts from there, too.
            self._at = LoopPosition(self._at.epoch + self._at.is_begun)
            self._phase, self._first_epoch = phase, self._at.epoch
        self._epochs = self._first_epoch + count
        self._has_left = True
        try:
            while self._at.epoch < self._epochs and not self._is_done(self.config.train.max_steps):
                self._called = self._singles = 0
                # A resume within the epoch executes its beginning again, and must draw the same numbers there.
                reseed(self._script_seed, -1 - self._at.epoch, 0)
                yield self._at.epoch - self._first_epoch
                self._count_step()
                self._meet(f"ended epoch {self._at.epoch}", "all ranks leave an epoch by `break` at the same step")
                self._at = LoopPosition(self._at.epoch + 1)
            self._has_left = False
        finally:
            self._epochs, self._called, self._last = None, 0, None

    def steps(self, loader: Iterable[Any] | Loader, *, total: int | None = None) -> Steps:
        """Return the batches of the steps still to be made.

        They end after ``total`` steps of the run or at the epoch's end.

        ``loader``: one of :meth:`loader`, a DataLoader, or any iterable that can be begun anew for each epoch. Between
        two steps the run is saved where that is due, and stops where all ranks agree to. ``train.max_steps`` ends it
        too. An epoch may have several of them one after the other: after a resume those that were over give nothing.
        Raises ConfigError for one within a step of another.
        """
        self._require_open("run.steps")
        end = _least(total, self.config.train.max_steps)
        caller = sys._getframe(1)
        where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        if total is not None and self._epochs is not None:
            raise ConfigError(
                f"{where}: run.steps: total={total} counts steps of the whole run, over as many epochs as they need: "
                "leave it out within run.epochs, and set train.max_steps to end the run earlier"
            )

        def length() -> int | None:
            return end if total is not None else self._feed(loader).batches_in(self._number)

        def number() -> int:
            return self.step if total is not None else self._at.batch

        return Steps(self._steps(loader, total, end, where), length, number)

    def _steps(self, loader: Any, total: int | None, end: int | None, where: str) -> Iterator[Any]:
        if total is None and self._epochs is None:
            raise ConfigError(
                "run.steps: say how many: run.steps(loader, total=10_000), or `for epoch in run.epochs(3):` around it"
            )
        self._refuse_singles(where)
        self._count_step()  # of an earlier loop that was left by a ``break``
        if not self._enter(loader, by_epochs=total is None):
            return
        self._turn, self._turn_from = self._turn + 1, self.step
        feed = self._feed(loader)
        self._total = end
        if self._epochs is not None:
            # The last epoch's end is known in advance only where all lengths are, and the epoch has no other loop.
            epochs = range(self._at.epoch, self._epochs)
            lengths = [feed.batches_in(self._number + epoch - self._at.epoch) for epoch in epochs]
            known = [length for length in lengths if length is not None]
            if len(known) == len(lengths) and not self._at.place:
                self._total = _least(end, self.step - self._at.batch + sum(known))
            of = "" if lengths[0] is None else f" of {lengths[0]} batches"
            self._meet(f"begun epoch {self._at.epoch}{of}", _SAME_LENGTH)
        else:
            self._meet("called run.steps()")
        self._buckets.arrange()
        # A loop that had ended before the step of a resume says nothing about that step's data.
        if isinstance(loader, Loader) and loader is not self._loader and (end is None or self.step <= end):
            self._loader = loader
            self._checkpoints.use(loader)
        # The boundary before the first step; a run that resumes at its end has none.
        if not self._is_done(end):
            self._boundary()
        self._has_left = True
        while not self._is_done(end):
            before = self.step
            yield from self._epoch_steps(feed, end, where)
            if total is None:
                # Without a length the last step is not known before.
                self._has_logged |= self._at.epoch + 1 == self._epochs and self._window.is_open
                # The ranks meet before the loop's own code, whose collectives would pair up with those of a step.
                what = f"come to the end of epoch {self._at.epoch}, of {self._at.batch} batches"
                self._meet(what, _SAME_LENGTH)
                break
            # The loader is at its end: begin the next epoch, unless it gave no batch at all.
            if not self._is_done(end):
                if self.step == before and not self._at.batch:
                    raise ConfigError(f"run.steps: the loader has no batch{advice_about(loader)}")
                self._at = LoopPosition(self._at.epoch + 1, self._at.place)
        self._has_left = total is None
        is_last_epoch = self._at.epoch + 1 == self._epochs or self._is_done(self.config.train.max_steps)
        if total is not None or is_last_epoch:
            self._save_the_end()

    def _enter(self, loader: Any, *, by_epochs: bool) -> bool:
        """Go to the place of a ``run.steps`` that begins. Return False for one that was over before the checkpoint.

        In an epoch each has a place. A loop with a ``total`` goes on where an earlier one left the same ``loader``.
        """
        if not by_epochs and self._phases <= self._phase:  # its phase of epochs comes after this
            return False
        if by_epochs or (loader is not self._last and self._last is not None):
            self._called += 1
        place = self._called - by_epochs
        self._last = loader
        if place > self._at.place:
            if by_epochs:
                self._at = LoopPosition(self._at.epoch, place, 0, self._at.earlier + self._at.batch)
            else:
                self._at = LoopPosition(self._at.epoch + self._at.is_begun, place)
        return place == self._at.place

    def _refuse_singles(self, where: str) -> None:
        """Raise ConfigError for a loop that begins anew for each batch: no step of it would come to its end here."""
        is_single = self._in_step and self.step == self._turn_from
        self._singles = self._singles + 1 if is_single else 0
        if self._singles == 3:
            raise ConfigError(
                f"{where}: run.steps was begun anew for each batch, as by next(iter(run.steps(...))), so nothing would "
                "be saved: go through it by one `for batch in run.steps(...):`"
            )

    @property
    def _number(self) -> int:
        """The number by which a feed knows this epoch's round: other places have other orders and random numbers."""
        return self._at.epoch + self._at.place * ROUNDS

    def _epoch_steps(self, feed: Feed, end: int | None, where: str) -> Iterator[Any]:
        turn = self._turn
        batches = feed.epoch(self._number, self._at.batch, self.step)
        if self._trace is not None:
            batches = self._traced(batches, feed)
        with closing(batches):  # type: ignore[type-var]
            for batch in self._steps_of(batches, lambda: self._is_done(end)):
                self._samples = feed.samples
                yield batch
                if turn != self._turn:
                    raise ConfigError(
                        f"{where}: within a step of this run.steps another one was begun, and its batches counted as "
                        "steps: make the inner loop a plain `for batch in loader:`"
                    )

    def _traced(self, batches: Iterator[Any], feed: Feed) -> Iterator[Any]:
        assert self._trace is not None
        assert self._state is not None
        while True:
            self._latest.clear()  # what was logged between two steps is none of the step's
            self._trace.begin(self.step, self._at.epoch)
            batch = next(batches, self)
            if batch is self:
                return
            self._trace.take_batch(self.step, batch, feed.indices(self.step))
            self._trace.take_start(self._state.rate())
            yield batch

    def finish(self) -> None:
        """End the run: save what is not saved yet, and hand over the result."""
        if self._stopped is not None:
            raise self._stopped  # the user's code has caught it
        self._require_open("toolkit.start")
        self._count_step()
        # A loop may be left at any step. Without a process group nothing can be written any more.
        self._has_logged |= self._window.is_open and (self.world_size == 1 or dist.is_initialized())
        self._meet("come to the end of the run")
        # A loop that was left by a `break` because of a stop is not over.
        if self._has_left and self._calls.meet("left its loop", has=self._session.gate.pending == STOP):
            self._stop()
        if not self.step:
            raise ConfigError("toolkit.start: the loop has made no step: is there a `for batch in run.steps(...)`?")
        self._save_the_end()
        result = self._mark_completed()
        self._stack.close()
        self._complete(result)

    # ------------------------------------------------------------------------------------------------- among the ranks

    def main_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0, then on all others.

        This is for a download into a shared folder, say. Where it raises on rank 0, the others raise ToolkitError.
        """
        return self._calls.main_first()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank. Values are tensors of one shape and type, or what JSON can hold."""
        self._activity.note_progress()
        self._calls.meet("called run.gather()")
        if isinstance(value, Tensor):
            return list(gather_rows(value.detach().to(self.device).contiguous()))
        return gather_json(value, self.device)

    def _feed(self, loader: Any) -> Feed:
        if isinstance(loader, Loader):
            return LoaderFeed(loader, self._seed)
        # A loader keeps its feed over the epochs: only in an attempt's first one is a position to be restored.
        feed = self._feeds.pop(id(loader), None)
        if feed is None:
            self._refuse_a_part(inner_of(loader))
            origins = None if self._state is None else self._state.origins
            if (warning := warning_about(loader)) and self._session.is_main and not self._has_warned:
                self._has_warned = True
                log.warning("run.steps: %s", warning)
            is_there = self._state is not None and self._state.has_filled(inner_of(loader))
            feed = IterableFeed(loader, self._seed, self.world_size, is_there=is_there, origins=origins)
        # Only the last ones: a script may make a loader for each epoch, and each has workers and a data set.
        self._feeds = {**dict([*self._feeds.items()][-MAX_FEEDS:]), id(loader): feed}
        return feed

    def _refuse_a_part(self, loader: Any) -> None:
        """Raise ConfigError where a part that has the position was handed over without the loader."""
        owners = {name: part for name in PARTS if (part := getattr(loader, name, None)) is not None}
        if isinstance(owners.get("dataset"), Sized):  # one with an index, whose state is something else
            del owners["dataset"]
        held = [name for name, part in owners.items() if self._state is not None and self._state.has(part)]
        if held and self._state is not None and not self._state.has(loader):
            raise ConfigError(
                f"run.resumable: the {held[0]} of the loader in run.steps was handed over: run.steps keeps its "
                "position, and a resume would move it on twice; leave it out, or hand over a loader with a state "
                "(torchdata's StatefulDataLoader)"
            )

    def _is_done(self, end: int | None) -> bool:
        return end is not None and self.step >= end


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


class Steps:
    """Batches, to be gone through once, one for each step::

    >>> def epoch(run: toolkit.TrainingRun, loader: torch.utils.data.DataLoader) -> None:
    ...     for number, batch in run.steps(loader).enumerate():  # goes on after a resume within the epoch
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

        After a resume the numbers go on, where Python's ``enumerate`` would begin at 0 again.
        """
        for batch in self._batches:
            number = start + self._number()
            yield number, batch
            del batch  # else it would stay in memory until the end
            yield from enumerate(self._batches, number + 1)  # C code: no call of ours in a step
