"""What our loops add to a step of a hand-written one on one rank, in CPU time of all threads.

    python -m tests.bench.one_rank [--steps 50] [--turns 8] [--rounds 15]

The step is that of loop.py, without DDP: one process and one thread of torch's. The job is given its own model, so what
its strategy adds on one rank counts. The loops take turns; the printed ones are the medians of the rounds, in
microseconds a step, and what is beyond the hand-written loop of the same round.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from tests.bench import loop, record
from tests.dist.ranks import run_ranks
from toolkit.ranks.session import Session


def parts(session: Session) -> tuple[DataLoader[Any], nn.Module, SGD]:
    """Return loader, model and optimizer of somebody's loop on one rank."""
    data = TensorDataset(*loop.tensors())
    net = loop.model()
    return DataLoader(data, loop.BATCH, sampler=RandomSampler(data)), net, SGD(net.parameters(), 0.05, momentum=0.9)


CONTENDERS: Mapping[str, Callable[[Session], loop.Round]] = {
    "hand-written": partial(loop.by_hand, parts=parts),
    "job": loop.supervised,
    "toolkit.start": partial(loop.own_loop, parts=parts),
}


def race(session: Session, steps: int, turns: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of CPU a step, in each round of each loop."""
    loop.set_launch_variables(session)
    trainers = {name: make(session) for name, make in CONTENDERS.items()}
    for train in trainers.values():
        train(steps)
    found: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        spent = dict.fromkeys(trainers, 0.0)
        for turn in range(turns):
            for name in list(trainers) if turn % 2 else reversed(trainers):
                began = time.process_time()
                trainers[name](steps)
                spent[name] += time.process_time() - began
        for name, seconds in spent.items():
            found[name].append(seconds / (steps * turns) * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=loop.LOG_EVERY, help="steps of a loop's turn")
    parser.add_argument("--turns", type=int, default=8, help="turns that make a round")
    parser.add_argument("--rounds", type=int, default=15)
    record.add_option(parser)
    options = parser.parse_args()
    found = run_ranks(1, race, options.steps, options.turns, options.rounds, limit_s=loop.LIMIT_S)[0]
    rows = [record.row(f"CPU of a step, {name}", values, "us", better="less") for name, values in found.items()]
    for name, values in found.items():
        print(f"{name:<14}{statistics.median(values):>8.0f} us of CPU a step ({min(values):.0f} to {max(values):.0f})")
    for name in (name for name in found if name != "hand-written"):
        more = [ours - plain for ours, plain in zip(found[name], found["hand-written"], strict=True)]
        print(f"{name:<14}{statistics.median(more):>+8.0f} us beyond ({min(more):+.0f} to {max(more):+.0f}; goal: 100)")
        rows.append(record.row(f"beyond the hand-written loop, {name}", more, "us", better="less"))
    record.write(options.json, rows)


if __name__ == "__main__":
    main()
