"""A user's own training loop: `TrainingRun`. It stops, saves and resumes as the Trainer's does.

A checkpoint holds the state right after a step. A run that resumes from the last step of an epoch does again what the
loop does between two epochs (an evaluation, a scheduler's step).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit import hang
from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.reader import Loaded
from toolkit.config import JobConfig, filled
from toolkit.data.loader import BatchedSamples, Loader, Samples
from toolkit.data.randomness import reseed
from toolkit.ranks.agreement import STOP
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import gather_by_name, gather_rows
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.train.ddp_buckets import DdpBuckets
from toolkit.train.feed import ROUNDS, Feed, Feeds, StepBatches, advice_about, seeder
from toolkit.train.handed_over import Accumulation, PassCounter, bare, is_metric, wrapper_chain
from toolkit.train.loop import NOT_FINITE, LoopEngine, hparams_of_script, log_script_config
from toolkit.train.loss_windows import LossWindow, gather_json, number_of, with_prefix
from toolkit.train.not_finite import NotFinite
from toolkit.train.run_checkpoints import USER_LOOP, Checkpoints
from toolkit.train.same_calls import SameCalls
from toolkit.train.user_state import UserState

log = logs.get(__name__)

Kind = TypeVar("Kind")

_SAME_LENGTH = (
    "each rank needs as many batches as the others: use run.loader, or a DistributedSampler with one batch size for "
    "all ranks, or give run.steps a total="
)


@dataclass
class LoopPosition:
    """A position in the data of a loop: an epoch, a ``run.steps`` in it, and the batches of that one."""

    epoch: int = 0
    place: int = 0  #: the number of the ``run.steps`` in the epoch; of loops with a ``total`` the number of the loader
    batch: int = 0
    earlier: int = 0  #: batches of the epoch's earlier places

    @property
    def is_begun(self) -> bool:
        """True if a step of the epoch has been made."""
        return bool(self.batch or self.earlier)


class TrainingRun(LoopEngine):
    """One rank's side of a run with the user's own loop. Every rank makes the same calls in the same order::

    >>> def prepared(run: toolkit.TrainingRun) -> float:
    ...     with run.main_first():  # rank 0 downloads, the others find it there
    ...         numbers = fetch(run.dir)
    ...     return sum(run.gather(numbers[run.rank :: run.world_size].mean())) / run.world_size
    """

    _state: UserState | None = None  #: what was handed over, once it is filled: only then can steps be made

    def __init__(self, config: JobConfig, session: Session) -> None:
        super().__init__(config.train, session)
        self.config = config  #: the whole config, resolved
        self.rank = session.rank  #: this rank, from 0
        self.world_size = session.world_size  #: the number of ranks
        self.local_rank = session.local_rank  #: this rank's number on its node
        self.device = session.device  #: this rank's GPU, which is the current one, or the CPU
        self.dir = session.run_dir  #: the run's folder, which all ranks share
        by_rank, gather = partial(gather_by_name, device=self.device), partial(gather_json, device=self.device)
        self._window = LossWindow(self.rank, self.world_size, by_rank, gather)
        self._buckets = DdpBuckets()
        self._stack.callback(self._buckets.close)
        self._calls = SameCalls(session, lambda: 2 * self.step + self._in_step)
        self._stack.callback(self._calls.close)
        self._seed = seeder(config.train.seed, self.rank)
        self._script_seed = 0  #: the script's own, of which an epoch's beginning draws: equal ranks stay equal there
        self._loader: Loader | None = None
        self._feeds = Feeds(self._seed, session)
        self._accumulation = Accumulation(())
        self._at = LoopPosition()
        self._epochs: int | None = None  #: the epoch at which the phase in progress ends; None outside of one
        self._phases = 0  #: calls of :meth:`epochs` in this attempt
        self._phase, self._first_epoch = -1, 0  #: the last one that has begun in this run, and its first epoch
        self._called = 0  #: calls of :meth:`steps` in this attempt, of the epoch if there is one
        self._last: object = None  #: the loader of the last one
        self._turn = self._turn_from = 0  #: the number of the last one, and the step at which it began
        self._singles = 0  #: how many of the last ones were left after one batch
        self._has_left = False  #: the loop was begun and has not come to its end
        self._is_checked = False  #: that all can be saved, after an attempt's first step
        self._save_asked = False  #: by the loop
        self._has_logged = False  #: outside of a step, since the last write
        self._latest: dict[str, Tensor | float] = {}  #: what a traced step has logged last, by tag

    @property
    def batch_index(self) -> int:
        """Return the number of the step in progress within its epoch, from 0; also after a resume."""
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
        if self._state is not None:
            raise ConfigError(
                "run.resumable: called twice; hand over everything in one call. Several trainings, as the folds of a "
                "cross-validation, are several runs: toolkit sweep train.py args.fold=0,1,2"
            )
        if not objects:
            raise ConfigError("run.resumable: nothing was handed over: run.resumable(model=model, optimizer=optimizer)")
        self._calls.monitored_barrier(f"called run.resumable({', '.join(sorted(objects))})")
        self._script_seed = torch.initial_seed()
        state = UserState(objects, self.rank, self.world_size, self.device)
        self._accumulation = state.accumulation
        self._checkpoints = Checkpoints(self.config.checkpoint, self._session, state, {"kind": USER_LOOP})
        self._saver = self._checkpoints.saver
        if self._open() is not None and self._session.is_main:
            log.info("filled from the checkpoint: %s; everything else in the script starts anew", ", ".join(objects))
        self._state = state
        # Report each pass as progress, because an evaluation makes no steps.
        models = [value for value in objects.values() if isinstance(value, nn.Module) and not is_metric(bare(value))]
        for layer in chain.from_iterable(map(wrapper_chain, models)):
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
        numbers = {tag: number_of(tag, value) for tag, value in with_prefix(values).items()}
        self._window.add(numbers)
        if self._trace is not None:
            self._latest |= numbers
        self._activity.note_progress()
        if not self._in_step:
            # One rank may log alone here. The write is a collective, so it waits for a place that all come to.
            self._require_open("run.log")
            self._has_logged = True

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

    def steps(self, loader: Iterable[Any] | Loader, *, total: int | None = None) -> StepBatches:
        """Return the batches of the steps still to be made: up to ``total`` steps of the run, or to the epoch's end.

        ``loader``: one of :meth:`loader`, a DataLoader, or any iterable that can be begun anew for each epoch. Between
        two steps the run is saved where that is due, and stops where all ranks agree to. ``train.max_steps`` ends it
        too. An epoch may have several of them one after the other: after a resume those that were over give nothing.
        Raises ConfigError for one within a step of another.
        """
        self._require_open("run.steps")
        end = _least(total, self.config.train.max_steps)
        caller = sys._getframe(1)
        where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        if total is not None:
            if self._epochs is not None:
                raise ConfigError(
                    f"{where}: run.steps: total={total} counts steps of the whole run, over as many epochs as they "
                    "need: leave it out within run.epochs, and set train.max_steps to end the run earlier"
                )
            return StepBatches(self._steps(loader, total, end, where), lambda: end, lambda: self.step)
        return StepBatches(
            self._steps(loader, total, end, where),
            lambda: self._feed(loader).batches_in(self._number),
            lambda: self._at.batch,
        )

    def _steps(self, loader: Any, total: int | None, end: int | None, where: str) -> Iterator[Any]:
        if total is None and self._epochs is None:
            raise ConfigError(
                "run.steps: say how many: run.steps(loader, total=10_000), or `for epoch in run.epochs(3):` around it"
            )
        # A loop that begins anew for each batch: no step of it would come to its end here.
        is_single = self._in_step and self.step == self._turn_from
        self._singles = self._singles + 1 if is_single else 0
        if self._singles == 3:
            raise ConfigError(
                f"{where}: run.steps was started again for each batch, as by next(iter(run.steps(...))), so nothing "
                "would be saved: go through it by one `for batch in run.steps(...):`"
            )
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

        In an epoch each has a place. A loop with a ``total`` continues where an earlier one left the same ``loader``.
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
            self._latest.clear()  # what was logged between two steps
            self._trace.begin(self.step, self._at.epoch)
            if (batch := next(batches, self)) is self:
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
        if self._has_left and self._calls.monitored_barrier("left its loop", has=self._session.gate.pending == STOP):
            self._stop()
        if not self.step:
            raise ConfigError("toolkit.start: the loop has made no step: is there a `for batch in run.steps(...)`?")
        self._save_the_end()
        result = self._mark_completed()
        self._stack.close()
        self._complete(result)

    def main_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0, then on all others. Where it raises on rank 0, the others raise ToolkitError."""
        return self._calls.main_first()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank. Values are tensors of one shape and type, or what JSON can hold."""
        self._activity.note_progress()
        self._calls.monitored_barrier("called run.gather()")
        if isinstance(value, Tensor):
            return list(gather_rows(value.detach().to(self.device).contiguous()))
        return gather_json(value, self.device)

    def _feed(self, loader: Any) -> Feed:
        return self._feeds.of(loader, self._state)

    def _is_done(self, end: int | None) -> bool:
        return end is not None and self.step >= end

    # ------------------------------------------------------------------------------------------------ for the engine

    def _open(self) -> Loaded | None:
        """Fill the state from the newest good checkpoint, if any, and begin the attempt there."""
        self._not_finite = NotFinite(self.config.train, self._session)
        loaded = self._resume(partial(log_script_config, self.config, self._session.run_dir))
        if self.config.checkpoint.keep_best is not None:
            log.warning("checkpoint.keep_best is for jobs with an evaluate(): the newest checkpoints are kept")
        return loaded

    def _mark_completed(self) -> dict[str, Any]:
        """Mark the run as completed in TensorBoard, where it has hyper-parameters to show. Return its result."""
        if hparams_of_script(self.config, self._session.run_dir):
            self._sink.completed(self.step)
        return {"step": self.step, "epoch": self._at.epoch, "samples": None, "metrics": dict(self._metrics)}

    def _count_step(self) -> None:
        """Count the step in progress, if there is one. A step that was left by a ``break`` counts too.

        What is due after that one is done after the next step: a resume repeats what comes between two epochs.
        """
        if self._in_step:
            self._at.batch += 1
            self._accumulation.end_step()
            if self._trace is not None and self._state is not None:
                loss = torch.as_tensor(self._latest.get("train/loss", 0.0)) / self.world_size
                self._trace.take_end(loss, self._state.live_state(), self._latest, self._state.value_digests())
        super()._count_step()

    def _after_step(self) -> bool:
        if self._accumulation.is_open:
            return False
        # The first save may be due after half an hour: check now what it needs.
        if not self._is_checked and self._state is not None:
            self._is_checked = True
            self._state.check()
        if self._save_asked and not self._save_due:
            self._calls.monitored_barrier("called run.save()")
        self._save_due, self._save_asked = self._save_due or self._save_asked, False
        if self._save_due:
            self._accumulation.warn_of_idle(self.step)
        return True

    def _meet(self, what: str, advice: str = "") -> None:
        """Wait for all ranks to have done ``what``. Write what any of them has logged outside of a step."""
        if self._calls.monitored_barrier(what, has=self._has_logged, advice=advice):
            self._has_logged = False
            self._write()

    def _write(self) -> None:
        # The loop may be in a step or between two: the phase before comes back at the end.
        phase, self._activity.phase = self._activity.phase, hang.LOGGING
        means, _ = self._window.take()
        self._metrics |= means
        self._write_figures(means | self._figures())
        # Last: what ends the run must not keep its figures from the files.
        judged = self._judged(means)
        if NOT_FINITE in judged:
            self._sink.scalars(self.step, {NOT_FINITE: judged[NOT_FINITE]})
        self._activity.phase = phase

    def _save_the_end(self) -> None:
        """Save after the last step, unless that is done. Nothing comes after this save, so it must be made."""
        self._saver.await_save(self.step)
        if self._saver.newest != self.step and not self._save(must=True):
            self._not_finite.raise_error(self.step)

    def _may_save(self, *, must: bool) -> bool:
        assert self._state is not None
        return self._not_finite.may_save(self.step, self._state)

    def _saved_with(self) -> dict[str, Json]:
        here = {name: float(value) for name, value in vars(self._at).items()}
        rows = torch.stack([*gather_by_name(here, self.device).values()], dim=1).long().tolist()
        # The epochs of `run.steps(loader, total=n)` may end at other steps on other ranks.
        by_rank: dict[str, Json] = {"positions": rows} if rows.count(rows[0]) < len(rows) else {}
        return {**super()._saved_with(), **self._position(), **by_rank}

    def _position(self) -> dict[str, Json]:
        return {
            "position": list(astuple(self._at)),
            "ddp_orders": self._buckets.orders(),
            "phase": self._phase,
            "first_epoch": self._first_epoch,
        }

    def _restore(self, meta: Mapping[str, Any]) -> None:
        super()._restore(meta)
        self._buckets.take(meta)
        self._at = LoopPosition(*meta["position"])
        self._phase, self._first_epoch = meta["phase"], meta["first_epoch"]
        positions = meta.get("positions", [])
        if len(positions) == self.world_size:
            self._at = LoopPosition(*positions[self.rank])
        elif positions and self._session.is_main:
            log.warning(
                "the ranks of this checkpoint were at different places of their loaders, %s by epoch, place and batch; "
                "on another number of ranks all continue from the first one's",
                positions,
            )

    def _progress(self) -> dict[str, Any]:
        return {} if self._epochs is None else {"epoch": self._at.epoch, "epochs": self._epochs}

    def _require_open(self, caller: str) -> None:
        if self._state is None:
            raise ConfigError(
                f"{caller}: nothing would be saved yet: call run.resumable(model=model, optimizer=optimizer) before"
            )


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
