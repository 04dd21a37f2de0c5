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

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toolkit
from jobs.models import build_model

#: What ``model.name`` may be. Read on the login node without importing this file, hence a literal; ``torchvision``
#: stands for every classification model of torchvision.
MODELS = ("mlp", "lenet", "torchvision")


class Classify(toolkit.Job):
    """Images to classes, by cross entropy."""

    def setup(self) -> None:
        self.data = toolkit.build_datasets(self.config.data)
        self.classes, self.pictures = self.data.class_names, self.data.pictures

    def train_set(self) -> toolkit.Dataset:
        return self.data.train

    def eval_set(self) -> toolkit.Dataset:
        return self.data.eval

    def model(self) -> nn.Module:
        return build_model(self.config.model.name, self.data.classes, self.data.sample_shape)

    def loss(self, model: toolkit.Forward, batch: toolkit.Batch) -> toolkit.Loss:
        logits = model(batch.inputs).float()  # under autocast a sum in bf16 would have two or three right digits
        return toolkit.Loss.sum(cross_entropy(logits, batch.targets, reduction="sum"))

    def evaluate(self, model: toolkit.Forward, batch: toolkit.Batch) -> dict[str, Tensor]:
        logits = model(batch.inputs).float()
        losses = cross_entropy(logits, batch.targets, reduction="none")
        return {"loss": losses, "accuracy": logits.argmax(dim=1) == batch.targets}
