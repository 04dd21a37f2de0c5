"""Where the time of a step goes, in our loops and in plain ones.

The contenders are those of loop.py.

    python -m tests.bench.parts [--turns 40]

The functions below are timed while the contenders take turns of ``LOG_EVERY`` steps. A part holds the parts that are
called within it. The medians of the turns are printed, in microseconds a step. A clock costs 0.2 microseconds a call.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.bench import loop, record
from tests.dist.ranks import run_ranks
from toolkit.data.loader import Loader
from toolkit.ranks.session import Session
from toolkit.strategies.objective import Objective
from toolkit.strategies.update import OptimizerWrapper
from toolkit.train import feed
from toolkit.train import loop as training
from toolkit.train.loop import LoopEngine, Trainer
from toolkit.train.loss_windows import LossWindow
from toolkit.train.user_loop import TrainingRun

#: What is timed, in the order of a step.
PARTS: dict[str, tuple[Any, str]] = {
    "seeds": (training, "reseed"),
    "batch": (Loader, "at"),
    "model and loss": (Objective, "__call__"),
    "of that the model, through DDP": (DistributedDataParallel, "__call__"),
    "backward, gradients summed": (Tensor, "backward"),
    "update": (OptimizerWrapper, "apply"),
    "of that the optimizer": (SGD, "step"),
    "loss kept": (LossWindow, "add"),
    "step counted and reported": (LoopEngine, "_count_step"),
    "logging": (Trainer, "_write"),
    "boundary": (LoopEngine, "_boundary"),
    "seeds of toolkit.start": (feed, "reseed"),
    "run.log": (TrainingRun, "log"),
    "between two steps of toolkit.start": (TrainingRun, "_end_step"),
    "of that metrics written": (TrainingRun, "_write"),
}
CONTENDERS = {
    "ours": loop.supervised,
    "bare DDP": loop.bare,
    "toolkit.start": loop.own_loop,
    "hand-written": loop.by_hand,
}


def clocked(function: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return ``function``, whose time is added to ``seconds``."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - began

    return run


def race(session: Session, turns: int) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of each part in a step, for each turn of each contender."""
    loop.set_launch_variables(session)
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, clocked(getattr(owner, attribute), name, seconds))
    trainers = {name: make(session) for name, make in CONTENDERS.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trainers}
    for turn in range(-1, turns):  # the first one warms up
        for name, train in trainers.items():
            torch.distributed.barrier()
            seconds.update(dict.fromkeys(seconds, 0.0))
            whole = train(loop.LOG_EVERY)
            for part, took in {"step": whole, **seconds}.items():
                if turn >= 0:
                    found[name].setdefault(part, []).append(took / loop.LOG_EVERY * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    record.add_option(parser)
    options = parser.parse_args()
    found = run_ranks(loop.RANKS, race, options.turns, limit_s=loop.LIMIT_S)[0]
    rows = []
    print(f"{'us a step':<34}" + "".join(f"{name:>14}" for name in found))
    for part in ["step", *PARTS]:
        print(f"{part:<34}" + "".join(f"{statistics.median(each[part]):>14.0f}" for each in found.values()))
        for name, each in found.items():
            rows.append(record.row(f"{part}: {name}", each[part], "us"))
    record.write(options.json, rows)


if __name__ == "__main__":
    main()
