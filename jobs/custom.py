"""Train a small GAN on the handwritten digits: a job made to be copied.

It has a step of its own, with two optimizers.

Two ranks on any machine, in about a minute; samples are in TensorBoard, under IMAGES::

    toolkit submit configs/gan.yaml --wait

One process, no Slurm, and longer; and the proof that a killed one comes back bit for bit::

    toolkit run configs/gan.yaml train.epochs=200
    toolkit resume-check configs/gan.yaml

``Gan.train_step`` is the whole step; what the toolkit does for it says docs/own-step.md. To
make it yours, replace the networks, what ``train_step`` does with them, and what is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import toolkit

#: What ``model.name`` may be; read on the login node without importing this file, hence a literal.
MODELS = ("gan",)
NOISE, PIXELS, COMPONENTS, SLOPE = 16, 64, 8, 0.2


class Gan(toolkit.Job):
    """A GAN with the loss that does not saturate (Goodfellow et al. 2014).

    The generator is to fool the discriminator. The discriminator pays for its slope at real images (R1, Mescheder et
    al. 2018): without that the two may oscillate and not converge.
    """

    def setup(self) -> None:
        self.data = toolkit.build_datasets(self.config.data)

    def train_set(self) -> toolkit.Dataset:
        return self.data.train

    def eval_set(self) -> toolkit.Dataset:
        return self.data.eval

    def model(self) -> dict[str, nn.Module]:
        return {"generator": generator(), "discriminator": discriminator()}

    def train_step(self, step: toolkit.Custom, batch: toolkit.Batch) -> Tensor:
        real, judge = batch.inputs.flatten(1).requires_grad_(), step.networks["discriminator"]
        made = step.networks["generator"](torch.randn(len(real), NOISE, device=self.device))
        believed = judge(real)
        (slope,) = torch.autograd.grad(believed.sum(), real, create_graph=True)
        caught = softplus(-believed).sum() + softplus(judge(made.detach())).sum() + SLOPE * slope.square().sum()
        step.descend("discriminator", caught / batch.global_count)
        fooled = softplus(-judge(made)).sum() / batch.global_count
        step.descend("generator", fooled)
        return fooled.detach()

    def evaluate(self, model: toolkit.Forward, batch: toolkit.Batch) -> dict[str, toolkit.Gathered]:
        return {"made": toolkit.Gathered(self.made(model, batch)), "real": toolkit.Gathered(batch.inputs.flatten(1))}

    def summary(self, figures: Mapping[str, Tensor]) -> dict[str, float]:
        return {"frechet": frechet(figures["made"].double(), figures["real"].double())}

    def show(self, model: toolkit.Forward, batch: toolkit.Batch) -> dict[str, Tensor]:
        return {"made": self.made(model, batch).view(-1, 1, 8, 8).clamp(-1, 2)}

    def made(self, networks: Any, batch: toolkit.Batch) -> Tensor:
        """Return images that the generator makes of the same noise at each step.

        The noise follows from the samples' places in the eval set.
        """
        table = torch.randn(1024, NOISE, generator=torch.Generator().manual_seed(0))
        return cast(Tensor, networks["generator"](table[batch.positions % 1024].to(self.device)))


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, PIXELS))


def discriminator() -> nn.Module:
    hidden = ((nn.Linear(width, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3)) for width in (PIXELS, 128))
    return nn.Sequential(*(module for layer in hidden for module in layer), nn.Linear(128, 1))


def frechet(made: Tensor, real: Tensor) -> float:
    """Return how far made images are from real ones: 0 for equal mean and covariance.

    It is the Frechet distance of Heusel et al. 2017, not in a network's features but in the directions in which real
    digits vary most.
    """
    axes = torch.linalg.svd(real - real.mean(0), full_matrices=False)[2][:COMPONENTS].T
    (mean, spread), (other_mean, other_spread) = (
        ((rows @ axes).mean(0).numpy(), np.cov((rows @ axes).numpy().T, ddof=0)) for rows in (made, real)
    )
    shared = np.sqrt(np.linalg.eigvals(spread @ other_spread).real.clip(0)).sum()
    return float(((mean - other_mean) ** 2).sum() + np.trace(spread) + np.trace(other_spread) - 2 * shared)
