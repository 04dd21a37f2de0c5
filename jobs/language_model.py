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
and ddp trains the same. To make it yours, replace ``GPT`` (jobs/gpt.py) by your model and ``Windows`` by your tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.nn import functional

from jobs.gpt import GPT
from toolkit.config import JobConfig
from toolkit.data import text
from toolkit.data.loader import build_loader, eval_batches
from toolkit.dist.session import open_session
from toolkit.strategies import Strategy, build_strategy
from toolkit.train.describe import describe_run
from toolkit.train.evaluate import evaluate
from toolkit.train.inference import Inference
from toolkit.train.initial import initialised
from toolkit.train.loop import Result, Trainer
from toolkit.train.optim import build_optimizer, build_schedule
from toolkit.train.seeds import prepare
from toolkit.train.state import Checkpoints, identity

#: What ``model.name`` may be; read on the login node without importing this file, hence a literal.
MODELS = ("gpt_tiny", "gpt_small")
#: Of each: blocks, width, heads, and the length of a window in bytes.
SIZES = {"gpt_tiny": (4, 64, 4, 64), "gpt_small": (12, 768, 12, 1024)}


def main(config: JobConfig) -> Result:
    """One rank of the training; every rank calls it."""
    train, size = config.train, SIZES[config.model.name]
    with open_session(config.dist) as session:
        prepare(train.seed, deterministic=train.deterministic)
        train_set = text.Windows(text.of_run(config.data.root, session), size[-1], held_out=False)
        job = inference(config, session.run_dir)
        strategy = build_strategy(config.strategy, session, train)
        loader = build_loader(train_set, config.data, strategy.share, seed=train.seed, device=session.device)
        with closing(loader), closing(strategy):
            sample = loader.at(0)
            model = partial(initialised, job.model, config.model, session)
            strategy.build(model, partial(build_optimizer, config.optim), next_byte, sample)
            schedule = partial(build_schedule, config.optim)
            checkpoints = Checkpoints(config.checkpoint, session, strategy, identity(config))
            trainer = Trainer(train, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
            return trainer.fit(job.evaluate, partial(describe_run, config, sample))


def inference(config: JobConfig, folder: Path) -> Inference:
    """For `toolkit evaluate` and `toolkit export`: the same job without its training."""
    size = SIZES[config.model.name]
    eval_set = text.Windows(text.of_folder(config.data.root, folder), size[-1], held_out=True)
    return Inference(partial(GPT, *size), partial(perplexity, eval_set), eval_set)


def perplexity(eval_set: text.Windows, strategy: Strategy, is_cut: Callable[[], bool]) -> dict[str, float] | None:
    """Mean loss of a byte over all windows held out, in nats, and its exponential; None when a stop cut it short."""
    batches = eval_batches(eval_set, strategy.share, batch_size=16)
    found = evaluate(strategy, batches, len(eval_set), lambda *both: {"loss": next_byte(*both)[0]}, is_cut)
    return found and {**found, "perplexity": math.exp(found["loss"])}


def next_byte(logits: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Criterion: cross entropy of logits (n, length, 256) against bytes (n, length), each window weighing one."""
    total = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    return total / targets.shape[1], None
