"""The update of weights, beside torch's own: clipping, skipped steps, fp16, averages, pruning."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim.swa_utils import AveragedModel

from tests.dist.objectives import classification, cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import (
    SUBJECTS,
    eval_parts,
    global_batch,
    noisy_model,
    part,
    plain_model,
    rates,
    token_loss,
    whole,
)
from toolkit.config import PruningConfig, StrategyConfig, TrainConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import local
from toolkit.strategies import Criterion, Strategy, build_strategy, criterion_objective
from toolkit.strategies.update import MADE, NOT_FINITE, OVERFLOW, SPIKE, ShardedParameters
from toolkit.train.evaluate import evaluate

pytestmark = [pytest.mark.dist, pytest.mark.sample(6)]

STEPS, SIZE = 6, 10
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1, fused=True),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
}


def built(
    name: str | StrategyConfig,
    session: Session,
    optimizer: str = "adamw",
    model: Callable[[], nn.Module] = plain_model,
    criterion: Criterion = cross_entropy,
    **train: Any,
) -> Strategy:
    config = SUBJECTS[name][0] if isinstance(name, str) else name
    strategy = build_strategy(config, session, TrainConfig(**train))
    strategy.build(model, OPTIMIZERS[optimizer], criterion_objective(criterion), part(strategy.share, 0, SIZE))
    strategy.state()
    return strategy


def train(strategy: Strategy, steps: range = range(STEPS), spoil: Callable[[int, Batch], Batch] | None = None) -> Any:
    """The verdicts on the steps and the norms of their gradients."""
    verdicts, norms = [], []
    for step in steps:
        batch = part(strategy.share, step, SIZE)
        output = strategy.step(spoil(step, batch) if spoil else batch, rates(step))
        verdicts.append(None if output.skipped is None else int(output.skipped))
        norms.append(strategy.step_metrics().get("train/grad_norm"))
    return verdicts, norms


def alone(
    optimizer: str,
    criterion: Criterion = cross_entropy,
    steps: range | list[int] = range(STEPS),
    clip: float | None = None,
    after: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    model: Callable[[], nn.Module] = plain_model,
) -> tuple[nn.Module, list[float]]:
    """The loop on one process, as anyone would write it."""
    made, norms = model(), []
    stepper = OPTIMIZERS[optimizer](made)
    for step in steps:
        inputs, targets = global_batch(step, SIZE)
        total, weight = criterion(made(inputs), targets)
        for group in stepper.param_groups:
            group["lr"] = rates(step)
        stepper.zero_grad()
        (total / (len(inputs) if weight is None else weight)).backward()
        norms.append(clip_grad_norm_(made.parameters(), float("inf") if clip is None else clip).item())
        stepper.step()
        after(made, stepper)
    return made, norms


def assert_close(state: dict[str, Tensor], model: nn.Module, kind: str = "model", atol: float = 1e-6) -> None:
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(state[f"{kind}/{name}"], weight, atol=atol, rtol=0, msg=f"{kind}/{name}")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def tensors(strategy: Strategy) -> dict[str, Tensor]:
    """Return the tensors of the state as copies on the CPU. Sharded ones are whole."""
    entries = {name: entry for name, entry in strategy.state().items() if isinstance(entry.value, Tensor)}
    return {name: whole(entry).clone().cpu() for name, entry in entries.items()}


CLIPS = [("plain sgd", cross_entropy, 1), ("adamw", token_loss, 3), ("sgd", token_loss, 1)]
CLIP = 0.3


def clip_cases(session: Session, name: str) -> list[Any]:
    found = []
    for optimizer, criterion, accumulate in CLIPS:
        if optimizer == "sgd" and name != "ddp":
            continue  # torch's fused SGD does not know shards
        strategy = built(name, session, optimizer, criterion=criterion, clip_norm=CLIP, accumulate=accumulate)
        found.append((optimizer, criterion, train(strategy), tensors(strategy)))
    return found


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 3), ("fsdp", 4), ("zero", 2)])
def test_clipping_is_torchs_on_one_process_however_gradients_lie_and_shares_differ(name: str, ranks: int) -> None:
    cases = [case for rank in run_ranks(ranks, clip_cases, name) for case in rank]
    for optimizer, criterion, (verdicts, norms), state in cases:
        model, expected = alone(optimizer, criterion, clip=CLIP)
        assert max(expected) > CLIP > 0, "something was clipped"
        assert norms == pytest.approx(expected, rel=1e-5)
        assert verdicts == [None] * STEPS
        assert_close(state, model)


def norm_on_a_mesh(session: Session) -> tuple[float, float, float]:
    """Return norms of tensors. A mesh of 2 x 2 ranks cuts them in every way, and their sizes are odd."""
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(2)
    wholes = [torch.randn(5, 7) for _ in range(5)]
    ways = [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    placed = [distribute_tensor(tensor, mesh, way) for tensor, way in zip(wholes, ways, strict=False)]
    tensors = [*placed, wholes[-1]]
    parts = ShardedParameters(tensors)
    found = parts.norm({tensor: local(tensor) for tensor in tensors}, torch.device("cpu"))
    nothing = parts.norm({}, torch.device("cpu"))
    apart = [ShardedParameters([tensor]).norm({tensor: local(tensor)}, torch.device("cpu")) for tensor in tensors]
    alone = [norm.item() for norm in apart]
    assert alone == pytest.approx([tensor.norm().item() for tensor in wholes], rel=1e-6)
    return found.item(), nothing.item(), torch.cat(wholes).norm().item()


def test_a_norm_counts_each_element_once_however_a_mesh_cuts_the_tensors() -> None:
    for found, nothing, expected in run_ranks(4, norm_on_a_mesh):
        assert found == pytest.approx(expected, rel=1e-6)
        assert nothing == 0


BAD = {0: NOT_FINITE, 5: NOT_FINITE, 25: SPIKE}


def spoil(share: int, step: int, batch: Batch) -> Batch:
    """Spoil one rank's batch. It is not finite in steps 0 and 5, and a thousand times too large in step 25."""
    factor = {0: torch.nan, 5: torch.inf, 25: 1e3}.get(step, 1.0)
    return Batch((batch.inputs * (factor if share == 1 else 1.0), batch.targets), batch.positions, batch.global_count)


