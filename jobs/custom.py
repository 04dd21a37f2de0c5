"""Train a small GAN on the handwritten digits: a step of one's own with two optimizers, made to be copied.

Two ranks on any machine, in about a minute; samples are in TensorBoard, under IMAGES::

    toolkit submit configs/gan.yaml --wait

One process, no Slurm, and longer; and the proof that a killed one comes back bit for bit::

    toolkit run configs/gan.yaml train.epochs=200
    toolkit resume-check configs/gan.yaml

``Gan.train_step`` is the whole step; what ``Custom`` does for it says docs/strategies.md, "a step of your own". To make
it yours, replace the networks, what ``train_step`` does with them, and ``quality``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from toolkit.config import JobConfig
from toolkit.data.datasets import build_datasets
from toolkit.data.loader import BatchedSamples, build_loader, eval_batches
from toolkit.dist.batch import Batch
from toolkit.dist.session import open_session
from toolkit.metrics.sinks import Sink
from toolkit.strategies import Custom, Strategy
from toolkit.train.describe import describe_run
from toolkit.train.evaluate import evaluate
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer, build_schedule
from toolkit.train.seeds import prepare
from toolkit.train.state import Checkpoints, identity

#: What ``model.name`` may be; read on the login node without importing this file, hence a literal.
MODELS = ("gan",)
NOISE, PIXELS, COMPONENTS, SLOPE = 16, 64, 8, 0.2


class Gan(Custom):
    """The generator is to fool the discriminator (the loss that does not saturate, Goodfellow et al. 2014), whose slope
    at real images costs it something (R1, Mescheder et al. 2018): without, the two circle around each other."""

    def train_step(self, batch: Batch, lr: float) -> Tensor:
        real, judge = batch.inputs.flatten(1).requires_grad_(), self.networks["discriminator"]
        made = self.networks["generator"](torch.randn(len(real), NOISE, device=self.device))
        believed = judge(real)
        (slope,) = torch.autograd.grad(believed.sum(), real, create_graph=True)
        caught = softplus(-believed).sum() + softplus(judge(made.detach())).sum() + SLOPE * slope.square().sum()
        self.descend("discriminator", caught / batch.global_count, lr)
        fooled = softplus(-judge(made)).sum() / batch.global_count
        self.descend("generator", fooled, lr)
        return fooled.detach()

    def forward(self, batch: Batch) -> Tensor:
        """As many images as there are in ``batch``, of noise that follows from its positions in the eval set."""
        table = torch.randn(1024, NOISE, generator=torch.Generator().manual_seed(0))
        return self.networks["generator"](table[batch.positions % 1024].to(self.device))  # type: ignore[no-any-return]


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, PIXELS))


def discriminator() -> nn.Module:
    hidden = ((nn.Linear(width, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)) for width in (PIXELS, 128))
    return nn.Sequential(*(module for layer in hidden for module in layer), nn.Linear(128, 1))


def main(config: JobConfig) -> Result:
    """One rank of the training; every rank calls it."""
    train = config.train
    with open_session(config.dist) as session:
        prepare(train.seed, deterministic=train.deterministic)
        data = build_datasets(config.data)
        strategy = Gan(config.strategy, session)
        loader = build_loader(data.train, config.data, strategy.share, seed=train.seed, device=session.device)
        with closing(loader), closing(strategy):
            optimizer = partial(build_optimizer, config.optim)
            strategy.build({"generator": (generator, optimizer), "discriminator": (discriminator, optimizer)})
            saves = Checkpoints(config.checkpoint, session, strategy, identity(config))
            schedule = partial(build_schedule, config.optim)
            trainer = Trainer(train, session, strategy, loader, schedule=schedule, checkpoints=saves)
            describe = partial(describe_run, config, loader.at(0))
            assert isinstance(data.eval, BatchedSamples)  # all digits are in memory
            return trainer.fit(partial(quality, data.eval), describe, partial(show, strategy, data.eval))


def show(strategy: Gan, eval_set: BatchedSamples, sink: Sink, step: int) -> None:
    """The same 16 noises as images, better each time."""
    images, targets = eval_set.batch(np.arange(16))
    made = strategy.forward(Batch(images, targets, torch.arange(16), 16)).detach()
    sink.images("made", made.view(-1, 1, 8, 8).clamp(-1, 2), step)


def quality(eval_set: BatchedSamples, strategy: Strategy, is_cut: Callable[[], bool]) -> dict[str, float] | None:
    """How far as many made images are from the real ones, 0 for the same mean and covariance: the Frechet distance of
    Heusel et al. 2017, not in a network's features but in the directions in which real digits vary most."""
    real = eval_set.batch(np.arange(len(eval_set)))[0].flatten(1).double()
    axes = torch.linalg.svd(real - real.mean(0), full_matrices=False)[2][:COMPONENTS].T

    def moments(made: Tensor, targets: Tensor) -> dict[str, Tensor]:
        along = made.double() @ axes.to(made.device)
        sums = torch.cat([along, (along[:, :, None] * along[:, None]).flatten(1)], dim=1).sum(0)
        return {f"{number:03d}": value for number, value in enumerate(sums)}

    found = evaluate(strategy, eval_batches(eval_set, strategy.share, 256), len(eval_set), moments, is_cut)
    if found is None:  # a stop cut it short
        return None
    mean, square = np.split(np.array([*found.values()]), [COMPONENTS])
    spread = square.reshape(COMPONENTS, COMPONENTS) - np.outer(mean, mean)
    return {"frechet": frechet(mean, spread, (real @ axes).mean(0).numpy(), np.cov((real @ axes).numpy().T, ddof=0))}


def frechet(mean: np.ndarray, spread: np.ndarray, other_mean: np.ndarray, other_spread: np.ndarray) -> float:
    """The squared Wasserstein-2 distance of two normal distributions (Dowson and Landau 1982)."""
    shared = np.sqrt(np.linalg.eigvals(spread @ other_spread).real.clip(0)).sum()
    return float(((mean - other_mean) ** 2).sum() + np.trace(spread) + np.trace(other_spread) - 2 * shared)
