"""``toolkit.Job``: what a training is about, without the training.

The same class serves the ranks of a training and, afterwards, one process that evaluates or exports the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.config import JobConfig
from toolkit.config.learning_rate import Schedule, build_schedule
from toolkit.data.datasets import Dataset, Pictures
from toolkit.data.loader import MakesLoader
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import open_session
from toolkit.strategies import Custom
from toolkit.strategies.objective import Forward, Loss, Losses, Rows
from toolkit.train.optim import build_optimizer


class Hooks:
    """Methods that the loop calls on every rank, between two steps. Each does the same on all ranks."""

    def on_epoch_start(self, epoch: int) -> None:
        """Prepare an epoch, counted from 0. Called again where a run resumes within it."""

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take note of an epoch's end, with the last figure of each metric.

        If that end is evaluated, called after it: where a stop cut the evaluation short, the resumed run calls it.
        """

    def speed(self, samples_per_s: float) -> Mapping[str, float]:
        """Return more figures of the speed by tag, such as tokens per second. Called at each logging step.

        ``samples_per_s`` are those of all ranks together.
        """
        return {}

    def is_done(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        """Return True to end the training early. Called after each evaluation.

        ``evaluations`` are the figures of all so far (``eval/loss``), those before a resume included.
        """
        return False


class Job(Hooks):
    """The data, the model and the loss of a training. A job's file has one class derived from it.

    Every method but ``train_set``, ``model`` and ``loss`` has a default. :class:`~toolkit.train.job.Hooks` has what may
    be done during the training. Methods are called on every rank, in the same order, and must do the same on each::

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
    pictures: Pictures | None = None
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
        from toolkit.train.run_job import training_of  # which needs this class

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
    def evaluate(self, model: Forward, batch: Batch) -> Mapping[str, Loss | Tensor | Rows]:
        """Return figures by name: one value for each sample (n,), or a :class:`toolkit.Loss`. By default the losses.

        They are averaged over the eval set. :class:`toolkit.Rows` are gathered instead, in the eval set's order.
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
