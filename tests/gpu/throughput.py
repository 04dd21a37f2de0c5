"""Steps per second of our loop beside the bare one, for models of real size.

MFU is measured where the GPU's peak is known. The bare loop is the usual one: DDP, autocast, a fused optimizer, batches
that are page-locked already. Ours is the Trainer with its loader, seeds, metrics and agreement. Both take turns in the
same processes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet50

from jobs.language_model import peak_flops
from tests.bench.loop import steps_of
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.loader import Loader
from toolkit.data.permutation import Indices
from toolkit.data.randomness import apply_gpu_settings
from toolkit.ranks.session import Session
from toolkit.strategies import Loss, Objective, build_strategy
from toolkit.strategies.layouts import autocast
from toolkit.strategies.objective import Forward
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity

#: Different batches in memory, which come again and again.
KEPT = 4
LOG_EVERY = 10
NEVER = 10**9
#: A round: makes so many steps and returns the seconds.
Round = Callable[[int], float]


@dataclass(frozen=True)
class Work:
    """What is trained, and on how much. ``samples`` are those of a rank in a step."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]  #: so many samples in host memory
    samples: int
    train: TrainConfig
    optim: OptimConfig
    loss: Callable[[Forward, Tensor, Tensor], Tensor]  #: the mean over a batch, of a model, its inputs and targets
    flops_per_sample: float | None = None  #: of a step; None: MFU is not asked for


@dataclass(frozen=True)
class GptSizes:
    """nanoGPT's defaults, https://github.com/karpathy/nanoGPT/blob/master/model.py."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50_304
    length: int = 1024

    @property
    def flops_per_token(self) -> float:
        """Return the operations of a training step for a token, as nanoGPT's estimate_mfu() counts them."""
        block = 12 * self.width**2 + 2 * self.width  # weights of products, and of two norms
        weights = self.layers * block + self.vocabulary * self.width + self.width
        return 6.0 * weights + 12.0 * self.layers * self.width * self.length


