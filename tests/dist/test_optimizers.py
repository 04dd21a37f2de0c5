"""Each optimizer of the config, with groups, beside torch's own classes.

Both take the same steps; torch's run in a loop on one process.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from tests.dist.objectives import cross_entropy
from tests.dist.ranks import refused_with, run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, SUBJECTS, Residual, global_batch, part, rates, snapshot
from tests.dist.test_trainer import assert_same, die_after, train
from toolkit.base.errors import ConfigError
from toolkit.config import OptimConfig, TrainConfig
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.strategies import build_strategy, criterion_objective
from toolkit.train.optim import build_optimizer

pytestmark = pytest.mark.dist

STEPS, SIZE, LR = 4, 10, 0.1
HEAD = "4"


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), Residual(), Residual(), nn.Linear(8, CLASSES))


GROUPS: dict[str, Any] = {"*.bias": {"lr_scale": 2.0, "weight_decay": 0.3}, f"{HEAD}.*": {"lr_scale": 0.5}}
#: Each is trained in every strategy, and by hand.
CONFIGS = {
    "nesterov": OptimConfig("sgd", lr=LR, momentum=0.8, nesterov=True, weight_decay=0.1),
    "betas": OptimConfig("adam", lr=LR, betas=[0.7, 0.9], eps=1e-4),
    "groups": OptimConfig("adamw", lr=LR, weight_decay=0.1, decay_norms_and_biases=False, groups=GROUPS),
    "muon": OptimConfig("muon", lr=LR, weight_decay=0.1, momentum=0.9, groups=GROUPS),
    "path": OptimConfig("torch.optim.NAdam", {"momentum_decay": 0.01}, lr=LR, groups=GROUPS),
}


def by_hand(name: str, model: nn.Module) -> list[Optimizer]:
    """Return ``CONFIGS[name]`` in torch's classes, with parameters picked one by one."""
    named = dict(model.named_parameters())
    if name == "nesterov":
        return [SGD(named.values(), LR, 0.8, nesterov=True, weight_decay=0.1)]
    if name == "betas":
        return [Adam(named.values(), LR, (0.7, 0.9), 1e-4)]
    biases = [parameter for each, parameter in named.items() if each.endswith("bias") and not each.startswith(HEAD)]
    matrices = [parameter for each, parameter in named.items() if parameter.ndim == 2 and not each.startswith(HEAD)]
    decay = {"groups": 0.1, "muon": 0.1, "path": 0.0}[name]
    split = [
        {"params": biases, "lr": 2.0 * LR, "weight_decay": 0.3},
        {"params": [named[f"{HEAD}.bias"]], "lr": 0.5 * LR, "weight_decay": 0.3},
        {"params": [named[f"{HEAD}.weight"]], "lr": 0.5 * LR},
        {"params": [named["1.weight"]], "weight_decay": 0.0 if name == "groups" else decay},
    ]
    # Muon takes matrices only; the other groups stay with AdamW.
    if name == "muon":
        muon = torch.optim.Muon(matrices, LR, decay, 0.9, nesterov=True, adjust_lr_fn="match_rms_adamw")
        return [muon, AdamW(split, LR, weight_decay=decay)]
    split.append({"params": matrices})
    if name == "path":
        return [NAdam(split, LR, momentum_decay=0.01)]
    return [AdamW(split, LR, weight_decay=decay)]


def alone(name: str) -> dict[str, Tensor]:
    made = model()
    optimizers = by_hand(name, made)
    ratios = [[group["lr"] / LR for group in optimizer.param_groups] for optimizer in optimizers]
    for step in range(STEPS):
        inputs, targets = global_batch(step, SIZE)
        made.zero_grad()
        nn.functional.cross_entropy(made(inputs), targets).backward()
        for optimizer, own in zip(optimizers, ratios, strict=True):
            for group, ratio in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rates(step) * ratio
            optimizer.step()
    return made.state_dict()


def built(session: Session, strategy: str, optim: OptimConfig, **options: Any) -> Any:
    made = build_strategy(SUBJECTS[strategy][0], session, TrainConfig(**options))
    made.build(model, partial(build_optimizer, optim), criterion_objective(cross_entropy), part(made.share, 0, SIZE))
    return made


