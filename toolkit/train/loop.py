"""The training loop: the engine of every loop, and the loop of jobs.

The engine counts steps, saves, stops where all ranks have agreed to, logs and reports progress. :class:`Trainer` runs
on it, and so do users' own loops (:mod:`toolkit.train.user_loop`). All ranks make the same calls in the same order.

The state of a job's loop is the step number: batches and learning rate are functions of it. There are two exceptions. A
loader of streams has a position of its own, for which the checkpoints ask it. Shares that follow the ranks' speeds are
saved with the step.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from toolkit import hang, registry
from toolkit.base import logs
from toolkit.base.errors import StoppedError
from toolkit.checkpoint.reader import Loaded
from toolkit.config import JobConfig, TrainConfig, all_keys, dump_config, leaves, value_of
from toolkit.config.learning_rate import Schedule, rate_change, rates_at, total_steps
from toolkit.data.loader import Batches
from toolkit.data.randomness import reseed
from toolkit.devices import accelerator
from toolkit.files.run_files import STOPPED_PHASE, SweepPoint
from toolkit.metrics.goodput import TimeBreakdown
from toolkit.metrics.meters import Throughput
from toolkit.metrics.sinks import Sink, build_sinks
from toolkit.nodes.agent import preimports
from toolkit.ranks import nested
from toolkit.ranks.agreement import STOP
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.run.records import user_requests
from toolkit.strategies.protocol import Strategy
from toolkit.train import rank_components
from toolkit.train.evaluate import Evaluate, Evaluations, Hooks
from toolkit.train.loss_windows import LOSS, LossWindow
from toolkit.train.not_finite import JobNotFinite, NotFinite, SkippedSteps
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import SAVE, Saver

log = logs.get(__name__)

#: Tag for the number of logging steps whose mean loss was not finite; logged only when there were some.
NOT_FINITE = "train/not_finite"


class LoopEngine:
    """Makes the steps of one attempt, and does what is due between two of them. A loop derives from it."""

    # What a loop sets before :meth:`_resume`.
    _checkpoints: Checkpoints
    _saver: Saver  #: that of the checkpoints
    _window: LossWindow
    _not_finite: NotFinite

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self._session, self._activity = session, session.activity
        self._train_config = config
        self.step = 0  #: steps done, of the whole run; within a step its number, from 0
        self._total: int | None = None  #: the step at which the run ends, where that is known
        self._metrics: dict[str, float] = {}  #: the last figure of each metric
        self._breakdown = TimeBreakdown()
        self._sink = Sink()
        self._on_request = rank_components.profile_requests(session)
        self._trace = rank_components.step_digests(session)
        self._stack = ExitStack()  #: closed at the loop's end
        self._saved = 0  #: the step of the last save, which may still be in progress, or have failed
        self._in_step = False
        self._samples, self._wait_s = 0, 0.0  #: of the step in progress: samples of all ranks, wait for the batch
        self._log_due = self._save_due = False
        self._figured = -1  #: the step that has its :meth:`_figures` already
        self._stopped: StoppedError | None = None

    # ------------------------------------------------------------------------------------------ what a loop provides

    def _after_step(self) -> bool:
        """Do what else is due after a step. Return False where no save or stop may come now."""
        raise NotImplementedError

    def _write(self) -> None:
        """Log the means since the last logging step."""
        raise NotImplementedError

    def _may_save(self, *, must: bool) -> bool:
        """Return False where the state is not worth saving. ``must``: nothing comes after this save."""
        raise NotImplementedError

    def _saved_with(self) -> dict[str, Json]:
        """Return what the loop wants to find in ``Loaded.meta`` at a resume. Called on every rank; rank 0's is kept."""
        return {"log": self._window.state(), **self._not_finite.state()}

    def _restore(self, meta: Mapping[str, Any]) -> None:
        """Take over what :meth:`_saved_with` has left in a checkpoint."""
        self._figured = self.step  # nothing was measured yet
        if "log" in meta:  # a library's loop keeps no means, and older checkpoints have others
            self._window.restore(meta["log"])
            self._not_finite.restore(meta)

    def _progress(self) -> dict[str, Any]:
        """Return what `toolkit status` is to show besides the step, the speed and the metrics."""
        return {}

    # ------------------------------------------------------------------------------------------------ begin and end

    def _resume(self, describe: Callable[[Sink], None]) -> Loaded | None:
        """Fill the state from the newest good checkpoint, and begin the attempt there.

        A fresh start is described in the metrics' files instead, and None is returned.
        """
        session = self._session
        session.start_up.end("data")
        loaded = self._checkpoints.resume()
        if loaded is not None:
            self.step = self._saved = loaded.step
            metrics: Any = loaded.meta["metrics"]
            self._metrics = dict(metrics)
            self._restore(loaded.meta)
        session.progress(step_start=self.step)
        # The metrics' files are opened after the resume: they drop what was logged after its step.
        self._sink = build_sinks(session.run_dir, session.is_main, None if loaded is None else loaded.step)
        for opened in (self._checkpoints, self._sink, self._on_request):
            self._stack.callback(opened.close)
        if loaded is None:
            describe(self._sink)
        self._begin()
        return loaded

    def _begin(self) -> None:
        """Begin to measure where the time goes. The time before is start-up."""
        self._throughput = Throughput(window=self._train_config.log_every)
        self._history = rank_components.attempt_history(self._session, self.step, self._breakdown)
        self._breakdown.begin()
        self._session.start_up.end("resume")
        self._session.progress(spent=self._breakdown.spent, start_up=self._session.start_up.parts)

    def _complete(self, result: Mapping[str, Any]) -> None:
        """Hand over the run's result: from now on the run is completed."""
        self._report("done")
        self._activity.phase = hang.FINISHING
        self._saver.wait_for_mirror()
        self._session.finish(result)

    def close(self) -> None:
        """Close the loaders and files. Nothing is saved: it may be called after an error."""
        self._stack.close()

    # ---------------------------------------------------------------------------------------------------- the steps

    def _steps_of(self, batches: Iterator[Any], is_done: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches, each for one step, until ``is_done``. After each step do what is due."""
        while not is_done():
            self._activity.phase = hang.WAITING_FOR_DATA
            began = time.perf_counter()
            batch = next(batches, self)  # ``self`` stands for the end: a batch may be anything, None too
            if batch is self:
                return
            self._wait_s = time.perf_counter() - began
            self._activity.phase = hang.IN_STEP
            self._in_step = True
            # The body of the loop runs here: it is the step.
            yield batch
            del batch  # else it would stay on the device during evaluations and saves
            self._end_step()

    def _end_step(self) -> None:
        """Count the step in progress, if there is one, and do what is due after it."""
        self._log_step()
        if self._after_step():
            self._save_or_copy()
            self._boundary()

    def _log_step(self) -> None:
        """Count the step in progress, if there is one, and log if that is due."""
        if self._in_step:
            self._count_step()
            # Log before saving: a rollback happens there, and a loss that is not finite is found.
            if self._log_due or self.step == self._total:
                self._log_due = False
                self._write()

    def _count_step(self) -> None:
        """Count the step in progress, if there is one."""
        if not self._in_step:
            return
        self._in_step = False
        self.step += 1
        if self._activity.step is None:
            self._session.start_up.end("first_step")
            self._session.progress(start_up=self._session.start_up.parts)
            self._session.tighten_timeouts()
            if self._session.is_main:  # the zygote of the next attempt imports these modules in advance
                preimports.record_imports(self._session.run_dir / preimports.NAME)
        self._activity.step = self.step
        self._throughput.update(self._samples, self._wait_s)
        self._breakdown.step_done(self._wait_s)
        self._session.progress(step=self.step)
        self._log_due |= self.step % self._train_config.log_every == 0
        self._save_due |= self._saver.is_due(self.step)

    # --------------------------------------------------------------------------------------------- between two steps

    def _boundary(self) -> None:
        """Stop, save or carry out a user's request where all ranks have agreed to. Called between two steps.

        Raises StoppedError with everything committed.
        """
        self._activity.phase = hang.AT_BOUNDARY
        if self._on_request.is_recording:
            self._on_request.pass_step(self.step)
        # Several requests may meet at one step: ask until the gate has none.
        while (kind := self._session.gate.boundary(self.step)) is not None:
            if kind == STOP:
                self._stop()
            if kind == SAVE and self.step == self._saved:
                self._saver.set_timer()  # else this would be the last save by time
            elif kind == SAVE:
                self._save(must=False)
            if kind.startswith(user_requests.KIND):
                self._on_request.carry_out(kind, self.step)
            self._activity.phase = hang.AT_BOUNDARY
        self._activity.phase = hang.OWN_CODE

    def _stop(self) -> NoReturn:
        """Commit, and raise StoppedError. All ranks call it at one step."""
        # A save in progress counts if it is of this step; one of an earlier step is given up for a new one.
        with self._breakdown.measure("checkpoint"):
            self._saver.await_save(self.step)
        is_kept = self.step == (self._saver.newest or 0)  # or at step 0, with nothing to save
        is_kept = is_kept or self._save(must=True)
        self._report(STOPPED_PHASE if is_kept else "train")
        where = f"step {self.step}" + (f" of {self._total}" if self._total is not None else "")
        self._stopped = StoppedError(f"stopped at {where}; {'' if is_kept else 'not '}committed")
        raise self._stopped

    def _save(self, *, must: bool) -> bool:
        """Save the state after the steps done. Return False where it is not worth saving.

        ``must``: nothing comes after this save. Other saves may only have begun, in the background, when this returns.
        """
        if not self._may_save(must=must):
            self._saver.leave_out()
            return False
        self._report("checkpoint")
        self._activity.phase = hang.SAVING
        with self._breakdown.measure("checkpoint"):
            self._sink.flush()  # before the save: what was logged up to a committed step must survive with it
            self._saver.save(self.step, self._reached(), must=must)
        self._saved = self.step
        self._report("train")
        self._throughput.pause()
        return True

    def _reached(self) -> dict[str, Json]:
        return {"metrics": dict(self._metrics), **self._saved_with()}

    def _save_or_copy(self) -> None:
        """Save the state if that is due. Else copy it into the nodes' memory if that is due."""
        if self._save_due:
            self._save_due = False
            self._save(must=self.step == self._total)
            return
        # A copy in memory is of no use at a step that is saved.
        copies, began_s = self._checkpoints.copies, time.monotonic()
        if copies is not None and copies.is_due(self.step) and self._may_save(must=False):
            self._activity.phase = hang.SAVING
            with self._breakdown.measure("checkpoint"):
                self._sink.flush()  # a restart from there logs nothing before it again
                copies.keep(self.step, self._reached(), began_s)

    def _figures(self) -> dict[str, float]:
        """Return the figures of every loop, once for each step: its speed, memory, attempts and where the time went."""
        if self._figured == self.step:
            return {}
        self._figured = self.step
        return {
            "train/samples_per_s": self._throughput.samples_per_s,
            "train/data_wait_fraction": self._throughput.data_wait_fraction,
            "train/memory_peak_gib": memory_peak_bytes(self._session.device) / (1 << 30),
            **(self._history.scalars(self.step) or {}),
        }

    def _judged(self, means: Mapping[str, float]) -> dict[str, float]:
        """Judge the mean loss. Return the means, with the number of mean losses that were not finite, if any."""
        if LOSS in means:
            self._not_finite.judge(self.step, means[LOSS], self._window.taken)
        if not self._not_finite.count:
            return dict(means)
        self._metrics[NOT_FINITE] = self._not_finite.count
        return {**means, NOT_FINITE: self._not_finite.count}

    def _write_figures(self, values: Mapping[str, float]) -> None:
        """Log ``values`` by tag at this step, and report it to `toolkit status`."""
        self._sink.scalars(self.step, values)
        if (table := self._history.take_table()) is not None:
            self._sink.text("run/restarts", table, self.step, markdown=True)
        self._report("train")

    def _report(self, phase: str) -> None:
        """Report the loop's progress to the supervisor, or to the run's files."""
        progress: dict[str, Any] = {
            "phase": phase,
            "step": self.step,
            "loss": self._metrics.get("train/loss"),
            "samples_per_s": self._throughput.samples_per_s,
            "data_wait_fraction": self._throughput.data_wait_fraction,
            "step_saved": self._saver.newest,
            "save_s": round(self._saver.save_s, 3),
            "save_error": self._saver.failure,
            "metrics": dict(self._metrics),
            **self._progress(),
        }
        if self._total is not None:  # a user's loop may not know its end
            progress["total_steps"] = self._total
            progress["eta_s"] = self._throughput.eta_s(self._total - self.step)
        self._session.progress(**progress)


#: Called once in a run's life, at its fresh start.
Describe: TypeAlias = Callable[[Sink], None]
#: Called after each evaluation with the step, on every rank, to log what TensorBoard is to get besides the figures.
Show: TypeAlias = Callable[[Sink, int], None]


@dataclass(frozen=True)
class Result:
    """The end of a training: steps, whole epochs and samples done, and the last metrics."""

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]


