"""Train an image classifier with DistributedDataParallel: the reference job, made to be copied.

On a Slurm cluster, or on any machine without one (then as local processes)::

    toolkit submit configs/digits_ddp.yaml --wait

One CPU, no Slurm, no config file of one's own, in a few seconds::

    toolkit run configs/digits_ddp.yaml train.epochs=2

Another model and data set, with four GPUs on each of two nodes::

    toolkit data fetch cifar10
    toolkit submit configs/digits_ddp.yaml data.name=cifar10 model.name=resnet18 data.global_batch_size=1024 \\
        cluster.nodes=2 cluster.tasks_per_node=4 cluster.gpus_per_node=4 train.precision=bf16

Afterwards, on one device, and on images of your own::

    toolkit evaluate digits-ddp
    toolkit evaluate digits-ddp --images ~/scans

To make it yours, replace what ``main`` is given: ``build_datasets`` by your data (anything with ``len`` and indexing),
``build_model`` by your model, ``cross_entropy`` by your criterion and ``classification`` by what you measure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from jobs.models import build_model
from toolkit.config import JobConfig
from toolkit.data.datasets import Dataset, Datasets, build_datasets
from toolkit.data.loader import build_loader, eval_batches
from toolkit.dist.session import open_session
from toolkit.strategies import Strategy, build_strategy
from toolkit.train.describe import describe_run
from toolkit.train.evaluate import evaluate
from toolkit.train.inference import Inference
from toolkit.train.initial import initialised
from toolkit.train.loop import Result, Trainer
from toolkit.train.objectives import classification, cross_entropy
from toolkit.train.optim import build_optimizer, build_schedule
from toolkit.train.seeds import prepare
from toolkit.train.state import Checkpoints, identity

#: What ``model.name`` may be. Read on the login node without importing this file, hence a literal; ``torchvision``
#: stands for every classification model of torchvision.
MODELS = ("mlp", "lenet", "torchvision")


def main(config: JobConfig) -> Result:
    """One rank of the training; every rank calls it."""
    with open_session(config.dist) as session:
        prepare(config.train.seed, deterministic=config.train.deterministic)
        data = build_datasets(config.data)
        job = on(config, data)
        strategy = build_strategy(config.strategy, session, config.train)
        loader = build_loader(data.train, config.data, strategy.share, seed=config.train.seed, device=session.device)
        with closing(loader), closing(strategy):
            sample = loader.at(0)
            model = partial(initialised, job.model, config.model, session)
            strategy.build(model, partial(build_optimizer, config.optim), cross_entropy, sample)
            trainer = Trainer(
                config.train,
                session,
                strategy,
                loader,
                schedule=partial(build_schedule, config.optim),
                checkpoints=Checkpoints(config.checkpoint, session, strategy, identity(config)),
            )
            return trainer.fit(job.evaluate, partial(describe_run, config, sample))


def inference(config: JobConfig, folder: Path) -> Inference:
    """For `toolkit evaluate` and `toolkit export`: the same job without its training."""
    return on(config, build_datasets(config.data))


def on(config: JobConfig, data: Datasets) -> Inference:
    """The model that fits ``data``, and how it is judged."""
    model = partial(build_model, config.model, data.classes, data.sample_shape)
    judge = partial(accuracy, data.eval, config.data.workers)
    return Inference(model, judge, data.eval, data.class_names, data.pictures)


def accuracy(
    eval_set: Dataset, workers: int, strategy: Strategy, is_cut: Callable[[], bool]
) -> dict[str, float] | None:
    """Loss and accuracy over the whole eval set, each image counted once; None when a stop cut it short."""
    batches = eval_batches(eval_set, strategy.share, batch_size=256, workers=workers)
    return evaluate(strategy, batches, len(eval_set), classification, is_cut)
