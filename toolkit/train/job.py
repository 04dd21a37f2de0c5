"""``toolkit.Job``: what a training is about, and what makes a training of it on each rank.

The same class serves the ranks of a training and, afterwards, one process that evaluates or exports the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.base import logs
from toolkit.base.errors import ConfigError, ExtraForwardError, JobCodeError
from toolkit.config import JobConfig, learning_rate
from toolkit.config.learning_rate import Schedule, build_schedule
from toolkit.data.datasets import Dataset, ImagePreprocessor
from toolkit.data.loader import MakesLoader, build_loader, eval_batches
from toolkit.data.randomness import apply_gpu_settings, generators_in, generators_of, register_generators, seed_for_init
from toolkit.metrics.sinks import Sink
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session, open_session
from toolkit.strategies import Custom, Objective, Strategy, build_strategy
from toolkit.strategies.objective import Forward, Gathered, Loss, Losses
from toolkit.train.evaluate import Evaluate, Hooks, evaluate
from toolkit.train.initial import initialised
from toolkit.train.loop import Describe, Result, Show, Trainer, log_run_config
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity


class Job(Hooks):
    """The data, the model and the loss of a training. A job's file has one class derived from it.

    Every method but ``train_set``, ``model`` and ``loss`` has a default. :class:`Hooks` has what may be done during the
    training. Methods are called on every rank, in the same order, and must do the same on each::

        >>> class Doubling(toolkit.Job):
        ...     def train_set(self):
        ...         return [(torch.tensor([x / 10]), torch.tensor([x / 5])) for x in range(100)]
        ...     def model(self):
        ...         return torch.nn.Linear(1, 1)
        ...     def loss(self, model, batch):
        ...         return toolkit.Loss.mean((model(batch.inputs) - batch.targets).square().mean())
    """

    config: JobConfig  #: the whole config
    params: Any  #: the config's ``params`` section: an instance of the dataclass ``Params`` of the job's file, if any
    folder: Path  #: the run's folder, which all ranks share; an empty one where other data than the run's are evaluated
    eval_batch_size = 256  #: samples that a rank evaluates at once
    classes: Sequence[str] = ()  #: of a classifier whose outputs are logits (n, classes)
    #: How an image file becomes an input of the model, for `toolkit evaluate --images`.
    pictures: ImagePreprocessor | None = None
    tokens: Any = None  #: of a language model: what `toolkit.load_tokens` returned, for `toolkit generate`
    context: int | None = None  #: of a language model: the most tokens that it was trained to see at once
    #: Has parameters that the loss needs and the model does not: they are trained and saved with the model's.
    criterion: nn.Module | None = None

    def __init__(
        self,
        config: JobConfig,
        params: Any,
        folder: Path,
        device: torch.device,
        main_first: Callable[[], AbstractContextManager[object]] = nullcontext,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Set the attributes below. The toolkit makes the job; a subclass prepares in :meth:`setup`."""
        self.config, self.params, self.folder = config, params, folder
        self.device = device  #: of this rank
        self.main_first = main_first  #: ``with self.main_first():`` runs a block on rank 0, then on the others
        self.alive = alive  #: call it now and then in a long preparation, or that is taken for a hang
        self.setup()

    def setup(self) -> None:
        """Prepare what the other methods share, such as a data set that is read once."""

    @classmethod
    def main(cls, config: JobConfig, params: Any) -> None:
        """Be one rank of the training; every rank calls it."""
        cluster = config.cluster
        with (
            open_session(config.dist, cluster.gpus_per_node, cluster.tasks_per_gpu) as session,
            closing(training_of(cls, config, params, session)) as training,
        ):
            training.fit()

    # ------------------------------------------------------------------------------------------------------ the data

    def train_set(self) -> Dataset | MakesLoader:
        """Return the samples to train on. Anything with ``len()`` and an index will do, such as a torch ``Dataset``.

        A sample may be nested: dictionaries, tuples and dataclasses of tensors, arrays, numbers and texts. Return a
        :class:`toolkit.Streams` for samples without an index.
        """
        raise NotImplementedError(f"{type(self).__name__} has no train_set(); see toolkit.Job")

    def eval_set(self) -> Dataset | None:
        """Return the samples to evaluate on, or None to evaluate nothing."""
        return None

    #: ``collate(samples)`` makes a batch's data from a list of samples; None stacks them.
    collate: Callable[[list[Any]], Any] | None = None

    #: ``order(epoch)`` gives the samples of an epoch as indices of the training set: drawn by weight, sorted by length,
    #: by group. It must give the same at each call, and equally many in each epoch. None: each sample once.
    order: Callable[[int], Sequence[int]] | None = None

    # --------------------------------------------------------------------------------------- the model and the training

    def model(self) -> nn.Module | Mapping[str, nn.Module]:
        """Return a fresh model, or several by name for a job with a :meth:`train_step`."""
        raise NotImplementedError(f"{type(self).__name__} has no model(); see toolkit.Job")

    def loss(self, model: Forward, batch: Batch) -> Losses:
        """Return the loss of a batch: a :class:`toolkit.Loss`, or several by name. Several are added up and logged.

        Call ``model`` as the module's ``forward``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss(); see toolkit.Job")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer for ``model``. By default it follows the config's ``optim`` section."""
        return build_optimizer(self.config.optim, model)

    def schedule(self, total_steps: int) -> Schedule:
        """Return the learning rate as a function of the step. By default it follows the config's ``optim`` section."""
        return build_schedule(self.config.optim, total_steps)

    def train_step(self, step: Custom, batch: Batch) -> Tensor:
        """Make a whole step on this rank's samples, by calls of ``step.descend(network, loss)``.

        Returns the loss that is logged. It is for a training with several optimizers, with ``strategy.name: custom``. A
        loss summed over the samples of the batch and divided by ``batch.global_count`` gives the gradient of the mean
        over the global batch.
        """
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------- the evaluation

    @torch.no_grad()
    def evaluate(self, model: Forward, batch: Batch) -> Mapping[str, Loss | Tensor | Gathered]:
        """Return figures by name: one value for each sample (n,), or a :class:`toolkit.Loss`. By default the losses.

        They are averaged over the eval set. :class:`toolkit.Gathered` are gathered instead, in the eval set's order.
        """
        losses = self.loss(model, batch)
        return losses if isinstance(losses, Mapping) else {"loss": losses}

    def summary(self, figures: Mapping[str, Any]) -> Mapping[str, float]:
        """Return an evaluation's figures, made from the averages and gathered rows of :meth:`evaluate`."""
        return figures

    def show(self, model: Forward, batch: Batch) -> Mapping[str, Tensor | str]:
        """Return by tag what TensorBoard is to show of some eval samples after each evaluation.

        Images (n, channels, height, width), numbers (n,) as a histogram, or a text.
        """
        return {}

    # ---------------------------------------------------------------------------------------------- after the training

    def export_files(self) -> Mapping[str, str]:
        """Return the files that `toolkit export` adds beside the weights: texts by name."""
        return {}


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
    seed_for_init(config.train.seed, deterministic=config.train.deterministic)
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
        register_generators(generators_in(job))
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
            rate_keys=learning_rate.schedule_settings(config),
        )
        return Training(job, strategy, trainer, partial(log_run_config, config, sample), stack.pop_all().close)


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
        register_generators(generators_of(network))
    strategy.build(builders)


def _model(job: Job, config: JobConfig, session: Session) -> nn.Module:
    made = initialised(cast(Callable[[], nn.Module], job.model), config.model, session)
    register_generators(generators_of(made))
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

    def run_evaluation(strategy: Strategy, is_interrupted: Callable[[], bool]) -> Mapping[str, float] | None:
        given: dict[str, Any] = {"workers": job.config.data.workers, "device": job.device, "collate": job.collate}
        batches = eval_batches(eval_set, strategy.share, job.eval_batch_size, **given)
        averages = evaluate(strategy, batches, len(eval_set), job.evaluate, is_interrupted)
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
        except ExtraForwardError as error:  # raised on every rank alike
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
