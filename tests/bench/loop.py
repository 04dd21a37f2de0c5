"""Steps per second of our loop beside a hand-written DDP loop, accelerate and Lightning.

``make bench`` runs it. The model is small (784-256-10), with batch 64 a rank and two DDP ranks on gloo: the step is
short, so the cost of a loop shows. Machines drift, and a step differs from the next by a tenth. So the contenders take
turns in the same two processes, with some steps each, and a round is the sum of many turns. The median of the rounds'
ratios is compared. The cost of supervision is below that noise: one contender pays it 20 times in each step.
accelerate and Lightning come with the ``bench`` extra and are left out where they are not installed.

    python -m tests.bench.loop [--steps 50] [--turns 8] [--rounds 7]
"""

import argparse
import importlib.util
import logging
import math
import os
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.bench import record
from tests.dist.objectives import cross_entropy
from tests.dist.ranks import run_ranks
from toolkit.base.process_limits import limits
from toolkit.config import CheckpointConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.learning_rate import build_schedule
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader
from toolkit.nodes.agent.reports import Inbox, Outbox, addresses
from toolkit.ranks.agreement import Gate
from toolkit.ranks.report import AgentReporter, Reporter
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.evaluate import Evaluations, Hooks
from toolkit.train.loop import Trainer
from toolkit.train.optim import build_optimizer
from toolkit.train.run_checkpoints import Checkpoints
from toolkit.train.saver import identity
from toolkit.train.user_loop import TrainingRun

RANKS, BATCH, SHAPE, CLASSES, LOG_EVERY = 2, 64, (1, 28, 28), 10, 50
#: How often one contender pays for supervision in each step.
OFTEN = 20
SUPERVISED_OFTEN = f"ours, {OFTEN} times"
NEVER = 10**9
#: On a busy machine a run takes several times as long as its few minutes; this one hangs.
LIMIT_S = 3600.0
Round = Callable[[int], float]  # trains for a number of steps; the seconds they took


def timed(train: Callable[[int], None]) -> Round:
    """A round whose every second counts."""

    def run(steps: int) -> float:
        started = time.perf_counter()
        train(steps)
        return time.perf_counter() - started

    return run


def tensors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(BATCH * RANKS * 50, *SHAPE, generator=draw), torch.randint(CLASSES, (BATCH * RANKS * 50,))


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(SHAPE), 256), nn.ReLU(), nn.Linear(256, CLASSES))


class Endless:
    """A DataLoader without end, an epoch after the other."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches = loader, iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


#: The loader, the model and the optimizer of a loop that somebody has written.
Parts = Callable[[Session], tuple[DataLoader[Any], nn.Module, SGD]]


def parts_by_hand(session: Session) -> tuple[DataLoader[Any], DistributedDataParallel, SGD]:
    """Those of a loop on several ranks."""
    data = TensorDataset(*tensors())
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, RANKS, session.rank))
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    return loader, ddp, SGD(ddp.parameters(), 0.05, momentum=0.9)


def by_hand(session: Session, parts: Parts = parts_by_hand) -> Round:
    """What anyone writes first: DDP, DistributedSampler, DataLoader, and the loss printed now and then."""
    batches, net, optimizer = parts(session)
    loader = Endless(batches)

    def train(steps: int) -> None:
        for step in range(steps):
            inputs, targets = next(loader)
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return timed(train)


def bare(session: Session) -> Round:
    """DDP on one batch over and over: no loader, nothing logged. What is left is the same for all."""
    inputs, targets = (tensor[:BATCH] for tensor in tensors())
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = SGD(ddp.parameters(), 0.05, momentum=0.9)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()

    return timed(train)


def steps_of(trainer: Trainer) -> Iterator[None]:
    """Make a step at each ``next``, after what is due after the step before."""
    trainer._hooks = Hooks()
    trainer._evaluations = Evaluations(trainer._session, trainer._strategy, trainer._breakdown, None, trainer._hooks, 0)
    trainer._begin()
    for batch in trainer._steps_of(trainer._batches(), lambda: False):
        trainer._train_step(batch)
        yield


def ours(session: Session) -> Round:
    """The real loop: the step's own seed, metrics, TensorBoard and progress included. No save is due in a turn."""
    strategy = build_strategy(StrategyConfig(), session)
    loader = Loader(InMemory(*tensors()), global_batch_size=BATCH * session.world_size, seed=0, share=strategy.share)
    optim = OptimConfig(lr=0.05)
    strategy.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), loader.at(0))
    checkpoints = Checkpoints(CheckpointConfig(NEVER), session, strategy, identity(JobConfig()))
    config = TrainConfig(epochs=NEVER, max_steps=NEVER, log_every=LOG_EVERY, eval_every=NEVER)
    schedule = partial(build_schedule, optim)
    trainer = Trainer(config, session, strategy, loader, schedule=schedule, checkpoints=checkpoints)
    made = steps_of(trainer)

    def train(steps: int) -> None:
        for _ in range(steps):
            next(made)

    return timed(train)


