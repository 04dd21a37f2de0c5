"""The share of a step that a pipeline's ranks idle, beside the schedule's formula.

    python -m tests.bench.pipeline [RANKS]

trains a Llama of 8 blocks on two ranks (one machine, gloo, one thread each) with every schedule and several numbers of
micro-batches, all of the same size. A rank works in its forward and backward passes, and idles for the rest of the
step. The idle time is the schedule's bubble, (p - 1) / (m + p - 1) with p ranks and m micro-batches, and with v stages
on each rank (p - 1) / (v * m + p - 1) (https://arxiv.org/abs/2104.04473). Transfers, the optimizer and stages of
unequal length add to it. Configurations take turns, and the fastest step of each counts, since other load of the
machine can only lengthen a step. More ranks than CPUs share them, and their idle times mean nothing.

The last column is the greatest difference of a step's loss from that of the same training on one process.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from jobs.language_model import next_token
from jobs.llama import Llama, LlamaSizes
from tests.bench import record
from tests.dist.ranks import run_ranks
from toolkit.config import StrategyConfig
from toolkit.config.strategy import PipelineConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import Objective, Strategy, build_strategy

NEXT_TOKEN = Objective(lambda model, batch: next_token(model(batch.inputs), batch.targets))
SIZES, LENGTH, PER_MICRO_BATCH, TURNS, STAGES_PER_RANK = (
    LlamaSizes(256, layers=8, width=192, heads=4, kv_heads=4, hidden=512),
    64,
    2,
    5,
    2,
)
SCHEDULES, MICRO_BATCHES = ("gpipe", "1f1b", "interleaved"), (2, 4, 8)
LR = 1e-3


def batch(micro_batches: int) -> Batch:
    size = PER_MICRO_BATCH * micro_batches
    text = torch.randint(256, (size, LENGTH + 1), generator=torch.Generator().manual_seed(micro_batches))
    return Batch((text[:, :-1], text[:, 1:]), torch.arange(size), size)


def built(session: Session, schedule: str, micro_batches: int) -> Strategy:
    torch.manual_seed(0)
    pipeline = PipelineConfig(schedule, micro_batches, stages_per_rank=STAGES_PER_RANK)
    strategy = build_strategy(StrategyConfig("pipeline", pipeline=pipeline), session)
    adam = torch.optim.AdamW
    strategy.build(lambda: Llama(SIZES), lambda model: adam(model.parameters()), NEXT_TOKEN, batch(micro_batches))
    return strategy


class Clock:
    """The seconds that the stages of this rank compute.

    It times torch's calls for one pass of one micro-batch.
    """

    def __init__(self) -> None:
        self.computed_s = 0.0
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(PipelineStage, name, self._timed(getattr(PipelineStage, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.computed_s += time.perf_counter() - began

        return timed


def measure(session: Session) -> dict[tuple[str, int], tuple[list[float], list[float], list[float]]]:
    """Return for each configuration the seconds, computing seconds and loss of each step."""
    clock = Clock()
    kinds = {(schedule, count): built(session, schedule, count) for count in MICRO_BATCHES for schedule in SCHEDULES}
    found: dict[tuple[str, int], tuple[list[float], list[float], list[float]]] = {key: ([], [], []) for key in kinds}
    for _ in range(TURNS):
        for key, strategy in kinds.items():
            torch.distributed.barrier()
            clock.computed_s, began = 0.0, time.perf_counter()
            loss = strategy.step(batch(key[1]), LR).loss
            for values, value in zip(
                found[key], (time.perf_counter() - began, clock.computed_s, loss.item()), strict=True
            ):
                values.append(value)
    return found


def alone(micro_batches: int) -> list[float]:
    """The losses of the same steps, written as anyone would without ranks."""
    torch.manual_seed(0)
    model, losses = Llama(SIZES), []
    adam = torch.optim.AdamW(model.parameters(), LR)
    inputs, targets = batch(micro_batches).inputs, batch(micro_batches).targets
    for _ in range(TURNS):
        summed = next_token(model(inputs), targets)
        loss = summed.total / summed.weight
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return losses


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    laps = STAGES_PER_RANK if schedule == "interleaved" else 1
    return (ranks - 1) / (laps * micro_batches + ranks - 1)


def main() -> None:
    """Print a line for each schedule and number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="?", default=2)
    record.add_option(parser)
    args = parser.parse_args()
    ranks: int = args.ranks
    rows = []
    measured = run_ranks(ranks, measure, limit_s=600)
    print(f"{ranks} ranks: idle measured (of each rank), and as the formula has it; a step; off one process by")
    for count in MICRO_BATCHES:
        expected, laps = alone(count), dict[str, list[float]]()
        for schedule in SCHEDULES:
            steps = list(zip(*(zip(*of[schedule, count], strict=True) for of in measured), strict=True))
            # A step lasts as long as its slowest rank.
            fastest = min(steps, key=lambda step: max(took for took, *_ in step))
            took = max(took for took, *_ in fastest)
            idle = [1 - computed / took for _, computed, _ in fastest]
            off = max(abs(sum(part for *_, part in step) - loss) for step, loss in zip(steps, expected, strict=True))
            laps[schedule] = [1000 * max(took for took, *_ in step) for step in steps]
            title, formula = f"{count} micro-batches, {schedule}", 100 * bubble(schedule, ranks, count)
            shares = [100 * share for share in idle]
            rows.append(record.row(f"{title}: idle", shares, "%", to=[formula] * ranks, peer="the formula's"))
            rows.append(record.row(f"{title}: a step", laps[schedule], "ms", to=laps["gpipe"], peer="gpipe's"))
            rows.append(record.row(f"{title}: off one process", [off], "of the loss"))
            each = "  ".join(f"{share:4.0%}" for share in idle)
            print(
                f"{count:3} micro-batches, {schedule:12} {statistics.mean(idle):4.0%} ({each}), "
                f"{bubble(schedule, ranks, count):4.0%}; {1000 * took:6.0f} ms; {off:.1e}",
                flush=True,
            )
    record.write(args.json, rows)


if __name__ == "__main__":
    main()
