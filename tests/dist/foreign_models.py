"""Models as others write them. Each trains as on one process, or is refused by name.

All take tokens (n, PLACES) and give logits (n, CLASSES).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dist import strategy_cases
from tests.dist.objectives import cross_entropy
from tests.dist.strategy_cases import CLASSES, rates
from toolkit.config import MeshConfig, StrategyConfig
from toolkit.ranks.batch import Batch, Share
from toolkit.strategies import Criterion

BATCH, PLACES, WIDTH, HEADS, TOKENS, STEPS = 8, 4, 8, 4, 16, 3


class Attention(nn.Module):
    """Query, key and value in one Linear, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(*parts)
        return hidden + self.proj(seen.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Gate and up projection in one Linear. The down projection begins with zeros, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return hidden + self.down(functional.silu(gate) * up)


class Places(nn.Module):
    """A vector for each place, from a buffer."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.randn(PLACES, WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.places[: hidden.shape[1]]


class Mean(nn.Module):
    """Over the places."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


class Counts(nn.Module):
    """Keeps a number in an attribute, and saves it beside the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += self.training
        return hidden


def chain(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *between, Mean(), nn.Linear(WIDTH, CLASSES))


class Between(nn.Sequential):
    """Does something of its own before its last layer, in training mode only."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = tokens
        for layer in self[:-1]:
            hidden = layer(hidden)
        return self[-1](self.between(hidden) if self.training else hidden)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * 0.5


class LayerDrop(Between):
    """Draws whether to leave a layer out, as stochastic depth does. The draw here always keeps it."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden if torch.rand(()) >= 0 else hidden * 0.0


def between(kind: type[Between]) -> nn.Sequential:
    return kind(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Mean(), nn.Linear(WIDTH, CLASSES))


def frozen() -> nn.Sequential:
    model = chain(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def summed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    return functional.cross_entropy(outputs, targets, reduction="sum"), None


def mean(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    return functional.cross_entropy(outputs, targets), None


def regularised(outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
    """Once for each part of a batch, however many there are."""
    return functional.cross_entropy(outputs, targets, reduction="sum") + 5.0, None


class Temperature(nn.Module):
    """Learns how sharp the logits are to be."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor([0.3]))

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return summed(outputs * self.power.exp(), targets)


def weighed_wrongly(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(outputs, targets, reduction="sum"), torch.tensor(1.0)


#: An epsilon that keeps Adam from blowing up the rounding of gradients of zero: a key's bias has no other.
OPTIMIZERS = strategy_cases.OPTIMIZERS | {"adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01, eps=1e-3)}
FUSED = {"1.qkv": "colwise:3", "1.proj": "rowwise", "2.gate_up": "colwise:2", "2.down": "rowwise", "4": "gathered"}
WRONG_QKV = FUSED | {"1.qkv": "colwise"}
WRONG_GATE = FUSED | {"2.gate_up": "colwise"}
SEQUENCE = {"0": "rowwise", "2": "sequence", "3": "colwise", "5": "rowwise", "6": "sequence"}


@dataclass(frozen=True)
class Foreign:
    """A model, how it is trained, and the strategies that refuse it, with their words."""

    make: Callable[[], nn.Module]
    criterion: Criterion = cross_entropy
    optimizer: str = "adamw"
    plan: Mapping[str, str] = field(default_factory=dict)  #: where it is to be cut by layers
    sequence: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)  #: name of the strategy: words; "" stands for all others


MODELS: dict[str, Foreign] = {
    "fused projections": Foreign(lambda: chain(Attention(), Gated()), plan=FUSED),
    "fused projections, sgd": Foreign(lambda: chain(Attention(), Gated()), plan=FUSED, optimizer="sgd"),
    "fused qkv as colwise": Foreign(
        lambda: chain(Attention(), Gated()), plan=WRONG_QKV, refused={"tensor": "first difference is at 1.proj"}
    ),
    "fused gate as colwise": Foreign(
        lambda: chain(Attention(), Gated()), plan=WRONG_GATE, refused={"tensor": "first difference is at 2.down"}
    ),
    "no plan": Foreign(lambda: chain(Attention(), Places(), Gated())),
    "positions from a buffer": Foreign(
        lambda: chain(
            Places(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        ),
        plan=SEQUENCE | {"8": "gathered"},
        sequence=True,
        refused={"tensor": "first difference is at 2,"},
    ),
    "a mean over places": Foreign(
        lambda: chain(
            nn.Identity(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Identity(),
        ),
        plan={"0": "rowwise", "2": "sequence", "3": "colwise", "5": "rowwise", "8": "gathered"},
        sequence=True,
        refused={"tensor": "strategy.sequence_parallel"},
    ),
    "something between layers while it is trained": Foreign(
        lambda: between(Between), refused={"pipeline": "between 3 and 4 the model computes something"}
    ),
    "layers left out by chance": Foreign(
        lambda: between(LayerDrop), refused={"pipeline": "between 3 and 4 the model draws random numbers"}
    ),
    "parameter groups": Foreign(lambda: chain(nn.Linear(WIDTH, WIDTH), nn.Tanh()), optimizer="groups"),
    "extra state": Foreign(
        lambda: chain(nn.Linear(WIDTH, WIDTH), Counts()),
        refused=dict.fromkeys(["pipeline", "parameter_server"], "2._extra_state is kept next to"),
    ),
    "frozen parts": Foreign(frozen),
    "a criterion that learns": Foreign(
        lambda: chain(nn.Linear(WIDTH, WIDTH)),
        Temperature(),
        refused=dict.fromkeys(["pipeline", "parameter_server"], "the criterion has parameters, too (power)"),
    ),
    "a criterion that means": Foreign(lambda: chain(nn.Linear(WIDTH, WIDTH)), mean, refused={"": "not a sum over"}),
    "a loss with a constant": Foreign(lambda: chain(nn.Linear(WIDTH, WIDTH)), regularised, refused={"": "not a sum"}),
    "a weight of one": Foreign(lambda: chain(nn.Linear(WIDTH, WIDTH)), weighed_wrongly, refused={"": "the weight of"}),
}

#: On four ranks each.
STRATEGIES: dict[str, StrategyConfig] = {
    "ddp": StrategyConfig("ddp"),
    "fsdp": StrategyConfig("fsdp"),
    "zero": StrategyConfig("zero", mesh=MeshConfig(replicas=2)),
    "parameter_server": StrategyConfig("parameter_server"),
    "tensor": StrategyConfig("tensor", mesh=MeshConfig(tensor=2)),
    "tensor x shards": StrategyConfig("tensor", mesh=MeshConfig(tensor=2, shards=2)),
    "tensor of all": StrategyConfig("tensor"),
    "pipeline": StrategyConfig("pipeline", mesh=MeshConfig(stages=2)),
}


def refusal(model: str, strategy: str) -> str | None:
    """The words with which the two are refused; None where they must go together."""
    found = MODELS[model].refused
    return found.get(strategy.partition(" ")[0], found.get(""))


def sequences(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (BATCH, PLACES), generator=draw), torch.randint(CLASSES, (BATCH,), generator=draw)


def batch(share: Share, step: int) -> Batch | None:
    if not share.count:
        return None
    inputs, targets = sequences(step)
    start, stop = share.bounds(BATCH)
    return Batch((inputs[start:stop], targets[start:stop]), torch.arange(start, stop), BATCH)


def made(foreign: Foreign) -> nn.Module:
    torch.manual_seed(1)
    return foreign.make()


def on_one_process(foreign: Foreign) -> tuple[list[float], dict[str, Any]]:
    """Return losses and state of a plain hand-written loop."""
    model, criterion = made(foreign), copy.deepcopy(foreign.criterion)
    stepper = OPTIMIZERS[foreign.optimizer](model)
    if isinstance(criterion, nn.Module):
        stepper.add_param_group({"params": list(criterion.parameters())})
    # A group's own rate stays in proportion to the step's rate.
    ratios = [group["lr"] / stepper.defaults["lr"] for group in stepper.param_groups]
    losses = []
    for step in range(STEPS):
        inputs, targets = sequences(step)
        loss = criterion(model(inputs), targets)[0] / BATCH
        for group, ratio in zip(stepper.param_groups, ratios, strict=True):
            group["lr"] = rates(step) * ratio
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    if isinstance(criterion, nn.Module):
        state |= {f"criterion/{name}": value for name, value in criterion.state_dict().items()}
    return losses, state
