"""The contract of every strategy.

It is the steps of one process, exact resume, exact evaluation, and equal first values.
"""

import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import (
    CASES,
    CLASSES,
    EXACT,
    FEATURES,
    NAMES,
    OPTIMIZERS,
    SAMPLE,
    STEPS,
    SUBJECTS,
    built,
    eval_parts,
    global_batch,
    load,
    noisy_model,
    oracle,
    part,
    plain_model,
    rates,
    saved,
    snapshot,
)
from toolkit import registry
from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import StrategyConfig
from toolkit.data.randomness import reseed
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import OPTIONAL
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.strategies.spmd import Spmd
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(6)]


def train_cases(session: Session, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for optimizer, criterion, accumulate, size in CASES:
        strategy = built(name, session, plain_model, optimizer, criterion, size, accumulate=accumulate)
        strategy.state()  # what a fresh start does when it looks for a checkpoint must not change the first step
        losses = [strategy.step(part(strategy.share, n, size), rates(n)).loss.item() for n in range(STEPS)]
        found.append((losses, snapshot(strategy)))
    return found


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        *((name, SUBJECTS[name][1]) for name in EXACT),
        *((name, n) for name in ("ddp", "fsdp", "pipeline") for n in (1, 2, 4)),
    ],
)
def test_steps_equal_those_of_one_process_on_the_same_global_batches(strategy: str, world_size: int) -> None:
    ranks = run_ranks(world_size, train_cases, strategy)
    for case, (optimizer, criterion, _, size) in enumerate(CASES):
        losses, weights = oracle(optimizer, criterion, size)
        assert np.allclose(np.sum([rank[case][0] for rank in ranks], axis=0), losses, atol=1e-6), CASES[case]
        for rank in ranks:
            for name, weight in weights.items():
                torch.testing.assert_close(
                    rank[case][1][f"model/{name}"], weight, atol=1e-6, rtol=0, msg=str(CASES[case])
                )


def alone_and_under_ddp(session: Session) -> None:
    plain = built("ddp", session, noisy_model)
    assert isinstance(plain, Spmd)
    assert type(plain._layout._passes) is nn.Sequential  # type: ignore[attr-defined]
    wrapped = nn.parallel.DistributedDataParallel(noisy_model())
    optimizer = OPTIMIZERS["sgd"](wrapped)
    for step in range(3):
        reseed(0, step, 0)
        plain.step(part(plain.share, step), 0.1)
        reseed(0, step, 0)
        inputs, targets = global_batch(step)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        (functional.cross_entropy(wrapped(inputs), targets, reduction="sum") / len(inputs)).backward()
        optimizer.step()
    found = snapshot(plain)
    for name, value in wrapped.module.state_dict().items():
        assert torch.equal(found[f"model/{name}"], value), name


def test_one_rank_has_no_ddp_and_the_bits_that_it_would_have_under_ddp() -> None:
    run_ranks(1, alone_and_under_ddp)