class Trainer(LoopEngine):
    """Trains from the run's newest checkpoint to the last step. Every rank runs one, in lock step."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        strategy: Strategy,
        loader: Batches,
        *,
        schedule: Callable[[int], Schedule],
        checkpoints: Checkpoints,
        rate_keys: Mapping[str, Any] | None = None,
    ) -> None:
        """``schedule(total_steps)`` gives the learning rate as a function of the step.

        ``rate_keys`` are the values of the config that the rate follows from.
        """
        super().__init__(config, session)
        if loader.is_partitioned:
            strategy.prepare_split_data()
        self._strategy = strategy
        self._loader = loader
        self._checkpoints, self._saver = checkpoints, checkpoints.saver
        checkpoints.include(loader)  # also refuses ranks with different data sets, before the first step
        self._samples = loader.global_batch_size
        self._total: int = total_steps(config, loader.dataset_size, loader.global_batch_size)
        self._lr, self._rate_keys = schedule(self._total), rate_keys or {}
        ranks = session.world_size
        self._window = LossWindow(session.rank, ranks, strategy.by_rank, strategy.gather, are_parts=True)
        self._stragglers = rank_components.straggler_detector(session)
        self._balance = rank_components.share_balance(loader, strategy, ranks, config.accumulate)
        self._bad_samples = rank_components.bad_sample_list(loader, session)
        self._skipped = SkippedSteps(config, session, loader)
        self._not_finite = JobNotFinite(config, session, strategy, loader, checkpoints.roll_back)

    def fit(
        self,
        evaluate: Evaluate | None,
        describe: Describe = lambda sink: None,
        show: Show = lambda sink, step: None,
        hooks: Hooks | None = None,
    ) -> Result:
        """Train to the last step, with evaluations, checkpoints and metrics. The session gets the result.

        A run whose checkpoint is at the last step already is evaluated once, if it was not yet, and is then done.
        Raises StoppedError, with everything committed, when the ranks have agreed to stop.
        """
        self._show, self._hooks = show, hooks or Hooks()
        seed = self._train_config.seed
        self._evaluations = Evaluations(self._session, self._strategy, self._breakdown, evaluate, self._hooks, seed)
        with self._stack:
            loaded = self._resume(describe)
            log.info("training from step %d to %d", self.step, self._total)
            self._strategy.begin(self.step)
            # Make up for an evaluation that was due at the checkpoint, if a stop cut it short.
            if self.step and self._evaluation_owed():
                if self._evaluate():
                    self._keep_best()
                self._end_epoch()
            self._throughput.reset()
            self._boundary()
            if loaded is not None:
                self._log_rate_change(loaded.meta["learning_rate"])
            # After each body, LoopEngine ends the step: it saves, evaluates, reports and stops.
            for batch in self._steps_of(self._batches(), lambda: self.step >= self._total):
                self._train_step(batch)
                del batch
            self._sink.completed(self.step)
        # The metrics' files and the checkpoints are closed: the result comes last, and marks the run as completed.
        result = Result(self.step, self._epochs(self.step), self.step * self._samples, dict(self._metrics))
        self._complete(asdict(result))
        return result

    def _batches(self) -> Iterator[Batch | None]:
        begun: int | None = None  # the epoch last announced to the job
        while True:
            if begun != (epoch := self._epochs(self.step)):
                self._activity.phase = hang.OWN_CODE
                self._hooks.on_epoch_start(epoch)
                self._activity.phase, begun = hang.WAITING_FOR_DATA, epoch
            if self._trace is not None:
                self._trace.begin(self.step, epoch)
            # The own time includes the fetch of the batch, so that a slow loader shows.
            self._strategy.local_stopwatch.start()
            reseed(self._train_config.seed, self.step, self._strategy.share.index)
            yield self._loader.at(self.step)

    def _train_step(self, batch: Batch | None) -> None:
        n = self.step
        self._wait_s = self._loader.data_wait_s
        if self._bad_samples is not None:
            self._bad_samples.note(batch)
        if self._trace is not None:
            self._trace.take_batch(n, batch, self._loader.sample_indices(n))
            self._trace.take_start(self._lr(n))
        output = self._strategy.step(batch, self._lr(n))
        if self._trace is not None:
            self._trace.take_end(output.loss, self._strategy.live_state())
        # Nothing is read from the device here: the verdict and the losses wait for the next logging step.
        self._skipped.note(n, output.skipped)
        self._window.add({f"train/{name}": loss for name, loss in output.zeroed_if_skipped().items()})

    def _after_step(self) -> bool:
        is_best = self._evaluation_due() and self._evaluate()
        self._end_epoch()
        self._save_due |= is_best or self.step == self._total
        return True

    def _epochs(self, step: int) -> int:
        """Return the whole epochs in ``step`` steps."""
        return step * self._samples // self._loader.dataset_size

    def _is_epochs_end(self) -> bool:
        return self._epochs(self.step) > self._epochs(self.step - 1)

    def _end_epoch(self) -> None:
        """Tell the job of an epoch's end, if the last step was one. After an evaluation cut short, a resume does so."""
        if self._is_epochs_end() and not self._evaluation_owed():
            self._hooks.on_epoch_end(self._epochs(self.step) - 1, self._metrics)

    def _evaluation_due(self) -> bool:
        every = self._train_config.eval_every  # a number of steps, or ``epoch``
        is_turn = self.step % every == 0 if isinstance(every, int) else self._is_epochs_end()
        return self._evaluations.are_made and (is_turn or self.step == self._total)

    def _evaluation_owed(self) -> bool:
        """True if this step's evaluation is due and not complete. Then a stop has cut it short."""
        return self._evaluation_due() and self._evaluations.newest != self.step

    def _write(self) -> None:
        # First the verdicts: steps that were left out must not count in the means below.
        self._activity.phase = hang.LOGGING
        self._window.leave_out(self._skipped.collect())
        if self._skipped.rollback_due:
            self._roll_back()
        means, own_s = self._window.take(self._strategy.local_stopwatch.take())
        values: dict[str, float] = {
            "train/lr": self._lr(self.step - 1),
            **self._figures(),
            **self._hooks.speed(self._throughput.samples_per_s),
            **(self._stragglers.compare(own_s) or {}),
            **(self._balance.update(self.step, own_s) if self._balance is not None else {}),
            **self._skipped.figures(),
        }
        if self._bad_samples is not None:
            values |= self._bad_samples.figures(self.step * self._samples)
        for tag, figure in self._strategy.step_metrics().items():
            if isinstance(figure, Tensor):
                self._sink.histogram(self.step, tag, figure)
            else:
                values[tag] = figure
        # There is no mean where each step since the last logging step was left out.
        if LOSS in means:
            self._metrics[LOSS] = means[LOSS]
        self._metrics |= self._skipped.figures()
        self._write_figures(values | self._judged(means))

    def _log_rate_change(self, saved: Any) -> None:
        """Log how the rate continues, if not as with the config of the checkpoint."""
        rate, run_id = self._lr(self.step), self._session.run_dir.name
        change = rate_change(saved, self.step, rate, self._total, self._rate_keys, run_id)
        if change is not None and self._session.is_main:
            log.log(INFO if change.is_asked else WARNING, "%s", change.text)

    def _roll_back(self) -> None:
        """Load the weights of a checkpoint, on all ranks alike. The step, the data and the learning rate stay."""
        self._activity.phase = hang.LOADING
        with self._breakdown.measure("checkpoint"):
            to = self._checkpoints.roll_back(self.step, self._skipped.first_in_row)
        self._skipped.rolled_back(self.step, to)
        self._activity.phase = hang.LOGGING

    def _evaluate(self) -> bool:
        """Evaluate, and log the figures. Return True if the model has never been as good."""
        self._report("evaluate")
        with self._breakdown.measure("evaluation"), self._saver.timer.deferred():
            figures = self._evaluations.evaluate(self.step)
        if figures is None:
            return False
        self._metrics |= figures
        self._sink.scalars(self.step, figures)
        self._show(self._sink, self.step)
        self._end_if_done()
        self._report("train")
        self._throughput.pause()
        return self._saver.is_best(self._metrics)

    def _end_if_done(self) -> None:
        if self.step < self._total and self._evaluations.are_enough():
            log.info("step %d of %d: the job says that it is done", self.step, self._total)
            self._total = self.step

    def _may_save(self, *, must: bool) -> bool:
        self._window.leave_out(self._skipped.collect())
        if self._skipped.saves_wait and not must:
            log.info("step %d is not saved: the steps before it were left out", self.step)
            return False
        if self._not_finite.may_save(self.step, self._strategy):
            return True
        if self.step == self._total:
            self._not_finite.raise_error(self.step)
        return False

    def _saved_with(self) -> dict[str, Json]:
        kept: dict[str, Json] = {
            **super()._saved_with(),
            **self._evaluations.state(),
            "skipped_steps": self._skipped.state(),
            "shares": None if self._balance is None else self._balance.state(),
            "learning_rate": rates_at(self._lr, self.step, self._rate_keys, self._loader.dataset_size),
        }
        if self._bad_samples is not None:
            self._bad_samples.collect()  # after the window's collective: rank 0 has all reports up to this step
        return kept

    def _restore(self, meta: Mapping[str, Any]) -> None:
        super()._restore(meta)
        self._evaluations.restore(meta, self.step)
        if self._evaluations.newest is not None:
            self._end_if_done()
        if self._balance is not None:
            self._balance.restore(meta.get("shares"))
        self._skipped.restore(meta["skipped_steps"])

    def _keep_best(self) -> None:
        """Keep the state that an evaluation after a resume has found to be the best."""
        if self._saver.newest == self.step:
            self._saver.note_evaluation(self.step, self._reached())
        else:  # it was loaded from memory
            self._save(must=False)

    def _progress(self) -> dict[str, Any]:
        return {
            "epoch": self._epochs(self.step),
            "epochs": self._train_config.epochs,
            "stragglers": self._stragglers.stragglers() or [],
        }


