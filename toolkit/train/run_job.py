"""A :class:`toolkit.Job` on the ranks of a training: the code that all jobs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from toolkit.base import logs
from toolkit.base.errors import ConfigError, JobCodeError, OnePassError
from toolkit.config import JobConfig, learning_rate
from toolkit.data.datasets import Dataset
from toolkit.data.loader import MakesLoader, build_loader, eval_batches
from toolkit.data.randomness import apply_gpu_settings, generators_in, generators_of, include, prepare
from toolkit.metrics.sinks import Sink
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies import Custom, Objective, Strategy, build_strategy
from toolkit.strategies.objective import Forward
from toolkit.train.checkpoints import Checkpoints
from toolkit.train.engine import describe_run
from toolkit.train.evaluate import Evaluate, evaluate
from toolkit.train.initial import initialised
from toolkit.train.job import Job
from toolkit.train.loop import Describe, Result, Show, Trainer
from toolkit.train.state import identity

log = logs.get(__name__)

#: Samples of the eval set that a job's ``show`` gets.
SHOWN = 16


@dataclass(frozen=True)
class Training:
    """A job with the model, the loader and the loop of one rank."""

    job: Job
    strategy: Strategy
    trainer: Trainer
    describe: Describe
    close: Callable[[], None]

    def fit(self) -> Result:
        """Train to the last step; see :meth:`Trainer.fit`."""
        job, eval_set = self.job, self.job.eval_set()
        if eval_set is None:
            return self.trainer.fit(None, self.describe, hooks=job)
        evaluate = evaluation(job, eval_set, self.strategy.share.count)
        return self.trainer.fit(evaluate, self.describe, _showing(job, eval_set, self.strategy), job)


def training_of(kind: type[Job], config: JobConfig, params: Any, session: Session) -> Training:
    """Make all that a rank needs to train a job of class ``kind``. Every rank calls it."""
    # Seeds first: the job may draw random numbers when it is made.
    prepare(config.train.seed, deterministic=config.train.deterministic)
    apply_gpu_settings(config.train)
    job = kind(config, params, session.run_dir, session.device, session.main_first, session.activity.note_progress)
    with ExitStack() as stack:
        # A job with a train_step has several networks, each with its optimizer, and no loss of its own.
        custom = None
        strategy: Strategy
        if type(job).train_step is not Job.train_step:
            custom = Custom(config.strategy, session, job.train_step)
            strategy = cast(Strategy, custom)
        else:
            strategy = build_strategy(config.strategy, session, config.train)
        stack.callback(strategy.close)
        loader = stack.enter_context(closing(_loader(job, config, strategy.share, session)))
        # A real batch: the strategy primes the model on it, and its images go to TensorBoard.
        sample = loader.at(0)
        include(generators_in(job))
        if custom is not None:
            _build_networks(job, custom)
        else:
            model = partial(_model, job, config, session)
            strategy.build(model, job.optimizer, Objective(job.loss, job.criterion), sample)
        # Only now, when the strategy has built the model, can its state be saved and restored.
        checkpoints = Checkpoints(config.checkpoint, session, strategy, identity(config))
        trainer = Trainer(
            config.train,
            session,
            strategy,
            loader,
            schedule=job.schedule,
            checkpoints=checkpoints,
            rate_keys=learning_rate.keys_of(config),
        )
        return Training(job, strategy, trainer, partial(describe_run, config, sample), stack.pop_all().close)


def _loader(job: Job, config: JobConfig, share: Share, session: Session) -> Any:
    given: dict[str, Any] = {"seed": config.train.seed, "device": session.device, "collate": job.collate}
    samples = job.train_set()
    if isinstance(samples, MakesLoader):
        return samples.loader_of_share(config.data, share, **given)
    return build_loader(samples, config.data, share, order=job.order, **given)


def _build_networks(job: Job, strategy: Custom) -> None:
    networks = job.model()
    if not isinstance(networks, Mapping):
        raise JobCodeError(f"job: a train_step needs networks by name, and model() gave a {type(networks).__name__}")
    builders = {name: (lambda network=network: network, job.optimizer) for name, network in networks.items()}
    for network in networks.values():
        include(generators_of(network))
    strategy.build(builders)


def _model(job: Job, config: JobConfig, session: Session) -> nn.Module:
    made = initialised(cast(Callable[[], nn.Module], job.model), config.model, session)
    include(generators_of(made))
    return made


def evaluation(job: Job, eval_set: Dataset, ranks: int) -> Evaluate:
    """Return a function that evaluates ``job`` on ``eval_set``, on ``ranks`` ranks or fewer.

    Raises ConfigError for a set with fewer samples: each rank needs one.
    """
    if len(eval_set) < ranks:
        raise ConfigError(
            f"job: eval_set() has {len(eval_set)} samples, fewer than the {ranks} ranks; use fewer ranks, or add "
            "samples"
        )

    def run_evaluation(strategy: Strategy, is_cut: Callable[[], bool]) -> Mapping[str, float] | None:
        given: dict[str, Any] = {"workers": job.config.data.workers, "device": job.device, "collate": job.collate}
        batches = eval_batches(eval_set, strategy.share, job.eval_batch_size, **given)
        averages = evaluate(strategy, batches, len(eval_set), job.evaluate, is_cut)
        if averages is None:
            return None
        figures = job.summary(averages)
        for name, figure in figures.items():
            if isinstance(figure, Tensor) and figure.numel() != 1:
                raise JobCodeError(
                    f"job: an evaluation gathered the rows {name!r}, of shape {tuple(figure.shape)}: summary(figures) "
                    "is to make numbers of them"
                )
        return {name: float(figure) for name, figure in figures.items()}

    return run_evaluation


def _showing(job: Job, eval_set: Dataset, strategy: Strategy) -> Show:
    """Return a function that logs what ``job`` shows of the first samples of ``eval_set``.

    They are read once. Every rank calls it, because passes through the model may be joint.
    """
    if type(job).show is Job.show:
        return lambda sink, step: None
    batch = next(eval_batches(eval_set, Share(0, 1), min(SHOWN, len(eval_set)), collate=job.collate))
    is_possible = True

    def show(sink: Sink, step: int) -> None:
        nonlocal is_possible
        if not is_possible:
            return
        shown: dict[str, Tensor | str] = {}

        def look(model: Forward, batch: Batch) -> dict[str, Tensor]:
            shown.update(job.show(model, batch))
            return {}  # there are no figures to sum

        try:
            strategy.evaluate(batch, look)
        except OnePassError as error:  # raised on every rank alike
            is_possible = False
            log.warning("the job's show() is left out: %s", error)
            return
        for tag, value in shown.items():
            try:
                if isinstance(value, str):
                    sink.text(tag, value, step)
                elif value.ndim == 4:
                    sink.images(tag, value.float(), step)
                else:
                    sink.histogram(step, tag, value.flatten())
            except Exception as error:  # of TensorBoard, on rank 0 alone: it must not end the training
                log.warning("the job's show(): %r is not logged: %r", tag, error)

    return show