def evaluate_parts(session: Session, name: str, size: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    strategy = built(name, session, noisy_model)
    for step in range(STEPS):
        reseed(5, step, strategy.share.index)
        strategy.step(part(strategy.share, step), 0.05)
    figures = evaluate(strategy, eval_parts(strategy.share, size, 4), size, classification)
    return figures, snapshot(strategy)


@pytest.mark.parametrize("strategy", NAMES)
def test_evaluation_is_that_of_one_process_over_the_same_weights(strategy: str) -> None:
    ranks = run_ranks(SUBJECTS[strategy][1], evaluate_parts, strategy, 25)  # two ranks have nothing in their last batch
    model = noisy_model()
    model.load_state_dict({name.removeprefix("model/"): v for name, v in ranks[0][1].items() if "model/" in name})
    inputs, targets = global_batch(7, 25)
    outputs = model.eval()(inputs)
    for figures, _ in ranks:
        assert figures == ranks[0][0]
        assert figures["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 25
        assert figures["loss"] == pytest.approx(functional.cross_entropy(outputs, targets).item(), rel=1e-6)


def evaluate_too_few(session: Session) -> str:
    strategy = built("ddp", session)
    with pytest.raises(Exception, match="evaluation looked at") as caught:
        evaluate(strategy, eval_parts(strategy.share, 22, 4), 23, classification)
    return str(caught.value)


def test_an_evaluation_that_misses_a_sample_is_refused_with_both_numbers() -> None:
    assert all("22 samples" in message and "23" in message for message in run_ranks(2, evaluate_too_few))


def evaluate_classes_of_the_rank(session: Session) -> str:
    strategy = built("ddp", session)

    def recalls(model: Any, batch: Batch) -> dict[str, Tensor]:
        return {f"recall_{session.rank}": torch.ones(len(batch))}

    with pytest.raises(JobFailedError) as caught:
        evaluate(strategy, eval_parts(strategy.share, 22, 4), 22, recalls)
    return str(caught.value)


def test_figures_that_not_every_rank_has_are_not_added_to_others() -> None:
    for rank, message in enumerate(run_ranks(2, evaluate_classes_of_the_rank)):
        words = f"figures of rank 1 differ from those of the others, and those of this rank are recall_{rank}; return"
        assert words in message


def send_over_gloo(session: Session, name: str) -> str:
    return refused_with(lambda: build_strategy(StrategyConfig(name), replace(session, device=torch.device("cuda", 0))))


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_what_gloo_cannot_carry_between_gpus_is_refused(name: str) -> None:
    expected = f"dist.backend: gloo cannot carry what {name} sends between GPUs; use nccl"
    assert run_ranks(2, send_over_gloo, name) == [expected] * 2


def continue_training(
    session: Session, name: str, starts: list[dict[str, Any]] | None, first: int, last: int
) -> list[dict[str, Any]]:
    """Make steps ``first`` to ``last`` - 1, from this rank's start, if any. Return the state after each."""
    # An average also has state that is no tensor.
    decay = 0.9 if registry.strategy(SUBJECTS[name][0].name).whole_update else None
    strategy = built(name, session, noisy_model, size=25, accumulate=2, ema_decay=decay)
    strategy.state()
    if starts is not None:
        load(strategy, starts[session.rank], first)
    strategy.begin(first)
    states = []
    for step in range(first, last):
        reseed(5, step, strategy.share.index)
        strategy.step(part(strategy.share, step, 25), rates(step))
        states.append(saved(strategy))
    return states


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("strategy", NAMES)
def test_training_continued_in_fresh_processes_has_the_bits_of_an_uninterrupted_one(strategy: str) -> None:
    undisturbed = run_ranks(SUBJECTS[strategy][1], continue_training, strategy, None, 0, 6)
    starts = [states[2] for states in undisturbed]
    resumed = run_ranks(SUBJECTS[strategy][1], continue_training, strategy, starts, 3, 6)
    for before, after in zip(undisturbed, resumed, strict=True):
        for whole, again in zip(before[3:], after, strict=True):
            assert again.keys() == whole.keys()
            assert all(is_same(again[name], whole[name]) for name in whole)


def names(session: Session, name: str) -> tuple[set[str], set[str]]:
    strategy = built(name, session, noisy_model, "adamw")
    before = set(strategy.state())
    strategy.step(part(strategy.share, 0), 0.1)
    return before, set(strategy.state())


@pytest.mark.parametrize("strategy", SAMPLE)
def test_state_has_the_unwrapped_models_names_and_is_complete_before_the_first_step(strategy: str) -> None:
    model = noisy_model()
    slots = {
        f"optim/{name}/{slot}" for name, _ in model.named_parameters() for slot in ("step", "exp_avg", "exp_avg_sq")
    }
    expected = {f"model/{name}" for name in model.state_dict()} | slots
    ranks = 1 if strategy == "local_sgd" else SUBJECTS[strategy][1]  # several have names of their own inside a round
    config, _ = SUBJECTS[strategy]
    for before, after in run_ranks(ranks, names, strategy):
        assert before == after
        assert expected <= before
        # A compressed run continues with the same compression only.
        if registry.strategy(config.name).same_state and config.compression == "none":
            more = {name for name in before - expected if not name.startswith(OPTIONAL)}
            assert not more, (
                f"{config.name} has same_state, and no checkpoint of ddp has its {sorted(more)}: name these update/... "
                "(OPTIONAL of toolkit/ranks/state.py), or take same_state from it in toolkit/registry.py"
            )


def prime(session: Session) -> None:
    made = noisy_model()
    torch.manual_seed(9)
    on_gpu = session.device.type == "cuda"  # where dropout draws from a generator of its own
    before = torch.get_rng_state()
    gpus_before = torch.cuda.get_rng_state() if on_gpu else None
    strategy = build_strategy(StrategyConfig("ddp"), session)
    model = noisy_model()
    optimizer = OPTIMIZERS["sgd"](model)
    torch.set_rng_state(before)
    strategy.build(lambda: model, lambda _: optimizer, criterion_objective(cross_entropy), part(strategy.share, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert gpus_before is None or torch.equal(torch.cuda.get_rng_state(), gpus_before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    assert all(torch.equal(value.cpu(), made.state_dict()[name]) for name, value in model.state_dict().items())


def test_priming_changes_no_weights_buffers_gradients_optimizer_or_random_numbers() -> None:
    run_ranks(2, prime)


class RandomFeatures(nn.Module):
    """A buffer drawn from ``draw``."""

    features: Tensor

    def __init__(self, draw: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(FEATURES, 8, generator=draw))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.features).cos()


def drawn_model(seed: int) -> nn.Module:
    """Return a model with values from an own generator. A job need not seed it alike on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(RandomFeatures(draw), *(nn.Linear(8, n, bias=False) for n in (8, 8, CLASSES)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draw)
    return model


def first_values(session: Session, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    strategy = built(name, session, lambda: drawn_model(session.rank))
    first = snapshot(strategy)
    strategy.step(part(strategy.share, 0), 0.1)
    return first, snapshot(strategy)


@pytest.mark.parametrize("strategy", SAMPLE)
def test_weights_and_buffers_start_as_those_of_rank_0_whatever_a_rank_has_drawn(strategy: str) -> None:
    ranks = run_ranks(SUBJECTS[strategy][1], first_values, strategy)
    expected = drawn_model(0).state_dict()
    for first, stepped in ranks:
        assert all(torch.equal(first[f"model/{name}"], value) for name, value in expected.items())
        weights = {name: value for name, value in ranks[0][1].items() if name.startswith("model/")}
        assert all(torch.equal(stepped[name], value) for name, value in weights.items())


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(FEATURES, CLASSES), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def refusals(session: Session, name: str) -> list[str]:
    messages = []
    for build in (partial(built, name, session, HalfUsed), partial(built, name, session, size=0)):
        with pytest.raises(ConfigError) as caught:
            build()
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("strategy", SAMPLE)
def test_unused_parameters_and_ranks_without_samples_are_refused_before_a_step(strategy: str) -> None:
    for unused, without in run_ranks(SUBJECTS[strategy][1], refusals, strategy):
        assert "idle.weight, idle.bias" in unused
        assert "data.global_batch_size: 0 samples cannot be shared by" in without


def train_bf16(session: Session, name: str) -> tuple[float, torch.dtype]:
    strategy = built(name, session, precision="bf16")
    losses = [strategy.step(part(strategy.share, 0), 0.1).loss.item() for _ in range(5)]
    weight = strategy.state()["model/0.weight"].value
    return losses[-1] - losses[0], weight.dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", SAMPLE)
def test_bf16_computes_in_half_precision_and_keeps_weights_in_fp32(strategy: str) -> None:
    changes, dtypes = zip(*run_ranks(SUBJECTS[strategy][1], train_bf16, strategy), strict=True)
    assert sum(changes) < 0
    assert set(dtypes) == {torch.float32}


def fail_to_compile(session: Session) -> str:
    import torch._dynamo.exc

    def refuse(*_: object) -> Tensor:
        raise torch._dynamo.exc.TorchDynamoException("no compiler here\nand pages of more")

    def model() -> nn.Module:
        made = plain_model()
        made.compile = lambda: made.register_forward_pre_hook(refuse)  # type: ignore[misc, assignment]
        return made

    return refused_with(lambda: built("ddp", session, model, compile=True))


def test_a_model_that_cannot_be_compiled_names_the_key_to_change() -> None:
    (message,) = run_ranks(1, fail_to_compile)
    assert message.startswith("train.compile: torch.compile failed on this model")
    assert "no compiler here); set train.compile: false" in message


def train_compiled(session: Session, name: str) -> list[list[float]]:
    kinds = [built(name, session, accumulate=2, compile=compiling) for compiling in (False, True)]
    return [[kind.step(part(kind.share, n), 0.1).loss.item() for n in range(STEPS)] for kind in kinds]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("strategy", NAMES)
def test_a_compiled_model_trains_like_the_plain_one(strategy: str) -> None:
    for plain, compiled in run_ranks(SUBJECTS[strategy][1], train_compiled, strategy, limit_s=240):
        assert compiled == pytest.approx(plain, abs=1e-5)
