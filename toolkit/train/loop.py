"""The training loop of jobs. Its state is the step number: batches and learning rate are functions of it.

There are two exceptions. A loader of streams has a position of its own, for which the checkpoints ask it. Shares that
follow the ranks' speeds are saved with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from logging import INFO, WARNING
from typing import Any, TypeAlias

from torch import Tensor

from toolkit import hang
from toolkit.base import logs
from toolkit.config import TrainConfig
from toolkit.config.learning_rate import Schedule, rate_change, rates_at, total_steps
from toolkit.data.loader import Batches
from toolkit.data.randomness import reseed
from toolkit.metrics.sinks import Sink
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.protocol import Strategy
from toolkit.train import parts
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.engine import LoopEngine
from toolkit.train.evaluate import Evaluate, Evaluations
from toolkit.train.job import Hooks
from toolkit.train.loss_windows import LOSS, LossWindow
from toolkit.train.not_finite import JobNotFinite, SkippedSteps

log = logs.get(__name__)

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
        if loader.is_split:
            strategy.split_data()
        self._strategy = strategy
        self._loader = loader
        self._checkpoints = checkpoints
        checkpoints.include(loader)  # also refuses ranks with different data sets, before the first step
        self._samples = loader.global_batch_size
        self._total: int = total_steps(config, loader.dataset_size, loader.global_batch_size)
        self._lr, self._rate_keys = schedule(self._total), rate_keys or {}
        ranks = session.world_size
        self._window = LossWindow(session.rank, ranks, strategy.by_rank, strategy.gather, are_parts=True)
        self._pace = parts.rank_pace(session)
        self._balance = parts.share_balance(loader, strategy, ranks, config.accumulate)
        self._bad_samples = parts.bad_sample_list(loader, session)
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
        self._evaluations = Evaluations(self._session, self._strategy, self._sheet, evaluate, self._hooks, seed)
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
            self._strategy.own_time.start()
            reseed(self._train_config.seed, self.step, self._strategy.share.index)
            yield self._loader.at(self.step)

    def _train_step(self, batch: Batch | None) -> None:
        n = self.step
        self._wait_s = self._loader.data_wait_s
        if self._bad_samples is not None:
            self._bad_samples.note(batch)
        if self._trace is not None:
            self._trace.take_batch(n, batch, self._loader.samples(n))
            self._trace.take_start(self._lr(n))
        output = self._strategy.step(batch, self._lr(n))
        if self._trace is not None:
            self._trace.take_end(output.loss, self._strategy.live())
        # Nothing is read from the device here: the verdict and the losses wait for the next logging step.
        self._skipped.note(n, output.skipped)
        self._window.add({f"train/{name}": loss for name, loss in output.counted().items()})

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
        self._window.leave_out(self._skipped.read())
        if self._skipped.rollback_due:
            self._roll_back()
        means, own_s = self._window.take(self._strategy.own_time.take())
        values: dict[str, float] = {
            "train/lr": self._lr(self.step - 1),
            **self._figures(),
            **self._hooks.speed(self._throughput.samples_per_s),
            **(self._pace.compare(own_s) or {}),
            **(self._balance.update(self.step, own_s) if self._balance is not None else {}),
            **self._skipped.figures(),
        }
        if self._bad_samples is not None:
            values |= self._bad_samples.figures(self.step * self._samples)
        for tag, figure in self._strategy.figures().items():
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
        with self._sheet.on("checkpoint"):
            to = self._checkpoints.roll_back(self.step, self._skipped.first_in_row)
        self._skipped.rolled_back(self.step, to)
        self._activity.phase = hang.LOGGING

    def _evaluate(self) -> bool:
        """Evaluate, and log the figures. Return True if the model has never been as good."""
        self._report("evaluate")
        with self._sheet.on("evaluation"), self._checkpoints.saver.timer.held():
            figures = self._evaluations.evaluate(self.step)
        if figures is None:
            return False
        self._metrics |= figures
        self._sink.scalars(self.step, figures)
        self._show(self._sink, self.step)
        self._end_if_done()
        self._report("train")
        self._throughput.pause()
        return self._checkpoints.saver.is_best(self._metrics)

    def _end_if_done(self) -> None:
        if self.step < self._total and self._evaluations.are_enough():
            log.info("step %d of %d: the job says that it is done", self.step, self._total)
            self._total = self.step

    def _may_save(self, *, must: bool) -> bool:
        self._window.leave_out(self._skipped.read())
        if self._skipped.saves_wait and not must:
            log.info("step %d is not saved: the steps before it were left out", self.step)
            return False
        if self._not_finite.may_save(self.step, self._strategy):
            return True
        if self.step == self._total:
            self._not_finite.refuse(self.step)
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
        if self._checkpoints.saver.newest == self.step:
            self._checkpoints.saver.describe(self.step, self._reached())
        else:  # it was loaded from memory
            self._save(must=False)

    def _progress(self) -> dict[str, Any]:
        return {
            "epoch": self._epochs(self.step),
            "epochs": self._train_config.epochs,
            "stragglers": self._pace.stragglers() or [],
        }