class GptBlock(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.into(self.norms[0](x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A decoder of nanoGPT's shape: learnt positions, no biases, the embedding is the head too.

    Its forward pass ends with the loss, as nanoGPT's does: compiled apart from the model, the logits of 50,304 tokens
    would be written and read several times in fp32.
    """

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.tokens, self.places = (nn.Embedding(count, sizes.width) for count in (sizes.vocabulary, sizes.length))
        self.blocks = nn.ModuleList(GptBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class OfBytes(nn.Module):
    """A model of images that gets them as bytes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixels.float() / 255)


def gpt(sizes: GptSizes, samples: int, precision: str, *, compile: bool) -> Work:
    """Return the training of a GPT on random tokens with AdamW."""

    def batch(count: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(sizes.vocabulary, (count, sizes.length + 1), generator=torch.Generator().manual_seed(0))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def own_loss(model: Forward, tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(tokens, targets)
        return found

    train = TrainConfig(precision=precision, compile=compile, float32_matmul="high")
    needed = sizes.flops_per_token * sizes.length
    return Work(partial(Gpt, sizes), batch, samples, train, OptimConfig("adamw", lr=6e-4), own_loss, needed)


def images(model: Callable[[], nn.Module], edge: int, samples: int, precision: str) -> Work:
    """Return the training of ``model`` on random images of bytes with SGD, its convolutions channels-last."""

    def batch(count: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (count, 3, edge, edge), generator=draw, dtype=torch.uint8)
        return pixels, torch.randint(1000, (count,), generator=draw)

    def loss(model: Forward, pixels: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(model(pixels), targets)

    train = TrainConfig(precision=precision, channels_last=True)
    return Work(lambda: OfBytes(model()), batch, samples, train, OptimConfig("sgd", lr=0.1), loss)


def full_size(name: str, device: torch.device) -> Work:
    """Return ``resnet50`` or ``gpt`` at the size of a GPU. With less than 60 GB batches are smaller."""
    memory = torch.cuda.get_device_properties(device).total_memory
    part = 1 if memory > 60e9 else 4
    if name == "gpt":
        return gpt(GptSizes(), 64 // part, "bf16", compile=True)
    return images(resnet50, 224, 256 // part, "bf16")


class Kept:
    """Batches that are in memory already. So the loop is measured, without the reading of a data set."""

    def __init__(self, work: Work) -> None:
        inputs, targets = work.batch(work.samples * KEPT)
        self.batches = list(zip(inputs.split(work.samples), targets.split(work.samples), strict=True))
        self.asked = 0

    def __len__(self) -> int:
        return NEVER

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        self.asked += 1
        inputs, targets = self.batches[self.asked % KEPT]
        return inputs[: len(indices)], targets[: len(indices)]


def timed(train: Callable[[int], None], device: torch.device) -> Round:
    def run(steps: int) -> float:
        started = time.perf_counter()
        train(steps)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return run


def bare(work: Work, session: Session) -> Round:
    """Return the usual loop, written by hand."""
    device = session.device
    # Page-locked already: the copies of a step then overlap with its computing.
    batches = [
        tuple(tensor.pin_memory() if device.type == "cuda" else tensor for tensor in batch)
        for batch in Kept(work).batches
    ]
    model = work.model().to(device)
    if work.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if work.train.compile:
        model.compile()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(work.optim, model)

    def train(steps: int) -> None:
        for step in range(steps):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batches[step % KEPT])
            with autocast(device, work.train.precision):
                loss = work.loss(ddp, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return timed(train, device)


def training_of(work: Work, session: Session, log_every: int) -> Trainer:
    """Return a Trainer without an end that is ready for :func:`steps_of`: no checkpoint, no evaluation."""
    config = replace(work.train, epochs=1, log_every=log_every, eval_every=NEVER)
    strategy = build_strategy(StrategyConfig(), session, config)
    batch = work.samples * session.world_size
    loader = Loader(Kept(work), global_batch_size=batch, seed=0, share=strategy.share, device=session.device)
    objective = Objective(lambda model, batch: Loss.mean(work.loss(model, batch.inputs, batch.targets)))
    strategy.build(work.model, partial(build_optimizer, work.optim), objective, loader.at(0))
    checkpoints = Checkpoints(CheckpointConfig(NEVER), session, strategy, identity(JobConfig()))
    return Trainer(
        config, session, strategy, loader, schedule=partial(build_schedule, work.optim), checkpoints=checkpoints
    )


def ours(work: Work, session: Session) -> Round:
    """Return our loop, with a line of metrics every ``LOG_EVERY`` steps."""
    made = steps_of(training_of(work, session, LOG_EVERY))

    def train(steps: int) -> None:
        for _ in range(steps):
            next(made)

    return timed(train, session.device)


def race(session: Session, make: Callable[[torch.device], Work], steps: int, rounds: int) -> dict[str, float]:
    """Return samples per second of both loops over all ranks, their ratio, and the MFU.

    Every rank calls it. The ratio of ours to the bare one is the median of the rounds' ratios. The MFU is ours.
    """
    work = make(session.device)
    apply_gpu_settings(work.train)
    racers = {"bare": bare(work, session), "ours": ours(work, session)}
    for train in racers.values():
        train(max(3, steps // 5))  # compiles, times cuDNN's algorithms, fills the allocator
    speeds: dict[str, list[float]] = {name: [] for name in racers}
    for number in range(rounds):
        for name in list(racers) if number % 2 else reversed(racers):
            dist.barrier()
            speeds[name].append(steps * work.samples * session.world_size / racers[name](steps))
    found = {f"{name}_samples_per_s": statistics.median(each) for name, each in speeds.items()}
    found["ours_of_bare"] = statistics.median(b / a for a, b in zip(speeds["bare"], speeds["ours"], strict=True))
    peak = peak_flops(session.device, None)
    if work.flops_per_sample is not None and peak is not None:
        found["mfu"] = found["ours_samples_per_s"] * work.flops_per_sample / (peak * session.world_size)
    return found
