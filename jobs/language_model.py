"""Train a small GPT on bytes with sharded weights: a job that is worth sharding once it is large, made to be copied.

Two ranks on any machine, on the sources of Python's standard library, in a minute or two::

    toolkit submit configs/gpt_fsdp.yaml --wait

Any text files, here all below a folder, and a longer training::

    toolkit submit configs/gpt_fsdp.yaml data.root=~/books train.max_steps=5000

GPT-2's smallest size, on four GPUs of each of two nodes::

    toolkit submit configs/gpt_fsdp.yaml data.root=/scratch/books model.name=gpt_small data.global_batch_size=512 \\
        cluster.nodes=2 cluster.tasks_per_node=4 cluster.gpus_per_node=4 train.precision=bf16 \\
        train.accumulate=4 strategy.activation_checkpointing=true optim.lr=6e-4 train.max_steps=20000

The model knows nothing of the strategy but its ``tensor_plan``, which only tensor parallelism reads: fsdp shards its
blocks because they stand in a list, ``strategy.name=pipeline`` cuts it because it hands one tensor from layer to layer,
and ddp trains the same. To make it yours, replace ``GPT`` (jobs/gpt.py) by your model and ``TextWindows`` by your
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toolkit
from jobs.gpt import GPT

#: What ``model.name`` may be; read on the login node without importing this file, hence a literal.
MODELS = ("gpt_tiny", "gpt_small")
#: Of each: blocks, width, heads, and the length of a window in bytes.
SIZES = {"gpt_tiny": (4, 64, 4, 64), "gpt_small": (12, 768, 12, 1024)}


class LanguageModel(toolkit.Job):
    """The byte that follows, by cross entropy; each window of text weighs one."""

    eval_batch_size = 16

    def setup(self) -> None:
        self.size = SIZES[self.config.model.name]
        with self.main_first():  # which copies the text into the run's folder
            self.text = toolkit.pack_text(self.config.data.root, self.folder, self.alive)

    def train_set(self) -> toolkit.Dataset:
        return toolkit.TextWindows(self.text, self.size[-1], held_out=False)

    def eval_set(self) -> toolkit.Dataset:
        return toolkit.TextWindows(self.text, self.size[-1], held_out=True)

    def model(self) -> nn.Module:
        return GPT(*self.size)

    def loss(self, model: toolkit.Forward, batch: toolkit.Batch) -> toolkit.Loss:
        return toolkit.Loss.sum(next_byte(model(batch.inputs), batch.targets))

    def summary(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return {**figures, "perplexity": math.exp(figures["loss"])}


def next_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (n, length, 256) against bytes (n, length): means over a window, summed over windows."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]
