"""Shared parts of the tests of strategies: small models, global batches, and their oracle.

The oracle is a loop on one process.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import device
from toolkit.config import MeshConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import LocalSgdConfig
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Sharded
from toolkit.strategies import Criterion, Strategy, build_strategy, criterion_objective
from toolkit.strategies.custom import Custom

FEATURES, CLASSES, BATCH, STEPS = 6, 4, 10, 4
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), 0.01),  # its first slots are not zeros
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), 0.01),  # has its slots before the first step
    "groups": lambda model: torch.optim.AdamW(groups(model), 0.01, weight_decay=0.1),
}
#: What the biases' group of ``groups`` has of the schedule's learning rate.
SLOW = 1e-3


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: biases with own rate, decay and betas, and the rest. A piece of a model may lack one."""
    named = list(model.named_parameters())
    own = {"lr": 0.01 * SLOW, "weight_decay": 0.0, "betas": (0.5, 0.9)}
    return [
        {"params": [parameter for name, parameter in named if name.endswith("bias")], **own},
        {"params": [parameter for name, parameter in named if not name.endswith("bias")]},
    ]


#: Every way to train, to be held to the contract: its section of the config, and on how many ranks.
SUBJECTS: dict[str, tuple[StrategyConfig, int]] = {
    "ddp": (StrategyConfig("ddp"), 3),
    "fsdp": (StrategyConfig("fsdp"), 3),
    "zero": (StrategyConfig("zero"), 3),
    "parameter_server": (StrategyConfig("parameter_server"), 3),
    "hsdp": (StrategyConfig("fsdp", mesh=MeshConfig(replicas=2)), 4),
    "tensor": (StrategyConfig("tensor"), 2),
    "tensor x replicas": (StrategyConfig("tensor", mesh=MeshConfig(tensor=2)), 4),
    "tensor x shards": (StrategyConfig("tensor", mesh=MeshConfig(tensor=2, shards=2)), 4),
    "pipeline": (StrategyConfig("pipeline"), 3),
    "pipeline x replicas": (StrategyConfig("pipeline", mesh=MeshConfig(replicas=2)), 4),
}
EXACT = tuple(SUBJECTS)
#: Those whose steps are not, or not quite, the ones of one process: held to all else, and to oracles of their own.
SUBJECTS |= {
    "local_sgd": (StrategyConfig("local_sgd", local_sgd=LocalSgdConfig(round_steps=3)), 3),
    **{
        kind: (StrategyConfig("ddp", compression=kind, compression_ratio=0.2, compression_rank=1), 3)
        for kind in ("int8", "powersgd")
    },
    "topk": (StrategyConfig("ddp", compression="topk", compression_ratio=0.2, compression_average=0.9), 3),
}
NAMES = tuple(SUBJECTS)
#: For what can hardly hold for some of them and not for their combinations: these are for `make soak`.
SAMPLE = [
    pytest.param(name, marks=[pytest.mark.soak] if name in ("hsdp", "int8", "powersgd") or " x " in name else [])
    for name in NAMES
]


class Residual(nn.Module):
    """A block; its 5 rows and biases divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 5), nn.Linear(5, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.out(self.into(inputs).tanh())


def plain_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), Residual(), Residual(), nn.Linear(8, CLASSES))


def noisy_model() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers that differ between ranks."""
    torch.manual_seed(1)
    hidden = nn.Linear(FEATURES, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.3)
    return nn.Sequential(*hidden, nn.Linear(33, 20), nn.ReLU(), nn.Linear(20, CLASSES))


def global_batch(step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(size, FEATURES, generator=draw)
    return inputs, torch.randint(CLASSES, (size,), generator=draw)


def part(share: Share, step: int, size: int = BATCH) -> Batch | None:
    if not share.count:
        return None
    inputs, targets = global_batch(step, size)
    start, stop = share.bounds(size)
    return Batch((inputs[start:stop], targets[start:stop]), torch.arange(start, stop), size).to(torch.device(device()))


def token_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of a mean over unevenly spread tokens. Sample i has ``targets[i]`` of them, class 0 none."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return (losses * targets).sum(), targets.sum().float()


def built(
    name: str,
    session: Session,
    model: Callable[[], nn.Module] = plain_model,
    optimizer: str = "sgd",
    criterion: Criterion = cross_entropy,
    size: int = BATCH,
    **options: Any,
) -> Strategy:
    strategy = build_strategy(SUBJECTS[name][0], session, TrainConfig(**options))
    strategy.build(model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0, size))
    return strategy