def train_each(session: Session, strategy: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, optim in CONFIGS.items():
        made = built(session, strategy, optim)
        made.state()
        for step in range(STEPS):
            made.step(part(made.share, step, SIZE), rates(step))
        found[name] = snapshot(made)
        made.close()
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", "tensor", "pipeline", "parameter_server", "zero", "hsdp", "tensor x shards"]
)
def test_every_optimizer_takes_the_steps_of_torchs_own_classes_on_one_process(strategy: str) -> None:
    ranks = run_ranks(
        max(2, SUBJECTS[strategy][1] if " " in strategy or strategy == "hsdp" else 2), train_each, strategy
    )
    for name in CONFIGS:
        for found in ranks:
            for key, weight in alone(name).items():
                torch.testing.assert_close(found[name][f"model/{key}"], weight, atol=1e-6, rtol=0, msg=f"{name}: {key}")


def leave_out(session: Session) -> list[str]:
    """Return ``STEP NAME`` for each value that a step changed. In steps 0 and 2 one rank has a NaN."""
    made = built(session, "fsdp", CONFIGS["muon"], skip_bad_steps=True)
    changed: list[str] = []
    for step in range(3):
        before = snapshot(made)
        batch = part(made.share, step, SIZE)
        factor = torch.nan if session.rank == 1 and step != 1 else 1.0
        made.step(Batch((batch.inputs * factor, batch.targets), batch.positions, batch.global_count), LR)
        after = snapshot(made)
        same = [name for name in after if name in before and torch.equal(before[name], after[name])]
        changed += [f"{step} {name}" for name in {*before, *after} - {*same}]
    return changed


def test_muon_leaves_out_a_bad_step_of_cut_weights_with_all_that_it_keeps() -> None:
    for changed in run_ranks(2, leave_out):
        assert {name.split(" ")[0] for name in changed if not name.endswith("/step")} == {"1"}
        assert sum("momentum_buffer" in name for name in changed) == 5


def refusals(session: Session) -> list[str]:
    found = []
    for groups in ({"5.weight": {"lr_scale": 2}}, {"0.weight": {"optimizer": "adamw"}, "1.weigth": {}}):
        with pytest.raises(ConfigError) as caught:
            built(session, "pipeline", OptimConfig("muon", groups=groups))  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def refusal_of_adafactor(session: Session) -> str:
    made = built(session, "fsdp", OptimConfig("torch.optim.Adafactor"))
    return refused_with(lambda: made.state())


def test_an_optimizer_that_torch_cannot_step_with_cut_weights_is_refused_by_name() -> None:
    for message in run_ranks(2, refusal_of_adafactor):
        assert message.startswith("optim.name: torch's Adafactor cannot update weights that the strategy has cut")


def test_a_stage_refuses_a_pattern_only_where_the_whole_model_has_nothing_for_it() -> None:
    one, other = run_ranks(2, refusals)
    assert one == other
    assert one[0].startswith("optim.groups: '5.weight' matches no parameter of this model; did you mean")
    assert one[1].startswith("optim.groups: '1.weigth' matches no parameter of this model; did you mean '1.weight'")


OPTIM = OptimConfig("muon", lr=0.02, weight_decay=0.1, decay_norms_and_biases=False, groups={"*.bias": {"lr_scale": 3}})


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["fsdp", "tensor", "pipeline", "local_sgd"])
def test_a_killed_run_with_muon_and_groups_ends_with_the_same_bits(strategy: str, tmp_path: Path) -> None:
    options: Callable[..., Any] = partial(train, name=strategy, optim=OPTIM)
    undisturbed = run_ranks(2, options, tmp_path / "undisturbed")
    run_ranks(2, partial(die_after, name=strategy, optim=OPTIM), tmp_path / "killed", 7)
    resumed = run_ranks(2, options, tmp_path / "killed")
    for (result, state), (expected, whole) in zip(resumed, undisturbed, strict=True):
        assert result == expected
        assert any("momentum_buffer" in name for name in whole)
        assert_same(state, whole)