def own_loop(session: Session, parts: Parts = parts_by_hand) -> Round:
    """The hand-written loop, its DataLoader included, brought to ``toolkit.start()``, as it runs in a job."""
    reporter = to_agent(session)
    config = JobConfig(train=TrainConfig(log_every=LOG_EVERY), checkpoint=CheckpointConfig(NEVER))
    run = TrainingRun(config, replace(session, reporter=reporter, attempt=3))
    loader, net, optimizer = parts(session)
    run.resumable(model=net, optimizer=optimizer)
    batches = run.steps(loader, total=NEVER)  # one generator for all turns, as one training has

    def train(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)

    return timed(train)


def supervised(session: Session) -> Round:
    """Ours as in a job: with the gate, and reports to the node's agent."""
    return ours(replace(session, reporter=to_agent(session)))


class OftenGate:
    """A gate that is asked ``OFTEN`` times in each step."""

    pending = None

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def boundary(self, n: int) -> str | None:
        return [self.gate.boundary(n) for _ in range(OFTEN)][-1]


class OftenReporter(AgentReporter):
    """Reports ``OFTEN`` times in each step, and sends as many more messages."""

    def progress(self, **fields: Any) -> None:
        self._every_s = limits().report_every_s / OFTEN
        for _ in range(OFTEN):
            super().progress(**fields)


def often_supervised(session: Session) -> Round:
    """Ours as it runs in a job, with the costs of supervision ``OFTEN`` times."""
    return ours(replace(session, gate=cast(Gate, OftenGate(session.gate)), reporter=to_agent(session, OftenReporter)))


def to_agent(session: Session, kind: type[AgentReporter] = AgentReporter) -> Reporter:
    """Return a reporter as in a job, which sends to an inbox of this process.

    A thread empties the inbox, as the agent does.
    """
    names = addresses(f"bench {os.getpid()} {time.monotonic_ns()}")
    inbox = Inbox(names)

    def serve() -> None:
        while select.select([inbox], [], [])[0]:
            inbox.take()

    threading.Thread(target=serve, daemon=True).start()
    return kind(Outbox(names), 1, session.rank, session.activity)


def with_accelerate(session: Session) -> Round:
    """accelerate's own example, on the process group that is open."""
    from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]

    accelerator = Accelerator(cpu=True)
    net = model()
    loader = DataLoader(TensorDataset(*tensors()), BATCH, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, SGD(net.parameters(), 0.05, momentum=0.9), loader)
    endless = Endless(loader)

    def train(steps: int) -> None:
        for step in range(steps):
            inputs, targets = next(endless)
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if step % LOG_EVERY == 0:
                loss.item()

    return timed(train)


def with_lightning(session: Session) -> Round:
    """Lightning as its guide shows it, without logger, bar and checkpoints.

    Its start-up is not counted.
    """
    import lightning  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found, unused-ignore]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.seconds = 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> SGD:
            return SGD(self.parameters(), 0.05, momentum=0.9)

        def on_train_start(self) -> None:
            self.seconds = time.perf_counter()

        def on_train_end(self) -> None:
            self.seconds = time.perf_counter() - self.seconds

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module, loader = Module(), DataLoader(TensorDataset(*tensors()), BATCH, shuffle=True)

    def train(steps: int) -> float:
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
        trainer = lightning.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=steps, **quiet)
        trainer.fit(module, loader)
        return module.seconds

    return train