def leave_out(session: Session, name: str) -> list[Any]:
    found = []
    for optimizer in ("sgd", "adamw") if name == "ddp" else ("adamw",):
        strategy = built(name, session, optimizer, skip_bad_steps=True, spike_factor=10.0, ema_decay=0.8)
        changed, verdicts = [], []
        for step in range(28):
            before = tensors(strategy)
            verdicts += train(strategy, range(step, step + 1), lambda n, batch: spoil(session.rank, n, batch))[0]
            after = tensors(strategy)
            if step in BAD:
                made_up = "optim/" if step == 0 else "-"  # slots that nobody has filled are forgotten in the first step
                changed += [name for name in same(before, after) if not name.startswith(made_up)]
        found.append((optimizer, verdicts, changed, after))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_bad_batch_of_one_rank_changes_no_weights_moments_counters_or_average(name: str) -> None:
    for optimizer, verdicts, changed, state in (case for rank in run_ranks(2, leave_out, name) for case in rank):
        assert verdicts == [BAD.get(step, MADE) for step in range(28)]
        assert changed == []
        assert_close(state, alone(optimizer, steps=[step for step in range(28) if step not in BAD])[0])


def nan_in_batch_norm(session: Session) -> list[str]:
    strategy = built("ddp", session, "sgd", noisy_model, skip_bad_steps=True, ema_decay=0.8)
    train(strategy, range(2))
    before = tensors(strategy)
    poison = lambda n, batch: Batch((batch.inputs * torch.nan, batch.targets), batch.positions, SIZE)  # noqa: E731
    verdicts, _ = train(strategy, range(2, 4), poison)
    assert verdicts == [NOT_FINITE, NOT_FINITE]
    return same(before, tensors(strategy))


def refuse_nadam(session: Session) -> str:
    OPTIMIZERS["nadam"] = lambda model: torch.optim.NAdam(model.parameters(), 0.01)
    return refused_with(lambda: built("ddp", session, "nadam", skip_bad_steps=True))


def nan_and_refusal(session: Session) -> tuple[list[str], str]:
    return nan_in_batch_norm(session), refuse_nadam(session)


def test_running_statistics_forget_a_skipped_batch_and_other_optimizers_are_refused() -> None:
    ((changed, message),) = run_ranks(1, nan_and_refusal)
    assert changed == []
    assert message.startswith("train.skip_bad_steps: this NAdam cannot leave out a step on the device")


DECAY = 0.8


def warmed_up(average: Tensor, weight: Tensor, count: Any) -> Tensor:
    """For torch's AveragedModel: ``count`` is 1 in the first step."""
    return average.lerp(weight, 1 - min(DECAY, count.item() / (9 + count.item())))


def average(session: Session, name: str) -> Any:
    plain, evaluated = (built(name, session, ema_decay=DECAY) for _ in range(2))
    train(plain)
    train(evaluated, range(3))
    evaluate(evaluated, eval_parts(evaluated.share, 25, 4), 25, classification)
    train(evaluated, range(3, STEPS))
    figures = evaluate(evaluated, eval_parts(evaluated.share, 25, 4), 25, classification)
    return same(tensors(plain), tensors(evaluated)), figures, tensors(evaluated)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_evaluations_use_torchs_average_without_a_trace_in_the_training(name: str) -> None:
    averaged = AveragedModel(plain_model(), avg_fn=warmed_up)
    averaged.update_parameters(plain_model())  # the first one is taken as it is
    model, _ = alone("adamw", after=lambda model, _: averaged.update_parameters(model))
    inputs, targets = global_batch(7, 25)
    loss = nn.functional.cross_entropy(averaged.module(inputs), targets).item()
    for different, figures, state in run_ranks(2, average, name):
        assert different == []
        assert_close(state, averaged.module, "ema")
        assert_close(state, model)
        assert figures["loss"] == pytest.approx(loss, rel=1e-5)
        assert abs(figures["loss"] - nn.functional.cross_entropy(model(inputs), targets).item()) > 1e-4


