"""CPU time of a step with each option of the update.

A step is a whole one of a small model, in one thread and one process. The contenders take turns, since machines drift.
Printed are medians of the rounds, and of the ratio to torch's optimizer without options.

    python -m tests.bench.steps [--steps 40] [--rounds 15]
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.bench import record
from toolkit.config import OptimConfig, PruningConfig, TrainConfig
from toolkit.strategies.update import OptimizerWrapper
from toolkit.train.optim import build_optimizer

WAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clip_norm": {"clip_norm": 1.0},
    "skip_bad_steps, spike_factor": {"skip_bad_steps": True, "spike_factor": 5.0},
    "ema_decay": {"ema_decay": 0.99},
    "pruning": {"pruning": PruningConfig(0.5, start_step=0, end_step=1)},
}
PLAIN = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.05),
}


def contenders(name: str) -> Iterator[tuple[str, nn.Module, OptimizerWrapper]]:
    for way, train in {"torch's, not fused": {}, **WAYS}.items():
        model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        made = build_optimizer(OptimConfig(name), model) if way in WAYS else PLAIN[name](model)
        yield way, model, OptimizerWrapper(model, made, TrainConfig(**train))


def step_us(model: nn.Module, update: OptimizerWrapper, inputs: torch.Tensor, steps: int) -> float:
    started = time.thread_time()
    for _ in range(steps):
        update.begin()
        update.scaled(model(inputs).square().mean()).backward()
        update.apply(1e-3)
    return (time.thread_time() - started) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=15)
    record.add_option(parser)
    options = parser.parse_args()
    rows = []
    torch.set_num_threads(1)
    inputs = torch.randn(64, 784)
    for name in PLAIN:
        racers = list(contenders(name))
        times = [
            [step_us(model, update, inputs, options.steps) for _, model, update in racers]
            for _ in range(options.rounds)
        ]
        # The first contender is torch's own optimizer.
        plain, *_ = columns = [*zip(*times, strict=True)]
        for (way, _, _), column in zip(racers, columns, strict=True):
            ratio = statistics.median(ours / other for ours, other in zip(column, plain, strict=True))
            rows.append(record.row(f"{way}: {name}", column, "us", to=plain, peer="torch's, not fused"))
            print(f"{name:<7}{way:<30}{statistics.median(column):>7.0f} us{ratio:>7.2f}")
    record.write(options.json, rows)


if __name__ == "__main__":
    main()
