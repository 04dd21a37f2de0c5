"""Train a Llama-shaped language model: a job to start from, made to be copied.

Two ranks on any machine, on the bytes of Python's standard library, in a minute or two::

    toolkit submit configs/gpt_fsdp.yaml --wait

Any text files, here all below a folder, and a longer training::

    toolkit submit configs/gpt_fsdp.yaml data.root=~/books train.epochs=100 train.max_steps=5000

A larger one, on four GPUs of each of two nodes::

    toolkit submit configs/gpt_fsdp.yaml data.root=/scratch/books params.layers=12 params.width=768 params.heads=12 \\
        params.kv_heads=4 params.hidden=2048 params.length=1024 data.global_batch_size=512 cluster.nodes=2 \\
        cluster.tasks_per_node=4 cluster.gpus_per_node=4 train.precision=bf16 train.accumulate=4 optim.lr=6e-4 \\
        strategy.activation_checkpointing=true train.max_steps=20000

Texts as tokens of any tokenizer, instead of bytes::

    toolkit data tokenize books/ more.jsonl --tokenizer tokenizer.json --out tokens
    toolkit submit configs/gpt_fsdp.yaml data.name=tokens data.root=tokens

Weights in Hugging Face's Llama format, of a model on whose tokens it continues, and back::

    toolkit submit ... params.hf_config=/models/llama/config.json model.init_from=/models/llama
    toolkit export RUN OUT --format safetensors      # transformers loads the folder OUT

The model knows nothing of the strategy but its ``tensor_plan``, which only tensor parallelism reads: fsdp shards its
blocks because they stand in a list, ``strategy.name=pipeline`` cuts it because it hands one tensor from layer to layer,
and ddp trains the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import toolkit
from jobs.llama import Llama, LlamaSizes

#: What ``model.name`` may be; read on the login node without importing this file, hence a literal.
MODELS = ("llama",)


@dataclass
class Params:
    """The sizes of the model, see LlamaSizes in jobs/llama.py."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2  # groups of heads that share their keys and values; a divisor of heads
    hidden: int = 176  # width inside of a SwiGLU
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False  # the embedding is the head, too; not for pipelines
    hf_config: str | None = None  # a Llama's config.json, whose sizes replace those above
    length: int = 64  # tokens of a window
    peak_flops: float | None = None  # of a device, for MFU; null: by the GPU's name, without MFU on CPUs
    documents: bool = True  # no token sees another document; false: all of a window, which is faster on GPUs


#: Operations a second of GPUs in bf16 without sparsity, by a part of the name, as NVIDIA's data sheets have them.
PEAK_FLOPS = {"B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
#: A target that does not count.
NO_TARGET = -100
#: Tokens that a sample begins with, and that the model adds.
PROMPT, SAMPLED = 64, 32


class LanguageModel(toolkit.Job):
    """The token that follows, by cross entropy."""

    eval_batch_size = 16

    def setup(self) -> None:
        with self.main_first():  # which copies text into the run's folder
            self.tokens = toolkit.load_tokens(self.config.data, self.folder, self.alive)
        self.sizes, self.context = self._sizes(), self.params.length
        # In fp32 the logits are the largest tensor of all, and not compiled they are written and read several times.
        self.summed = torch.compile(summed_cross_entropy) if self.config.train.compile else None

    def _sizes(self) -> LlamaSizes:
        p: Params = self.params
        if p.hf_config is None:
            own = p.layers, p.width, p.heads, p.kv_heads, p.hidden, p.rope_theta, p.norm_eps, p.tied
            return LlamaSizes(self.tokens.index.vocabulary, *own)
        sizes = LlamaSizes.read(Path(p.hf_config).expanduser())
        if sizes.vocabulary < self.tokens.index.vocabulary:
            raise toolkit.ConfigError(
                f"params.hf_config: its vocabulary is {sizes.vocabulary}, and the data's {self.tokens.index.vocabulary}"
            )
        return sizes

    def train_set(self) -> toolkit.Dataset:
        return self._windows(held_out=False)

    def eval_set(self) -> toolkit.Dataset:
        return self._windows(held_out=True)

    def _windows(self, *, held_out: bool) -> toolkit.TokenWindows:
        documents = self.params.documents
        return toolkit.TokenWindows(self.tokens, self.params.length, held_out=held_out, documents=documents)

    def model(self) -> nn.Module:
        return Llama(self.sizes)

    def loss(self, model: toolkit.Forward, batch: toolkit.Batch) -> toolkit.Loss:
        # An evaluation elsewhere needs no compiler.
        return next_token(model(batch.inputs), batch.targets, self.summed if torch.is_grad_enabled() else None)

    def summary(self, figures: Mapping[str, Any]) -> dict[str, float]:
        return {**figures, "perplexity": math.exp(figures["loss"])}

    def speed(self, samples_per_s: float) -> dict[str, float]:
        tokens_per_s = samples_per_s * self.params.length
        found = {"train/tokens_per_s": tokens_per_s}
        if peak := peak_flops(self.device, self.params.peak_flops):
            needed = tokens_per_s * self.sizes.flops_per_token(self.params.length)
            found["train/mfu"] = needed / (peak * self.config.cluster.nodes * self.config.cluster.tasks_per_node)
        return found

    def show(self, model: toolkit.Forward, batch: toolkit.Batch) -> dict[str, str]:
        """Return what the model makes of the beginning of a held-out text."""
        window = batch.inputs[:1, :, 0] if self.params.documents else batch.inputs[:1]
        begin = min(PROMPT, self.params.length // 2)
        tokens = continued(model, window, begin, begin + SAMPLED, self.alive)[0].cpu().numpy()
        return {"eval/sample": f"{self.tokens.decode(tokens[:begin])}[...]{self.tokens.decode(tokens[begin:])}"}

    def export_files(self) -> dict[str, str]:
        config = self.sizes.hugging_face(self.params.length)
        config |= {"bos_token_id": None, "eos_token_id": self.tokens.index.end}
        return {"config.json": json.dumps(config, indent=2) + "\n"}


@torch.no_grad()
def continued(
    model: toolkit.Forward, window: Tensor, begin: int, end: int, alive: Callable[[], None] = lambda: None
) -> Tensor:
    """Return the beginning of ``window`` with the tokens from ``begin`` on drawn by the model.

    ``window`` is (1, length), the result (1, ``end`` at most). Every pass is over a whole window: what comes after a
    token changes nothing, and ranks that share sequences need their length. All ranks make equally many passes, and
    draw the same.
    """
    tokens, draw = window.clone(), torch.Generator().manual_seed(0)
    end = min(end, tokens.shape[1])
    for place in range(begin, end):
        odds = model(tokens)[0, place - 1].float().softmax(-1)
        tokens[0, place] = torch.multinomial(odds.cpu(), 1, generator=draw)
        alive()
    return tokens[:, :end]


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """Return the operations a second that ``device`` can make. They are ``given``, or known by its name; else None."""
    if given is not None or device.type != "cuda":
        return given
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def next_token(
    logits: Tensor, targets: Tensor, summed: Callable[[Tensor, Tensor], Tensor] | None = None
) -> toolkit.Loss:
    """Return the mean cross entropy of logits (n, length, vocabulary) against ``targets`` (n, length).

    A target of -100 does not count. ``summed`` computes the sum, see :func:`summed_cross_entropy`.
    """
    total = (summed or summed_cross_entropy)(logits, targets)
    return toolkit.Loss.sum(total, (targets != NO_TARGET).sum())


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy of logits (n, length, vocabulary) against ``targets`` (n, length)."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
