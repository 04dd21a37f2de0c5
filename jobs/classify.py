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

To make it yours, replace what the methods return: data with ``len()`` and an index, a model, its loss, its figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toolkit
from jobs.models import build_model

#: What ``model.name`` may be. Read on the login node without importing this file, hence a literal; ``torchvision``
#: stands for every classification model of torchvision.
MODELS = ("mlp", "lenet", "torchvision")

#: With more classes the right one among the five likeliest is a figure as well.
MANY = 10


@dataclass
class Params:
    """The loss of training; the figures of an evaluation are of the plain cross entropy."""

    label_smoothing: float = 0.0  #: this part of each target goes to all classes alike
    mixup: float = 0.0  #: alpha of mixup, 0: none
    cutmix: float = 0.0  #: alpha of CutMix, 0: none; with both each is drawn as often

    def __post_init__(self) -> None:
        for name, most in (("label_smoothing", 1), ("mixup", 100), ("cutmix", 100)):
            if not 0 <= getattr(self, name) <= most:
                raise toolkit.ConfigError(
                    f"params.{name}: {getattr(self, name)} is out of range; must be between 0 and {most}"
                )


class Classify(toolkit.Job):
    """Images to classes, by cross entropy."""

    params: Params

    def setup(self) -> None:
        self.data = toolkit.build_datasets(self.config.data)
        self.classes, self.pictures = self.data.class_names, self.data.pictures
        self.mixing = None
        if self.params.mixup or self.params.cutmix:
            alphas = {"mixup": self.params.mixup, "cutmix": self.params.cutmix}
            self.mixing = toolkit.PairMixing(**alphas, classes=self.data.classes, seed=self.config.train.seed)

    def train_set(self) -> toolkit.Dataset:
        return self.data.train

    def eval_set(self) -> toolkit.Dataset:
        return self.data.eval

    def model(self) -> nn.Module:
        shape = self.data.sample_shape
        evaluated = self.pictures.shape if self.pictures else shape
        return build_model(self.config.model.name, self.data.classes, shape, evaluated)

    def loss(self, model: toolkit.Forward, batch: toolkit.Batch) -> toolkit.Loss:
        inputs, targets = self.mixing(batch) if self.mixing else batch
        logits = model(inputs).float()  # under autocast a sum in bf16 would have two or three right digits
        smoothing = self.params.label_smoothing
        return toolkit.Loss.sum(cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing))

    def evaluate(self, model: toolkit.Forward, batch: toolkit.Batch) -> dict[str, Tensor]:
        logits = model(batch.inputs).float()
        losses = cross_entropy(logits, batch.targets, reduction="none")
        figures = {"loss": losses, "accuracy": logits.argmax(dim=1) == batch.targets}
        if self.data.classes > MANY:
            figures["top5"] = (logits.topk(5).indices == batch.targets[:, None]).any(dim=1)
        return figures
