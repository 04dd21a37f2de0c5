"""Trainings of a few steps on the ranks' devices, the same by hand, and reports."""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bench.loop import steps_of
from tests.dist.objectives import cross_entropy
from tests.dist.strategy_cases import part, plain_model, rates
from tests.gpu import throughput
from tests.waiting import wait_for
from toolkit import hang
from toolkit.config import OptimConfig, StrategyConfig, TrainConfig
from toolkit.files.rundir import RunDir
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.strategies.layouts import autocast
from toolkit.train.optim import build_optimizer

STEPS, SAMPLES = 6, 16


@dataclass(frozen=True)
class Case:
    """A training, and the tolerated relative distance of its losses from the hand-written loop's."""

    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: str = "sgd"
    tolerance: float = 1e-4
    has_images: bool = False

    @property
    def is_fused(self) -> bool:
        """True if the optimizer is: torch has no fused SGD for sharded weights."""
        return self.optim == "adamw" or self.strategy.name in ("ddp", "pipeline")


#: The loops differ in the order of their sums; in half precision each rounds to two or three digits.
HALF = 3e-2
CASES: dict[str, Case] = {
    "ddp": Case(),
    "ddp, adamw": Case(optim="adamw", tolerance=1e-3),
    "ddp, clipped": Case(train=TrainConfig(clip_norm=0.1, skip_bad_steps=True)),
    "ddp, bf16": Case(train=TrainConfig(precision="bf16"), tolerance=HALF),
    "ddp, fp16": Case(train=TrainConfig(precision="fp16"), tolerance=HALF),
    "ddp, compiled": Case(train=TrainConfig(compile=True)),
    "ddp, channels_last": Case(train=TrainConfig(channels_last=True), has_images=True, tolerance=1e-3),
    **{
        f"ddp, sent as {kind}": Case(StrategyConfig("ddp", compression=kind), tolerance=HALF)
        for kind in ("bf16", "fp16")
    },
    # With all values sent only the rounding differs.
    "ddp, sent by topk": Case(StrategyConfig("ddp", compression="topk", compression_ratio=1.0), tolerance=1e-3),
    "fsdp": Case(StrategyConfig("fsdp"), optim="adamw", tolerance=1e-3),
    "fsdp, bf16": Case(StrategyConfig("fsdp"), TrainConfig(precision="bf16"), tolerance=HALF),
    "fsdp, two blocks ahead": Case(StrategyConfig("fsdp", prefetch_blocks=2)),
    "fsdp, compiled": Case(StrategyConfig("fsdp"), TrainConfig(compile=True)),
    "fsdp, offloaded": Case(StrategyConfig("fsdp", cpu_offload=True), optim="adamw", tolerance=1e-3),
    "fsdp, offloaded, clipped": Case(
        StrategyConfig("fsdp", cpu_offload=True), TrainConfig(clip_norm=0.1, skip_bad_steps=True), "adamw", 1e-3
    ),
    "zero": Case(StrategyConfig("zero")),
    "tensor": Case(StrategyConfig("tensor")),
    "pipeline": Case(StrategyConfig("pipeline")),
}


def small_images() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4))


def batch_of(case: Case, share: Share, step: int, device: torch.device) -> Batch:
    """Return the share's part of a step's batch on ``device``, as a loader gives it."""
    if not case.has_images:
        return part(share, step, SAMPLES).to(device)
    draw = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(SAMPLES, 3, 8, 8, generator=draw), torch.randint(4, (SAMPLES,), generator=draw)
    start, stop = share.bounds(SAMPLES)
    return Batch((inputs[start:stop], targets[start:stop]), torch.arange(start, stop), SAMPLES).to(device)


def train(session: Session, case: Case) -> dict[str, Any]:
    """Make the steps of ``case`` on all ranks. Return the losses, the device, and whether the optimizer is fused."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(build_optimizer(OptimConfig(case.optim, lr=0.1), model))
        return made[-1]

    strategy = build_strategy(case.strategy, session, case.train)
    model: Callable[[], nn.Module] = small_images if case.has_images else plain_model
    strategy.build(
        model, optimizer, criterion_objective(cross_entropy), batch_of(case, strategy.share, 0, session.device)
    )
    losses = []
    for step in range(STEPS):
        output = strategy.step(batch_of(case, strategy.share, step, session.device), rates(step))
        losses.append(strategy.sum({"loss": output.loss})["loss"])
    return {"losses": losses, "fused": bool(made[0].param_groups[0].get("fused")), "device": str(session.device)}


def by_hand(session: Session, case: Case) -> list[float]:
    """Return the losses of the same training on this rank's device alone, without the toolkit."""
    device = session.device
    model = (small_images if case.has_images else plain_model)().to(device)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, weight_decay=0.0),
    }
    optimizer = kinds[case.optim](model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=case.train.precision == "fp16")
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates(step)
        inputs, targets = batch_of(case, Share(0, 1), step, device)
        with autocast(device, case.train.precision):
            outputs: Tensor = model(inputs)
        loss = nn.functional.cross_entropy(outputs.float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        # The limit of clipping is for the true gradients, so they are unscaled first.
        scaler.unscale_(optimizer)
        if case.train.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.train.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def both(session: Session, case: Case) -> tuple[dict[str, Any], list[float]]:
    """Return ours, and the losses of the loop by hand."""
    return train(session, case), by_hand(session, case)


def steps_without_sync(session: Session, train: TrainConfig) -> int:
    """Make steps in which torch raises where the host waits for the GPU. It does not watch collectives."""
    sizes = throughput.GptSizes(layers=2, heads=2, width=64, vocabulary=256, length=32)
    work = throughput.gpt(sizes, 4, train.precision, compile=False)
    trainer = throughput.training_of(replace(work, train=train), session, log_every=100)
    steps = steps_of(trainer)
    is_on_gpu = session.device.type == "cuda"
    for step in range(20):
        if is_on_gpu and step == 5:  # the first steps page-lock memory
            torch.cuda.set_sync_debug_mode("error")
        next(steps)
    if is_on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    next(steps)  # ends the twentieth
    return trainer.step


TRAINS = {
    "fp32": TrainConfig(),
    "bf16": TrainConfig(precision="bf16"),
    "fp16": TrainConfig(precision="fp16"),
    "clipped, judged, averaged": TrainConfig(clip_norm=1.0, skip_bad_steps=True, spike_factor=10.0, ema_decay=0.99),
}


def hang_report(session: Session) -> tuple[str, list[str]]:
    """Return the rank's stacks, and the collectives that its flight recorder has."""
    environ = {"TOOLKIT_SUPERVISED": "1", "TOOLKIT_RUN_DIR": str(session.run_dir), "TOOLKIT_ATTEMPT": "1"}
    folder = RunDir(session.run_dir).attempt_logs(1)
    folder.mkdir(parents=True, exist_ok=True)
    hang.install_stack_dump(session.rank, environ)
    for _ in range(3):
        dist.all_reduce(torch.ones(8, device=session.device))
    if session.device.type == "cuda":
        torch.cuda.synchronize()
    os.kill(os.getpid(), hang.ASK)
    path = hang.stack_path(folder, session.rank)
    wait_for(lambda: path.read_text().endswith(hang.ANSWERED), 60, "the rank's answer")
    dump = pickle.loads(hang.flight_path(folder, session.rank).read_bytes())
    return path.read_text(), [entry["profiling_name"] for entry in dump.get("entries", ())]
