"""Clipping, skipped steps, averages and pruning where a rank has a part of a model.

It has some layers, or some of a layer.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import run_ranks
from tests.dist.strategy_cases import eval_parts, fill, global_batch, token_loss
from tests.dist.test_steps import (
    BAD,
    CLIP,
    DECAY,
    STEPS,
    alone,
    assert_close,
    built,
    pruned_alone,
    same,
    spoil,
    tensors,
    train,
    warmed_up,
)
from toolkit.base.errors import ConfigError
from toolkit.config import MeshConfig, PruningConfig, StrategyConfig
from toolkit.config.strategy import ParameterServerConfig, PipelineConfig
from toolkit.ranks.session import Session
from toolkit.strategies.update import MADE
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(3)]

#: Cut across outputs, across inputs, and with all outputs on every rank; the first two layers lie whole on each rank.
PLAN = {"2": "colwise", "4": "rowwise", "5": "gathered"}
CASES: dict[str, tuple[StrategyConfig, int]] = {
    "tensor x replicas": (StrategyConfig("tensor", tensor_plan=PLAN, mesh=MeshConfig(tensor=2)), 4),
    "tensor x shards": (StrategyConfig("tensor", tensor_plan=PLAN, mesh=MeshConfig(tensor=2, shards=2)), 4),
    # the second rank has the PReLU alone: nothing to prune
    "pipeline": (StrategyConfig("pipeline", pipeline=PipelineConfig(split=["1", "2"])), 3),
    "pipeline x replicas": (StrategyConfig("pipeline", mesh=MeshConfig(replicas=2)), 4),
}


def layered_model() -> nn.Module:
    torch.manual_seed(1)
    hidden = nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)
    return nn.Sequential(*hidden, nn.Linear(8, 4))


def everything(session: Session, name: str) -> dict[str, Any]:
    """One after the other in the same processes, which cost more than what they do."""
    config = CASES[name][0]
    return {
        "clip": clipped(session, config),
        "skip": left_out(session, config),
        "average": averaged(session, config),
        "prune": pruned(session, config),
        "resume": resumed(session, config),
    }


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    return run_ranks(CASES[request.param][1], everything, request.param)


CLIPS = [("plain sgd", cross_entropy, 1), ("adamw", token_loss, 3)]


def clipped(session: Session, config: StrategyConfig) -> list[Any]:
    states = []
    for optimizer, criterion, accumulate in CLIPS:
        options = {"clip_norm": CLIP, "accumulate": accumulate}
        strategy = built(config, session, optimizer, layered_model, criterion, **options)
        states.append((train(strategy), tensors(strategy)))
    return states


def test_clipping_is_torchs_on_one_process_though_no_rank_has_the_whole_gradient(found: list[dict[str, Any]]) -> None:
    for (optimizer, criterion, _), *cases in zip(CLIPS, *(rank["clip"] for rank in found), strict=True):
        model, expected = alone(optimizer, criterion, clip=CLIP, model=layered_model)
        assert max(expected) > CLIP > 0, "something was clipped"
        for (verdicts, norms), state in cases:
            assert norms == pytest.approx(expected, rel=1e-5)
            assert verdicts == [None] * STEPS
            assert_close(state, model)


def left_out(session: Session, config: StrategyConfig) -> Any:
    """Spoil one share in steps 0, 5 and 25, as ``spoil`` does. Return verdicts, changes and the state."""
    options: dict[str, Any] = {"skip_bad_steps": True, "spike_factor": 10.0, "ema_decay": DECAY}
    strategy = built(config, session, "adamw", layered_model, **options)
    is_last = strategy.share.index == strategy.share.count - 1
    changed, verdicts = list[str](), list[Any]()
    for step in range(28):
        before = tensors(strategy) if step in BAD else {}
        verdicts += train(strategy, range(step, step + 1), partial(spoil, is_last))[0]
        if step in BAD:
            made_up = "optim/" if step == 0 else "-"  # slots that nobody has filled are forgotten in the first step
            changed += [name for name in same(before, tensors(strategy)) if not name.startswith(made_up)]
    return verdicts, changed, tensors(strategy)


def test_a_bad_batch_of_one_share_changes_no_weights_moments_or_average(
    found: list[dict[str, Any]],
) -> None:
    model, _ = alone("adamw", steps=[step for step in range(28) if step not in BAD], model=layered_model)
    for verdicts, changed, state in (rank["skip"] for rank in found):
        assert verdicts == [BAD.get(step, MADE) for step in range(28)]
        assert changed == []
        assert_close(state, model)


def averaged(session: Session, config: StrategyConfig) -> Any:
    plain, evaluated = (built(config, session, "adamw", layered_model, ema_decay=DECAY) for _ in range(2))
    train(plain)
    train(evaluated, range(3))
    evaluate(evaluated, eval_parts(evaluated.share, 25, 4), 25, classification)
    train(evaluated, range(3, STEPS))
    figures = evaluate(evaluated, eval_parts(evaluated.share, 25, 4), 25, classification)
    return same(tensors(plain), tensors(evaluated)), figures, tensors(evaluated)


def test_the_average_is_torchs_and_is_what_an_evaluation_sees_of_every_part(found: list[dict[str, Any]]) -> None:
    average = AveragedModel(layered_model(), avg_fn=warmed_up)
    average.update_parameters(layered_model())  # the first one is taken as it is
    model, _ = alone("adamw", after=lambda model, _: average.update_parameters(model), model=layered_model)
    inputs, targets = global_batch(7, 25)
    loss = nn.functional.cross_entropy(average.module(inputs), targets).item()
    for different, figures, state in (rank["average"] for rank in found):
        assert different == []
        assert_close(state, average.module, "ema")
        assert_close(state, model)
        assert figures["loss"] == pytest.approx(loss, rel=1e-5)
        assert abs(figures["loss"] - nn.functional.cross_entropy(model(inputs), targets).item()) > 1e-4


def pruned(session: Session, config: StrategyConfig) -> Any:
    ways = [(False, config)]
    if config.name == "tensor":  # in which every output lies whole on one rank
        ways.append((True, replace(config, tensor_plan={"2": "gathered", "5": "gathered"})))
    states = []
    for structured, way in ways:
        once = PruningConfig(0.4, structured=structured, start_step=3, end_step=3)
        strategy = built(way, session, "adamw", layered_model, pruning=once, ema_decay=DECAY)
        train(strategy)
        states.append((structured, strategy.step_metrics()["train/sparsity"], tensors(strategy)))
    with pytest.raises(ConfigError) as caught:
        built(config, session, "adamw", layered_model, pruning=PruningConfig(0.4, structured=True, end_step=3))
    return states, str(caught.value)


def test_the_threshold_over_all_parts_prunes_what_torch_prunes_of_the_whole(found: list[dict[str, Any]]) -> None:
    for states, refusal in (rank["prune"] for rank in found):
        assert refusal.startswith("train.pruning.structured: ")
        for structured, sparsity, state in states:
            model, masks = pruned_alone(structured, layered_model)
            assert {name for name in state if name.startswith("mask/")} == {f"mask/{name}" for name in masks}
            for name, mask in masks.items():
                assert torch.equal(state[f"mask/{name}"], mask.bool()), name
                assert not state[f"ema/{name}"][mask == 0].any(), name
            assert_close(state, model)
            assert structured or sparsity == pytest.approx(0.4, abs=0.01)


ALL = {
    "clip_norm": CLIP,
    "skip_bad_steps": True,
    "spike_factor": 10.0,
    "ema_decay": DECAY,
    "pruning": PruningConfig(0.5, start_step=2, end_step=6, every_steps=2),
}


def resumed(session: Session, config: StrategyConfig, options: dict[str, Any] = ALL) -> list[str]:
    """Return the names that differ after six steps. After three, a second object was filled and went on."""
    first, second = (built(config, session, "adamw", layered_model, **options) for _ in range(2))
    train(first, range(3))
    start = tensors(first)
    plain = {name: entry.value for name, entry in first.state().items() if not isinstance(entry.value, Tensor)}
    for name, entry in second.state().items():
        if name in start:
            fill(entry, start[name])
    second.on_loaded({**plain, "step": 3})
    train(first, range(3, 6))
    train(second, range(3, 6))
    return same(tensors(first), tensors(second))


def test_a_resume_with_all_of_it_is_bit_for_bit(found: list[dict[str, Any]]) -> None:
    assert [rank["resume"] for rank in found] == [[]] * len(found)


SERVED = {key: ALL[key] for key in ("clip_norm", "pruning")}


def served(session: Session) -> dict[str, Any]:
    config = StrategyConfig("parameter_server")
    states = []
    for structured in (False, True):
        once = PruningConfig(0.4, structured=structured, start_step=3, end_step=3)
        strategy = built(config, session, "adamw", layered_model, pruning=once)
        train(strategy)
        states.append((structured, strategy.step_metrics().get("train/sparsity"), tensors(strategy)))
    return {"clip": clipped(session, config), "prune": states, "resume": resumed(session, config, SERVED)}


def test_the_only_parameter_server_clips_and_prunes_for_its_workers() -> None:
    server, *workers = run_ranks(3, served)
    for number, (optimizer, criterion, _) in enumerate(CLIPS):
        model, expected = alone(optimizer, criterion, clip=CLIP, model=layered_model)
        (_, norms), state = server["clip"][number]
        assert norms == pytest.approx(expected, rel=1e-5)
        assert_close(state, model)
    for structured, sparsity, state in server["prune"]:
        model, masks = pruned_alone(structured, layered_model)
        assert all(torch.equal(state[f"mask/{name}"], mask.bool()) for name, mask in masks.items())
        assert_close(state, model)
        assert structured or sparsity == pytest.approx(0.4, abs=0.01)
    assert [rank["resume"] for rank in (server, *workers)] == [[]] * 3


def clipped_by_tickets(session: Session) -> list[Any]:
    return clipped(session, StrategyConfig("parameter_server", parameter_server=ParameterServerConfig(mode="async")))


def test_an_asynchronous_server_clips_each_ticket() -> None:
    server, _ = run_ranks(2, clipped_by_tickets)  # the ticket of a worker that is alone is the global batch
    for ((_, norms), state), (optimizer, criterion, _) in zip(server, CLIPS, strict=True):
        model, expected = alone(optimizer, criterion, clip=CLIP, model=layered_model)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert_close(state, model)