def memory_peak_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has used: torch's on its GPU, else the host's."""
    on_device = None if device.type == "cpu" else accelerator.memory_peak_bytes(device)
    if on_device is not None:
        return on_device
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_IMAGES = 16
#: Keys by which runs are not compared. TensorBoard shows only the first columns without scrolling.
_LEFT_OUT = (
    *("data.augment", "data.bad_samples", "data.max_bad_samples", "data.balance", "data.partition", "data.workers"),
    *("strategy.activation_checkpointing", "strategy.compression", "strategy.pipeline.split", "strategy.tensor_plan"),
    *("train.channels_last", "train.compile", "train.cudnn_benchmark", "train.expandable_segments"),
    *("train.log_every", "train.on_nan", "train.pruning.end_step", "train.pruning.every_steps"),
    *("train.pruning.start_step", "train.pruning.structured", "train.rollback_after", "train.skip_bad_steps"),
)
_SECTIONS = ("strategy.", "data.", "model.", "optim.", "train.")


def log_run_config(config: JobConfig, sample: Batch | None, sink: Sink) -> None:
    """Log the config as text and hyper-parameters, and the first images of ``sample``."""
    sink.text("config", dump_config(config))
    # Keys of the strategies that this run does not use say nothing about it.
    others = tuple(f"strategy.{name}." for name in registry.names("strategies") if name != config.strategy.name)
    shown = [key for key in all_keys() if key.startswith(_SECTIONS) and not key.startswith(others)]
    values = _shown((key, value_of(config, key)) for key in shown if key not in _LEFT_OUT)
    sink.hparams(_own(config) | values, metrics=("eval/accuracy", "eval/loss"))
    for leaf in () if sample is None else nested.leaves(sample.data):
        if isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.shape[1] in (1, 3):
            sink.images("samples", leaf[:_IMAGES])
            return


def log_script_config(config: JobConfig, run_dir: Path, sink: Sink) -> None:
    """Log the config as text, and the hyper-parameters of a script with its own loop, if it has any."""
    sink.text("config", dump_config(config))
    if values := hparams_of_script(config, run_dir):
        sink.hparams(values)


def hparams_of_script(config: JobConfig, run_dir: Path) -> dict[str, bool | int | float | str]:
    """Return the script's keys and options, and the keys that the run's sweep varies, as hyper-parameters."""
    point = SweepPoint.read_or_none(run_dir / "point.json")  # a damaged one must not end the training
    return _own(config) | ({} if point is None else _shown(point.values.items()))


def _own(config: JobConfig) -> dict[str, bool | int | float | str]:
    return _shown([*leaves(config.params), *leaves(config.args, "args")])


def _shown(values: Iterable[tuple[str, Any]]) -> dict[str, bool | int | float | str]:
    """Return lists and mappings as text. Leave out null and what is empty: TensorBoard has no way to show them."""
    shown: dict[str, bool | int | float | str] = {}
    for key, value in values:
        if isinstance(value, (bool, int, float, str)):
            shown[key] = value
        elif isinstance(value, (list, dict)) and value:
            shown[key] = str(value)
    return shown