PEERS = {"accelerate": with_accelerate, "lightning": with_lightning}


def contenders() -> dict[str, Callable[[Session], Round]]:
    """All that can run here."""
    peers = {name: make for name, make in PEERS.items() if importlib.util.find_spec(name)}
    own: dict[str, Callable[[Session], Round]]
    own = {"ours": supervised, SUPERVISED_OFTEN: often_supervised, "toolkit.start": own_loop}
    return {"hand-written": by_hand, **own, "bare DDP": bare} | peers


def race(session: Session, steps: int, turns: int, rounds: int) -> dict[str, list[float]]:
    """Steps per second in each round of each contender."""
    set_launch_variables(session)
    trainers = {name: make(session) for name, make in contenders().items()}
    speeds: dict[str, list[float]] = {name: [] for name in trainers}
    for train in trainers.values():
        train(20)  # warms up
    for _ in range(rounds):
        seconds = dict.fromkeys(trainers, 0.0)
        for turn in range(turns):
            # No contender always follows the same one.
            for name in list(trainers) if turn % 2 else reversed(trainers):
                torch.distributed.barrier()
                seconds[name] += trainers[name](steps)
        for name in trainers:
            speeds[name].append(steps * turns / seconds[name])
    return speeds


def set_launch_variables(session: Session) -> None:
    """The peers read them, and find the process group open already."""
    os.environ.update(RANK=str(session.rank), LOCAL_RANK=str(session.rank), WORLD_SIZE=str(RANKS))
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GROUP_RANK="0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=LOG_EVERY, help="steps of a contender's turn")
    parser.add_argument("--turns", type=int, default=8, help="turns that make a round")
    parser.add_argument("--rounds", type=int, default=7)
    record.add_option(parser)
    options = parser.parse_args()
    speeds = run_ranks(RANKS, race, options.steps, options.turns, options.rounds, limit_s=LIMIT_S)[0]
    reference = speeds["hand-written"]
    print(f"{'loop':<14}{'steps/s':>9}{'of hand-written':>18}  (median and extremes of {options.rounds} rounds)")
    for name, values in speeds.items():
        ratios = [value / other for value, other in zip(values, reference, strict=True)]
        spread = f"{min(ratios):>9.2f} to {max(ratios):.2f}"
        print(f"{name:<14}{statistics.median(values):>9.1f}{statistics.median(ratios):>18.2f}{spread}")
    pairs = zip(speeds["ours"], speeds[SUPERVISED_OFTEN], strict=True)
    # Both pay for supervision, one once and one OFTEN times: the difference is OFTEN - 1 times its cost.
    costs = [100 * (once / often - 1) / (OFTEN - 1) for once, often in pairs]
    print(f"agreement and reports cost {statistics.median(costs):+.2f} % of a step (goal: below 0.5 %)")
    pairs = zip(reference, speeds["toolkit.start"], strict=True)
    cost = statistics.median(by_hand / started - 1 for by_hand, started in pairs)
    print(f"toolkit.start costs {cost:+.2%} of a hand-written loop's step (goal: below 2 %)")
    to, peer = reference, "hand-written"
    rows = [record.row(f"steps by {name}", speeds[name], "1/s", to=to, peer=peer, better="more") for name in speeds]
    own, plain = speeds["ours"], speeds["bare DDP"]
    rows.append(record.row("steps by ours, of bare DDP", own, "1/s", to=plain, peer="bare DDP", better="more"))
    rows.append(record.row("agreement and reports, of a step", costs, "%", better="less"))
    record.write(options.json, rows)
    for missing in PEERS.keys() - speeds.keys():
        print(f"{missing:<14}  not installed: pip install 'slurm-batch-toolkit[integrations]'")


if __name__ == "__main__":
    main()
