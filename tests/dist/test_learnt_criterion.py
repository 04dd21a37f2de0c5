"""A learnt criterion: its parameters train and are saved like the model's, or are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import (
    OPTIMIZERS,
    STEPS,
    SUBJECTS,
    global_batch,
    load,
    part,
    plain_model,
    rates,
    saved,
    snapshot,
)
from toolkit.base.errors import ConfigError
from toolkit.config import TrainConfig
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.strategies.update import OptimizerWrapper

pytestmark = pytest.mark.dist


class Tempered(nn.Module):
    """Cross entropy with a learnt temperature. A class weighs as many tokens as its number."""

    def __init__(self, *, weighs: bool, first: float = 0.5) -> None:
        super().__init__()
        self.weighs = weighs
        self.temperature = nn.Parameter(torch.tensor([first]))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        losses = functional.cross_entropy(outputs * self.temperature.exp(), targets, reduction="none")
        return ((losses * targets).sum(), targets.sum().float()) if self.weighs else (losses.sum(), None)


def built(session: Session, name: str, optimizer: str, criterion: nn.Module, **train: Any) -> Strategy:
    strategy = build_strategy(SUBJECTS[name][0], session, TrainConfig(**train))
    strategy.build(plain_model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0))
    return strategy


WAYS = [("sgd", False, 1, None), ("adamw", True, 3, None), ("adamw", False, 1, 0.5)]


def train(session: Session, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for optimizer, weighs, accumulate, clip in WAYS:
        criterion = Tempered(weighs=weighs, first=0.5 + session.rank)  # rank 0's first values count
        strategy = built(session, name, optimizer, criterion, accumulate=accumulate, clip_norm=clip)
        strategy.state()
        losses = [strategy.step(part(strategy.share, step), rates(step)).loss.item() for step in range(STEPS)]
        found.append((losses, snapshot(strategy)))
    return found


def alone(optimizer: str, weighs: bool, clip: float | None) -> tuple[list[float], dict[str, Tensor]]:
    """One process, in which the optimizer has both."""
    model, criterion, losses = plain_model(), Tempered(weighs=weighs), []
    both = nn.ModuleDict({"model": model, "criterion": criterion})
    stepper = OPTIMIZERS[optimizer](both)
    for step in range(STEPS):
        inputs, targets = global_batch(step)
        total, weight = criterion(model(inputs), targets)
        loss = total / (len(inputs) if weight is None else weight)
        stepper.param_groups[0]["lr"] = rates(step)
        stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), float("inf") if clip is None else clip)
        stepper.step()
        losses.append(loss.item())
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    return losses, weights | {"criterion/temperature": criterion.temperature.detach()}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor x replicas"])
def test_what_a_criterion_learns_is_trained_as_on_one_process_and_saved(name: str) -> None:
    ranks = run_ranks(SUBJECTS[name][1], train, name, limit_s=180.0)
    for case, (optimizer, weighs, _, clip) in enumerate(WAYS):
        losses, weights = alone(optimizer, weighs, clip)
        assert weights["criterion/temperature"].item() != pytest.approx(0.5, abs=1e-3)
        assert [sum(each) for each in zip(*(rank[case][0] for rank in ranks), strict=True)] == pytest.approx(
            losses, abs=1e-5
        )
        for rank in ranks:
            state = rank[case][1]
            for key, value in weights.items():
                torch.testing.assert_close(state[key], value, atol=1e-5, rtol=0, msg=f"{WAYS[case]} {key}")
            slot = "momentum_buffer" if optimizer == "sgd" else "exp_avg"
            assert f"optim/criterion/temperature/{slot}" in state
            assert torch.equal(state["criterion/calls"], ranks[0][case][1]["criterion/calls"])


def resume(session: Session) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state after four steps, and after two that another strategy went on from."""
    first, second = (built(session, "ddp", "adamw", Tempered(weighs=False)) for _ in range(2))
    first.state()
    for step in range(4):
        if step == 2:
            load(second, saved(first), step)
        first.step(part(first.share, step), rates(step))
    for step in (2, 3):
        second.step(part(second.share, step), rates(step))
    return snapshot(first), snapshot(second)


def test_a_resume_goes_on_with_what_the_criterion_has_learnt_bit_for_bit() -> None:
    for undisturbed, resumed in run_ranks(2, resume):
        assert undisturbed.keys() == resumed.keys()
        assert [name for name in undisturbed if not torch.equal(undisturbed[name], resumed[name])] == []


def refuse(session: Session, name: str) -> str:
    return refused_with(lambda: built(session, name, "sgd", Tempered(weighs=False)))


@pytest.mark.parametrize("name", ["pipeline", "parameter_server", "local_sgd"])
def test_strategies_that_train_the_model_alone_refuse_it_by_name(name: str) -> None:
    for message in run_ranks(SUBJECTS[name][1], refuse, name):
        assert message.startswith(f"strategy.name: {name} trains the model alone, and the criterion has parameters")
        assert "(temperature)" in message


def test_a_parameter_that_only_the_optimizer_knows_is_refused() -> None:
    model, stray = plain_model(), nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"this SGD has parameters that neither .* \(one of shape \(1,\)\)"):
        OptimizerWrapper(model, torch.optim.SGD([*model.parameters(), stray], 0.1))


def test_a_criterion_whose_parameters_the_optimizer_has_already_gets_no_second_group() -> None:
    model, criterion = plain_model(), Tempered(weighs=False)
    groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, 0.1)  # type: ignore[arg-type]
    OptimizerWrapper(model, optimizer, criterion=criterion).apply(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, pytest.approx(0.1)]