def snapshot(strategy: Strategy | Custom) -> dict[str, Tensor]:
    """Return a copy of the state's tensors on the CPU, of sharded ones the whole."""
    return {name: whole(entry).clone().cpu() for name, entry in strategy.state().items() if is_tensor(entry)}


def saved(strategy: Strategy) -> dict[str, Any]:
    """Return the whole state as a checkpoint would give it back: :func:`snapshot`, and JSON."""
    others = {name: entry.value for name, entry in strategy.state().items() if not is_tensor(entry)}
    return {**snapshot(strategy), **json.loads(json.dumps(others))}


def load(strategy: Strategy, state: Mapping[str, Any], step: int) -> None:
    """Continue from what :func:`saved` gave, as a resume does, with ``step`` as the next one."""
    live = strategy.state()
    assert live.keys() == state.keys()
    tensors = {name: entry for name, entry in live.items() if is_tensor(entry)}
    for name, entry in tensors.items():
        fill(entry, state[name])
    strategy.on_loaded({name: state[name] for name in live.keys() - tensors} | {"step": step})


def is_tensor(entry: Entry) -> bool:
    return isinstance(entry.value, Tensor)


def whole(entry: Any) -> Tensor:
    if not isinstance(entry, Sharded):
        return entry.value.detach()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [*entry.pieces()])
    found = torch.full(entry.global_shape, torch.nan)
    for pieces in parts:
        for value, offsets in pieces:
            found[_place(offsets, value)] = value
    return found


def fill(entry: Any, value: Tensor) -> None:
    """Copy into the live ``entry`` its part of the whole ``value``."""
    pieces = entry.pieces() if isinstance(entry, Sharded) else [(entry.value, (0,) * value.ndim)]
    for live, offsets in pieces:
        live.copy_(value[_place(offsets, live)])


def _place(offsets: Sequence[int], value: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, value.shape, strict=True))


def rates(step: int) -> float:
    return 0.1 / (step + 1)


def oracle(optimizer: str, criterion: Criterion, size: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same training, written as anyone would write it without ranks."""
    model = plain_model()
    stepper = OPTIMIZERS[optimizer](model)
    ratios = [group["lr"] / stepper.defaults["lr"] for group in stepper.param_groups]
    losses = []
    for step in range(STEPS):
        inputs, targets = global_batch(step, size)
        total, weight = criterion(model(inputs), targets)
        loss = total / (len(inputs) if weight is None else weight)
        for group, ratio in zip(stepper.param_groups, ratios, strict=True):
            group["lr"] = rates(step) * ratio
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses, model.state_dict()


CASES = [
    ("sgd", cross_entropy, 1, 10),
    ("sgd", cross_entropy, 3, 10),
    ("adamw", cross_entropy, 1, 10),
    ("adamw", cross_entropy, 3, 10),
    ("nadam", cross_entropy, 1, 10),
    ("adagrad", cross_entropy, 1, 10),
    ("sgd", cross_entropy, 3, 5),  # shares of one and two samples, worked through in three parts
    ("sgd", token_loss, 1, 10),
    ("adamw", token_loss, 3, 10),
    ("groups", cross_entropy, 1, 10),
]


def eval_parts(share: Share, size: int, batch_size: int) -> list[Batch]:
    """Unpadded: this share's range in batches, every share the same number of them."""
    if not share.count:
        return []
    inputs, targets = global_batch(7, size)
    start, stop = share.bounds(size)
    calls = math.ceil(math.ceil(size / share.count) / batch_size)
    cuts = [(min(start + i * batch_size, stop), min(start + (i + 1) * batch_size, stop)) for i in range(calls)]
    return [Batch((inputs[a:b], targets[a:b]), torch.arange(a, b), size) for a, b in cuts]
