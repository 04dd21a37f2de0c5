"""Jobs of toolkit.Job, with batches and models of every shape, against loops written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import toolkit
from tests.dist.ranks import in_run, run_ranks
from tests.dist.test_trainer import logged
from tests.unit.checkpoint.ranks import tensor_of
from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.config import CheckpointConfig, DataConfig, JobConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.ranks.session import Session
from toolkit.train import job

pytestmark = pytest.mark.dist

WORDS, WIDTH, LENGTH, SAMPLES, BATCH, STEPS = 11, 8, 5, 22, 8, 4
OPTIM = OptimConfig("adamw", lr=0.01, weight_decay=0.1)


@dataclass
class Sentence:
    ids: Tensor
    weight: float


class Sentences:
    """Samples of every kind of nesting: {"text": dataclass, "pair": (number, array), "name": text}."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(WORDS, (LENGTH,), generator=draw)
        pair = (index % 3, np.arange(2, dtype=np.float32) + index)
        return {"text": Sentence(ids, 1 + index % 4), "pair": pair, "name": f"sample {index}"}


class Tied(nn.Module):
    """A model whose head shares the embedding's weights. One layer is frozen, and outputs are a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(2, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, *, numbers: Tensor) -> dict[str, Tensor]:
        hidden = self.frozen(self.mix(self.embed(ids)).tanh()) + self.scale(numbers / SAMPLES)[:, None]
        return {"logits": self.head(hidden), "hidden": hidden}


def word_losses(outputs: Mapping[str, Tensor], text: Sentence) -> Tensor:
    """(n, LENGTH)."""
    return functional.cross_entropy(outputs["logits"].transpose(1, 2), text.ids, reduction="none")


class Translate(toolkit.Job):
    def train_set(self) -> Sentences:
        return Sentences()

    def eval_set(self) -> Sentences:
        return Sentences()

    def model(self) -> nn.Module:
        return Tied()

    def call(self, model: Any, batch: toolkit.Batch) -> dict[str, Tensor]:
        assert [name.partition(" ")[0] for name in batch["name"]] == ["sample"] * len(batch)
        return model(batch["text"].ids, numbers=batch["pair"][1])

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        return toolkit.Loss.mean(word_losses(self.call(model, batch), batch["text"]).mean())

    def evaluate(self, model: Any, batch: toolkit.Batch) -> Any:
        losses = word_losses(self.call(model, batch), batch["text"])
        weights = batch["text"].weight
        weighed = toolkit.Loss.sum((losses.mean(1) * weights).sum(), weights.sum())
        return {
            "loss": losses.mean(1),
            "weighed": weighed,
            "rows": toolkit.Gathered(losses),
            "at": toolkit.Gathered(weights),
        }

    def summary(self, figures: Mapping[str, Any]) -> dict[str, float]:
        rows, at = figures["rows"], figures["at"]
        assert at.tolist() == [1 + index % 4 for index in range(SAMPLES)], "rows come in the eval set's order"
        return {"loss": figures["loss"], "weighed": figures["weighed"], "median": float(rows.flatten().median())}


class Weighed(Translate):
    """Samples have weights of their own, by which the sum is divided."""

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        losses, weights = word_losses(self.call(model, batch), batch["text"]).mean(1), batch["text"].weight
        return toolkit.Loss.sum((losses * weights).sum(), weights.sum())


class Several(Translate):
    """Two losses by name, divided by the same."""

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        outputs = self.call(model, batch)
        small = outputs["hidden"].square().mean((1, 2))
        return {"words": word_losses(outputs, batch["text"]).mean(1), "small": 0.1 * toolkit.Loss.mean(small.mean())}


class Mixed(Translate):
    """Two losses by name, one divided by samples and one by weights."""

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        outputs, weights = self.call(model, batch), batch["text"].weight
        weighed = (outputs["hidden"].square().mean((1, 2)) * weights).sum()
        words = word_losses(outputs, batch["text"]).mean(1)
        return {"words": words, "small": toolkit.Loss.sum(weighed, weights.sum())}


KINDS: dict[str, type[Translate]] = {"one": Translate, "weighed": Weighed, "several": Several, "mixed": Mixed}


def config_of(strategy: str, accumulate: int = 1, **more: Any) -> JobConfig:
    train = TrainConfig(max_steps=STEPS, log_every=2, eval_every=2, seed=5, accumulate=accumulate, **more)
    return JobConfig(
        strategy=StrategyConfig(strategy),
        data=DataConfig(global_batch_size=BATCH),
        optim=replace(OPTIM, schedule="constant"),
        train=train,
        checkpoint=CheckpointConfig(every_steps=2),
    )


def train(session: Session, run_dir: Path, kind: type[toolkit.Job], config: JobConfig) -> dict[str, Any]:
    session = in_run(session, run_dir)
    state: dict[str, Tensor] = {}
    with closing(job.training_of(kind, config, None, session)) as training:
        result = training.fit()
        state = {name: tensor_of(entry) for name, entry in training.strategy.state().items()}
    return {"metrics": dict(result.metrics), "state": state, "step": result.step}


def by_hand(kind: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The same training on the whole batches, with torch alone."""
    from toolkit.data.permutation import ShuffledOrder

    model, order, data = Tied(), ShuffledOrder(SAMPLES, 5), Sentences()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)
    losses: dict[str, float] = {}

    def outputs_of(indices: list[int]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        samples = [data[index] for index in indices]
        ids, weights = torch.stack([s["text"].ids for s in samples]), torch.tensor([s["text"].weight for s in samples])
        outputs = model(ids, numbers=torch.stack([torch.from_numpy(s["pair"][1]) for s in samples]))
        words = functional.cross_entropy(outputs["logits"].transpose(1, 2), ids, reduction="none")
        return outputs, words.mean(1), weights

    for step in range(STEPS):
        outputs, words, weights = outputs_of(order.at(np.arange(step * BATCH, (step + 1) * BATCH)).tolist())
        small = outputs["hidden"].square().mean((1, 2))
        parts = {
            "one": {"loss": words.mean()},
            "weighed": {"loss": (words * weights).sum() / weights.sum()},
            "several": {"words": words.mean(), "small": 0.1 * small.mean()},
            "mixed": {"words": words.mean(), "small": (small * weights).sum() / weights.sum()},
        }[kind]
        total = torch.stack([*parts.values()]).sum()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        last = {"loss": total.item(), **{name: part.item() for name, part in parts.items()}}
        if step >= STEPS - 2:  # logged every two steps
            losses = {name: losses.get(name, 0.0) + value / 2 for name, value in last.items()}
    with torch.no_grad():
        _, words, weights = outputs_of(list(range(SAMPLES)))
    figures = {"eval/loss": words.mean().item(), "eval/weighed": ((words * weights).sum() / weights.sum()).item()}
    return {**{f"train/{name}": value for name, value in losses.items()}, **figures}, dict(model.state_dict())


CASES = {
    "ddp": [(kind, 1) for kind in KINDS] + [("weighed", 2)],
    "fsdp": [(kind, 1) for kind in KINDS] + [("several", 2)],
    "zero": [("several", 1)],
    "parameter_server": [("one", 1)],
    "local_sgd": [("one", 1)],
}


def train_cases(session: Session, run_dir: Path, strategy: str) -> list[dict[str, Any]]:
    found = []
    for number, (kind, accumulate) in enumerate(CASES[strategy]):
        run = run_dir / str(number)
        run.mkdir(exist_ok=True)
        dist.barrier()
        mine = replace(session, attempt=number + 1)  # by which the runs' messages in the store differ
        trained = train(mine, run, KINDS[kind], config_of(strategy, accumulate))
        weights = {name: value.clone() for name, value in trained["state"].items() if name.startswith("model/")}
        found.append({"metrics": trained["metrics"], "weights": weights, "logged": logged(run, "train/loss")})
    return found


@pytest.mark.parametrize("strategy", [name for name in CASES if name != "local_sgd"])
def test_jobs_with_nested_batches_named_losses_tied_and_frozen_parts_train_as_loops(
    tmp_path: Path, strategy: str
) -> None:
    found = run_ranks(3, train_cases, tmp_path, strategy)[0]
    for (kind, accumulate), trained in zip(CASES[strategy], found, strict=True):
        metrics, weights = by_hand(kind)
        where = f"{strategy}, {kind}, {accumulate}"
        for name, value in metrics.items():
            assert trained["metrics"].get(name, value) == pytest.approx(value, abs=1e-6), f"{where}: {name}"
        assert trained["logged"][STEPS] == pytest.approx(metrics["train/loss"], abs=1e-6), where
        if strategy == "ddp":
            assert {name.removeprefix("model/") for name in trained["weights"]} == weights.keys()
            far = {n: (trained["weights"][f"model/{n}"] - value).abs().max().item() for n, value in weights.items()}
            assert max(far.values()) < 1e-6, f"{where}: {far}"


def test_a_job_with_a_nested_batch_trains_in_rounds(tmp_path: Path) -> None:
    (trained,) = run_ranks(2, train_cases, tmp_path, "local_sgd")[0]
    assert trained["metrics"]["eval/loss"] > 0


class Wrong(Translate):
    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        return toolkit.Loss.sum(word_losses(self.call(model, batch), batch["text"]).mean())


class Uncut(Translate):
    """Its batches are padded to the longest and packed: no row for each sample."""

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        return {"packed": torch.cat([sample["text"].ids for sample in samples]), "count": len(samples)}

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        numbers = torch.zeros(1, 2)
        outputs = model(batch["packed"][None], numbers=numbers)
        losses = functional.cross_entropy(outputs["logits"].transpose(1, 2), batch["packed"][None], reduction="sum")
        return toolkit.Loss.sum(losses, len(batch["packed"]))

    def evaluate(self, model: Any, batch: toolkit.Batch) -> Any:
        return {"loss": self.loss(model, batch)}

    def summary(self, figures: Mapping[str, Any]) -> Any:
        return figures


def refusals(session: Session, run_dir: Path) -> list[str]:
    cases: list[tuple[type[toolkit.Job], JobConfig]] = [
        (Wrong, config_of("ddp")),
        (Mixed, config_of("ddp", accumulate=2)),
        (Translate, replace(config_of("ddp"), strategy=StrategyConfig("pipeline"))),
        (Uncut, config_of("ddp", accumulate=2)),
        (Uncut, config_of("ddp")),
    ]
    said = []
    for number, (kind, config) in enumerate(cases):
        run = run_dir / str(number)
        run.mkdir(exist_ok=True)
        dist.barrier()
        try:
            train(replace(session, attempt=number + 1), run, kind, config)
            said.append("")
        except (ConfigError, JobFailedError) as error:
            said.append(str(error))
    return said


def test_what_a_job_does_that_would_train_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    wrong, mixed, pipeline, uncut, packed = run_ranks(2, refusals, tmp_path)[0]
    assert f"{__file__}:" in wrong
    assert "it is not a sum over samples" in wrong
    assert mixed.startswith("train.accumulate: 2: the job's losses are divided by different weights: words (samples)")
    assert "hands one tensor from layer to layer, and the job calls the model with (Tensor, numbers=...)" in pipeline
    assert "batch['packed'] has the shape (20,), and the batch has 4 samples" in uncut
    assert packed == ""


class Branching(nn.Module):
    """Which of its two branches a rank takes follows from its first sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right, self.idle = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        taken = self.left if numbers[0, 0] % 2 else self.right
        return taken(numbers / SAMPLES)


class Branches(Translate):
    def model(self) -> nn.Module:
        return Branching()

    def loss(self, model: Any, batch: toolkit.Batch) -> Any:
        return toolkit.Loss.mean((model(batch["pair"][1]) - 1).square().mean())

    def evaluate(self, model: Any, batch: toolkit.Batch) -> Any:
        return {"loss": (model(batch["pair"][1]) - 1).square()[:, 0]}

    def summary(self, figures: Mapping[str, Any]) -> Any:
        return figures


def branching(session: Session, run_dir: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a run in one go, and of one in two parts."""
    config = replace(config_of("ddp"), strategy=StrategyConfig("ddp", find_unused=True))
    half = replace(config, train=replace(config.train, max_steps=2))
    found = []
    number = 0
    for name, parts in {"whole": [config], "parts": [half, config]}.items():
        (run_dir / name).mkdir(exist_ok=True)
        dist.barrier()
        for part in parts:
            number += 1
            state = train(replace(session, attempt=number), run_dir / name, Branches, part)["state"]
        found.append({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
    return found[0], found[1]


def test_optional_branches_train_on_request_as_with_gradients_of_zero(tmp_path: Path) -> None:
    from toolkit.data.permutation import ShuffledOrder

    whole, parts = run_ranks(2, branching, tmp_path)[0]
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    model, order = Branching(), ShuffledOrder(SAMPLES, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    for step in range(STEPS):
        numbers = torch.stack([torch.arange(2.0) + i for i in order.at(np.arange(step * 8, step * 8 + 8)).tolist()])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # AdamW moves a branch without samples by its decay
        for shared in numbers.split(4):
            ((model(shared) - 1).square().sum() / BATCH).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole[f"model/{name}"], value, atol=1e-6, rtol=0)


class Watched(Translate):
    """Notes its calls. It is done once the loss has not fallen by a thousandth for two evaluations."""

    def setup(self) -> None:
        self.told: list[str] = []
        Watched.newest = self

    newest: Watched

    def on_epoch_start(self, epoch: int) -> None:
        self.told.append(f"start {epoch}")

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.told.append(f"end {epoch}")

    def is_done(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        self.told.append(f"asked {len(evaluations)}")
        return len(evaluations) >= 4

    def show(self, model: Any, batch: toolkit.Batch) -> dict[str, Tensor | str]:
        return {"shown/at": batch.positions.float(), "shown/text": "a text"}


def watched(session: Session, run_dir: Path) -> tuple[list[str], int, list[str], int]:
    """Cut a run off after 6 of its 20 steps, and let it continue. It evaluates every two steps."""
    config = config_of("ddp")
    short = replace(config, train=replace(config.train, max_steps=6))
    long = replace(config, train=replace(config.train, max_steps=20, epochs=99))
    train(replace(session, attempt=1), run_dir, Watched, short)
    first = Watched.newest.told
    ended = train(replace(session, attempt=2), run_dir, Watched, long)
    second = Watched.newest.told
    again = train(replace(session, attempt=3), run_dir, Watched, long)
    return first, ended["step"], second, again["step"]


def test_a_job_hears_of_epochs_and_ends_early_also_if_decided_before_a_resume(tmp_path: Path) -> None:
    for first, ended, second, again in run_ranks(2, watched, tmp_path):
        # 22 samples, batches of 8: the first epoch ends within step 3, the second within step 6
        assert first == ["start 0", "asked 1", "end 0", "start 1", "asked 2", "end 1"], "not at the last step"
        assert second == ["asked 3", "start 2", "asked 4"]
        assert ended == again == 8