HUGE = 2  #: the step whose gradients do not fit into fp16


def overflow(step: int, batch: Batch) -> Batch:
    factor = 1e3 if step == HUGE else 1.0
    return Batch((batch.inputs * factor, batch.targets), batch.positions, batch.global_count)


def half(session: Session) -> Any:
    strategy = built("ddp", session, "sgd", precision="fp16", clip_norm=CLIP)
    verdicts, norms = train(strategy, spoil=overflow)
    return verdicts, norms, strategy.step_metrics()["train/loss_scale"], tensors(strategy)


def half_alone() -> tuple[nn.Module, float]:
    model, scaler = plain_model(), torch.amp.GradScaler("cpu")
    stepper = OPTIMIZERS["sgd"](model)
    for step in range(STEPS):
        inputs, targets = global_batch(step, SIZE)
        for group in stepper.param_groups:
            group["lr"] = rates(step)
        with torch.autocast("cpu", torch.float16):
            total, _ = cross_entropy(model(inputs * (1e3 if step == HUGE else 1.0)), targets)
        scaler.scale(total / SIZE).backward()
        scaler.unscale_(stepper)
        clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    return model, scaler.get_scale()


@pytest.mark.parametrize(("ranks", "atol"), [(1, 1e-6), (3, 2e-3)])
def test_fp16_makes_the_steps_of_torchs_grad_scaler_and_leaves_out_the_same_one(ranks: int, atol: float) -> None:
    model, scale = half_alone()
    for verdicts, norms, found, state in run_ranks(ranks, half):
        assert verdicts == [OVERFLOW if step == HUGE else MADE for step in range(STEPS)]
        assert found == scale == 2.0**15
        assert max(norm for norm in norms if norm < torch.inf) < 100, "the norm is that of the gradients without scale"
        assert_close(state, model, atol=atol)


def prune_both_ways(session: Session, name: str) -> list[Any]:
    found = []
    for structured in (False, True):
        once = PruningConfig(0.4, structured=structured, start_step=3, end_step=3)
        strategy = built(name, session, pruning=once, ema_decay=DECAY)
        train(strategy)
        found.append((structured, strategy.step_metrics()["train/sparsity"], tensors(strategy)))
    return found


def pruned_alone(structured: bool, model: Callable[[], nn.Module] = plain_model) -> tuple[nn.Module, dict[str, Tensor]]:
    """By torch.nn.utils.prune, after the third step; the masks hold from then on."""
    masks: dict[str, Tensor] = {}
    steps = 0

    def after(model: nn.Module, _: torch.optim.Optimizer) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            masks.update(torch_masks(copy.deepcopy(model), structured))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(masks.get(name, torch.ones(())))

    return alone("adamw", after=after, model=model)[0], masks


def torch_masks(model: nn.Module, structured: bool) -> dict[str, Tensor]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    if not structured:
        every = [(layer, "weight") for layer in layers.values()]
        prune.global_unstructured(every, prune.L1Unstructured, amount=0.4)
        return {f"{name}.weight": layer.get_buffer("weight_mask") for name, layer in layers.items()}
    masks: dict[str, Tensor] = {}
    for name, layer in list(layers.items())[:-1]:
        prune.ln_structured(layer, "weight", 0.4, n=2, dim=0)
        mask = layer.get_buffer("weight_mask")
        masks |= {f"{name}.weight": mask, f"{name}.bias": mask[:, 0]}
    return masks


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_pruning_takes_what_torchs_own_takes_and_no_momentum_brings_it_back(name: str) -> None:
    for structured, sparsity, state in (case for rank in run_ranks(3, prune_both_ways, name) for case in rank):
        model, masks = pruned_alone(structured)
        assert {name for name in state if name.startswith("mask/")} == {f"mask/{name}" for name in masks}
        for name, mask in masks.items():
            assert torch.equal(state[f"mask/{name}"], mask.bool()), name
            assert not state[f"model/{name}"][mask == 0].any(), name
            assert not state[f"ema/{name}"][mask == 0].any(), name
        assert_close(state, model)
        weights = [mask for name, mask in masks.items() if name.endswith("weight")]
        zeros = sum((mask == 0).sum().item() for mask in weights) / sum(mask.numel() for mask in weights)
        assert sparsity == pytest.approx(zeros)
        assert structured or sparsity == pytest.approx(0.4, abs=0.01)
