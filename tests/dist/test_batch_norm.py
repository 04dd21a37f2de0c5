"""BatchNorm on several ranks: its statistics, its mode, and the one that sees all samples."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, STEPS, SUBJECTS, eval_parts, global_batch, part, rates, whole
from toolkit.config import TrainConfig
from toolkit.ranks.session import Session
from toolkit.strategies import Strategy, build_strategy, criterion_objective
from toolkit.train.evaluate import evaluate

pytestmark = pytest.mark.dist

NORM = "1"


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def frozen() -> nn.Module:
    model = normed()
    model[1].eval()
    with torch.no_grad():
        model.get_buffer(f"{NORM}.running_mean").fill_(0.3)
    return model


def asleep() -> nn.Module:
    """As libraries hand out a model that was trained before."""
    return normed().eval()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def built(session: Session, name: str, model: Callable[[], nn.Module], **train: Any) -> Strategy:
    strategy = build_strategy(SUBJECTS[name][0], session, TrainConfig(**train))
    strategy.build(model, sgd, criterion_objective(cross_entropy), part(strategy.share, 0))
    return strategy


def state_of(strategy: Strategy) -> dict[str, Tensor]:
    found = {name: entry for name, entry in strategy.state().items() if isinstance(entry.value, Tensor)}
    return {name: whole(entry).clone() for name, entry in found.items()}


def alone(model: nn.Module, steps: int = STEPS, start: int = 0, stop: int = 10) -> nn.Module:
    """One process on the samples ``start`` to ``stop`` of each global batch."""
    stepper = sgd(model)
    for step in range(steps):
        inputs, targets = global_batch(step)
        total, _ = cross_entropy(model(inputs[start:stop]), targets[start:stop])
        stepper.param_groups[0]["lr"] = rates(step)
        stepper.zero_grad()
        (total / (stop - start)).backward()
        stepper.step()
    return model


def after_steps(session: Session, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the states after one step, after four, and after four with reads between."""
    quiet, watched = (built(session, name, normed, ema_decay=0.5) for _ in range(2))
    for strategy in (quiet, watched):
        strategy.prepare_split_data()
        strategy.step(part(strategy.share, 0), 0.0)
    first = state_of(watched)
    for step in range(1, STEPS):
        for strategy in (quiet, watched):
            strategy.step(part(strategy.share, step), rates(step))
        state_of(watched)
        evaluate(watched, eval_parts(watched.share, 25, 4), 25, classification)
    return first, state_of(quiet), state_of(watched)


@pytest.mark.parametrize("name", ["ddp", "pipeline x replicas"])
def test_where_data_are_split_statistics_are_the_mean_of_what_the_ranks_have_seen(name: str) -> None:
    """One rank's statistics would be wrong for the others. A read of the state must not change a bit."""
    ranks = run_ranks(SUBJECTS[name][1], after_steps, name)
    if name == "ddp":
        cuts = [10 * share // 3 for share in range(4)]
        own = [alone(normed(), 1, a, b).get_buffer(f"{NORM}.running_mean") for a, b in pairwise(cuts)]
        expected = torch.stack(own).mean(0)
        torch.testing.assert_close(ranks[0][0][f"model/{NORM}.running_mean"], expected, atol=1e-6, rtol=0)
    for first, quiet, watched in ranks:
        assert [key for key in quiet if not torch.equal(quiet[key], watched[key])] == []
        for key in (f"{kind}/{NORM}.{value}" for kind in ("model", "ema") for value in ("running_mean", "running_var")):
            assert torch.equal(first[key], ranks[0][0][key])
            assert torch.equal(quiet[key], ranks[0][1][key])


class Centred(nn.Module):
    """A module whose training pass reads a running buffer. Codebooks and observers do so, too."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * inputs.detach().mean(0)
        return inputs - self.centre


def centred() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Centred(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def looked_at(session: Session, name: str) -> list[dict[str, Tensor]]:
    quiet, watched = (built(session, name, centred) for _ in range(2))
    for step in range(STEPS):
        for strategy in (quiet, watched):
            strategy.step(part(strategy.share, step), rates(step))
        state_of(watched)
    return [state_of(quiet), state_of(watched)]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "local_sgd", "pipeline x replicas"])
def test_a_save_changes_no_training_that_reads_buffers_which_follow_the_samples(name: str) -> None:
    for quiet, watched in run_ranks(SUBJECTS[name][1], looked_at, name):
        assert [key for key in quiet if not torch.equal(quiet[key], watched[key])] == []


def train_a_little(session: Session, name: str, model: Callable[[], nn.Module]) -> dict[str, Tensor]:
    strategy = built(session, name, model)
    for step in range(STEPS):
        strategy.step(part(strategy.share, step), rates(step))
        evaluate(strategy, eval_parts(strategy.share, 25, 4), 25, classification)
    return state_of(strategy)


@pytest.mark.parametrize("name", ["ddp", "pipeline", "parameter_server"])
def test_a_frozen_batch_norm_stays_frozen_through_steps_and_evaluations(name: str) -> None:
    expected = alone(frozen()).state_dict()
    for state in run_ranks(SUBJECTS[name][1], train_a_little, name, frozen):
        for key in (f"{NORM}.running_mean", f"{NORM}.num_batches_tracked"):
            assert torch.equal(state[f"model/{key}"], expected[key])
        torch.testing.assert_close(state["model/3.bias"], expected["3.bias"], atol=1e-6, rtol=0)


def test_a_model_that_is_asleep_as_a_whole_is_trained_as_a_whole() -> None:
    (state,) = run_ranks(1, train_a_little, "ddp", asleep)
    expected = alone(normed()).state_dict()
    assert int(state[f"model/{NORM}.num_batches_tracked"]) == STEPS
    torch.testing.assert_close(state["model/0.weight"], expected["0.weight"], atol=1e-6, rtol=0)


def conv() -> nn.Module:
    torch.manual_seed(2)
    layers = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers)


def synchronised(session: Session, name: str, accumulate: int = 1) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for model in (normed, conv):
        strategy = built(session, name, model, sync_batch_norm=True)
        losses = [strategy.step(part(strategy.share, step), rates(step)).loss.item() for step in range(STEPS)]
        evaluate(strategy, eval_parts(strategy.share, 25, 4), 25, classification)
        buffers = {name: value for name, value in state_of(strategy).items() if "running" in name}
        found.append((losses, buffers))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_synchronised_batch_norm_is_that_of_one_process_however_the_shares_differ(name: str) -> None:
    ranks = run_ranks(3, synchronised, name)  # 10 samples: 3, 3 and 4
    for case, make in enumerate((normed, conv)):
        model = make()
        losses = []
        stepper = sgd(model)
        for step in range(STEPS):
            inputs, targets = global_batch(step)
            total, _ = cross_entropy(model(inputs), targets)
            stepper.param_groups[0]["lr"] = rates(step)
            stepper.zero_grad()
            (total / 10).backward()
            stepper.step()
            losses.append(total.item() / 10)
        assert [sum(each) for each in zip(*(rank[case][0] for rank in ranks), strict=True)] == pytest.approx(
            losses, abs=1e-5
        )
        for rank in ranks:
            for key, value in rank[case][1].items():
                expected = model.state_dict()[key.removeprefix("model/")]
                torch.testing.assert_close(value, expected, atol=1e-5, rtol=0)
