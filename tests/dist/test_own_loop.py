"""A user's own loop (``toolkit.start``) trains as without us. It continues bit for bit."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, softplus
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall

from tests.dist.ranks import in_run, run_ranks, told_by_us
from toolkit.base import torch_version
from toolkit.base.errors import ConfigError, NotFiniteError, UnsavableStateError
from toolkit.checkpoint import manifest, whole
from toolkit.checkpoint.folder import committed, newest_step
from toolkit.config import JobConfig
from toolkit.data.randomness import reseed, seed_for_init
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.train.user_loop import TrainingRun

pytestmark = [pytest.mark.dist, pytest.mark.sample(3)]

SAMPLES, BATCH = 52, 12  # global batches; epochs end within batches


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))


def begun(session: Session, folder: Path, max_steps: int | None = None, every: int = 4) -> TrainingRun:
    config = JobConfig()
    config.train.seed, config.train.log_every, config.train.max_steps = 3, 3, max_steps
    config.checkpoint.every_steps = every
    seed_for_init(config.train.seed)
    (folder / "logs").mkdir(exist_ok=True, parents=True)
    attempt = 1 + (newest_step(folder / "checkpoints") or 0)
    return TrainingRun(config, in_run(session, folder, attempt))


def tensors_of(run: TrainingRun) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run._state.live_state().items()}


Kind = Callable[[TrainingRun], Iterator[None]]


def ddp(run: TrainingRun) -> Iterator[None]:
    """Nested epochs over a DataLoader, with an epoch scheduler, an average, and each rank's counts."""
    model = DistributedDataParallel(net())
    optimizer = AdamW(model.parameters(), lr=0.01)
    warm, rest = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 5)
    scheduler = SequentialLR(optimizer, [warm, rest], [2])
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen: dict[str, Any] = {"samples": 0, "by class": [0, 0]}
    loader = DataLoader(dataset(), 6, sampler=DistributedSampler(dataset(), run.world_size, run.rank))
    run.resumable(model=model, optimizer=optimizer, scheduler=scheduler, ema=average, seen=seen)
    for _ in run.epochs(5):
        for x, y in run.steps(loader):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model.module)
            seen["samples"] += len(x)
            seen["by class"][1] += int(y.sum())
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])
            yield
        scheduler.step()
    assert seen["samples"] == sum(len(x) for x, _ in loader) * 5 or run.config.train.max_steps


class Smoothness(Metric):
    """The mean of the batches' own values. ``forward`` weighs it by the number of updates."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, logits: Tensor, target: Tensor) -> None:
        self.value = logits.std()

    def compute(self) -> Tensor:
        return self.value


def metrics(run: TrainingRun) -> Iterator[None]:
    """torchmetrics over many batches: shared counts, a list of scores, and a mean over updates."""
    model = DistributedDataParallel(net())
    optimizer = SGD(model.parameters(), 0.01)
    counts = MetricCollection({"accuracy": BinaryAccuracy(), "recall": BinaryRecall()})
    area, smoothness = BinaryAUROC(), Smoothness()
    run.resumable(model=model, optimizer=optimizer, counts=counts, area=area, smoothness=smoothness)
    loader = DataLoader(dataset(), 6, sampler=DistributedSampler(dataset(), run.world_size, run.rank))
    for _ in run.epochs(4):
        for x, y in run.steps(loader):
            logits = model(x)
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scores = logits.softmax(1)[:, 1].detach()
            counts.update(scores, y)
            area.update(scores, y)
            smoothness(scores, y)
            run.log(loss=loss, area=area.compute(), smoothness=smoothness.compute(), **counts.compute())
            yield
        counts.reset()


def fsdp(run: TrainingRun) -> Iterator[None]:
    """Sharded weights, our loader, a total of steps."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    for layer in (model[0], model):
        fully_shard(layer)
    optimizer = AdamW(model.parameters(), lr=0.01)
    run.resumable(model=model, optimizer=optimizer)
    for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=20):
        loss = cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        yield


def gan(run: TrainingRun) -> Iterator[None]:
    """Two networks, two optimizers, noise, in a loop that is left by a break."""
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    ours, theirs = SGD(generator.parameters(), 0.01, momentum=0.9), SGD(judge.parameters(), 0.01, momentum=0.9)
    run.resumable(generator=generator, judge=judge, ours=ours, theirs=theirs)
    loader = DataLoader(dataset(), 6, shuffle=True, drop_last=True)
    for x, _ in run.steps(loader, total=1000):
        made = generator(torch.randn(len(x), 4))
        theirs.zero_grad()
        (softplus(-judge(x)) + softplus(judge(made.detach()))).mean().backward()
        theirs.step()
        ours.zero_grad()
        fooled = softplus(-judge(made)).mean()
        fooled.backward()
        ours.step()
        run.log(loss=fooled)
        yield
        if run.step == 19:
            break


class Endless(IterableDataset):  # type: ignore[type-arg]
    """A stream without a length: 9 batches of one sample and noise, in each epoch."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.rand(8) + number for number in range(9))


def stream(run: TrainingRun) -> Iterator[None]:
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), 0.001, momentum=0.9)
    run.resumable(net=model, sgd=optimizer)
    for _ in run.epochs(2):
        for x in run.steps(DataLoader(Endless(), 2)):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            yield


def stateful(run: TrainingRun) -> Iterator[None]:
    """torchdata's loader, which goes to its place at once. Each epoch draws its order anew."""
    yield from with_position(run, StatefulDataLoader(dataset(), 6, shuffle=True, drop_last=True), 3)


def nodes(run: TrainingRun) -> Iterator[None]:
    """torchdata's nodes. An epoch has four batches, so what is saved is an epoch's end."""
    samples = dataset()
    order = SamplerWrapper(DistributedSampler(samples, run.world_size, run.rank))
    batches = Batcher(Mapper(order, samples.__getitem__), 7, drop_last=False)
    yield from with_position(run, Loader(ParallelMapper(batches, default_collate, 1)), 5)


def with_position(run: TrainingRun, loader: Any, epochs: int) -> Iterator[None]:
    model = DistributedDataParallel(net())
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer, loader=loader)
    for _ in run.epochs(epochs):
        for x, y in run.steps(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            yield


def target(run: TrainingRun, **options: bool) -> Iterator[None]:
    """Each rank asks a network with statistics of its own, which DDP does not send: a copy of what it trains."""
    model = DistributedDataParallel(net(), **options)  # type: ignore[arg-type]
    asked = deepcopy(model.module)
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    run.resumable(model=model, asked=asked, optimizer=optimizer)
    for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=20):
        with torch.no_grad():
            goal = asked.eval()(batch.inputs)
        loss = (model(batch.inputs) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run.step % 5 == 0:
            asked.load_state_dict(model.module.state_dict())
        run.log(loss=loss)
        yield


def accumulated(run: TrainingRun) -> Iterator[None]:
    """A step of the optimizer every three batches, also where an epoch ends between. It counts from where it begins."""
    model = DistributedDataParallel(net())
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9)
    run.resumable(model=model, optimizer=optimizer)
    loader = DataLoader(dataset(), 6, sampler=DistributedSampler(dataset(), run.world_size, run.rank))
    for _ in run.epochs(5):
        for number, (x, y) in enumerate(run.steps(loader), 1):
            with nullcontext() if number % 3 == 0 else model.no_sync():
                loss = cross_entropy(model(x), y)
                loss.backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
            yield


def schedule(run: TrainingRun) -> Iterator[None]:
    """The script writes numpy's numbers into the groups, and adds a group at step 5."""
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = SGD(layers[1].parameters(), lr=0.1, momentum=0.9)
    rates = np.linspace(0.1, 0.01, 20, dtype=np.float32)
    run.resumable(model=model, optimizer=optimizer)
    for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=20):
        if run.step == 5:
            optimizer.add_param_group({"params": layers[0].parameters(), "lr": np.float64(0.01), "mark": np.arange(3)})
        optimizer.param_groups[0]["lr"] = rates[run.step]
        optimizer.param_groups[-1]["lr"] *= 0.9  # from what the last step left
        loss = cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert isinstance(optimizer.param_groups[-1]["lr"], np.floating)
        run.log(loss=loss, lr=float(optimizer.param_groups[-1]["lr"]))
        yield


KINDS: dict[str, tuple[Kind, int]] = {
    "schedule": (schedule, 20),
    "accumulated": (accumulated, 25),
    "nodes": (nodes, 20),
    "target": (target, 20),
    "statistics": (partial(target, broadcast_buffers=False), 20),
    "ddp": (ddp, 25),
    "metrics": (metrics, 20),
    "fsdp": (fsdp, 20),
    "gan": (gan, 20),
    "stream": (stream, 10),
    "stateful": (stateful, 24),
}


def made(session: Session, kind: str, folder: Path, stops: Iterable[int | None], every: int = 4) -> dict[str, Tensor]:
    """Train in an attempt for each of ``stops``. A number of steps ends it as a kill would; None is the end."""
    for stop in stops:
        run = begun(session, folder, every=every)
        for steps, _ in enumerate(KINDS[kind][0](run), 1):
            if steps == stop:
                break
        else:
            run.finish()
        tensors = tensors_of(run)
        step = run.step
        run.close()
    assert stop is not None or step == KINDS[kind][1]
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_any_kind_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole_run = run_ranks(2, made, kind, tmp_path / "whole", [None])
    every = 2 if kind == "accumulated" else 4  # a save is due between two steps of its optimizer
    again = run_ranks(2, made, kind, tmp_path / "again", [6, 3, 4, None], every)
    for mine, other in zip(whole_run, again, strict=True):
        assert list(mine) == list(other)
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    assert logged(tmp_path / "whole")
    assert logged(tmp_path / "whole") == logged(tmp_path / "again")


@pytest.mark.parametrize("kind", ["ddp", "target", "statistics"])
def test_a_save_changes_no_statistics_of_any_rank(kind: str, tmp_path: Path) -> None:
    without_saves = run_ranks(2, made, kind, tmp_path / "whole", [None], 1000)
    again = run_ranks(2, made, kind, tmp_path / "again", [6, 3, 4, None])
    for mine, other in zip(without_saves, again, strict=True):
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []
    assert [name for name in without_saves[0] if not torch.equal(without_saves[0][name], without_saves[1][name])]
    if kind == "ddp":
        return  # it has counts of each rank
    # Another number of ranks takes rank 0's.
    ((first, *_), (alone,)) = without_saves, run_ranks(1, made, kind, tmp_path / "again", [None])
    assert [name for name in first if not torch.equal(first[name], alone[name])] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_where_the_newest_checkpoint_is_damaged_it_goes_on_from_the_one_before(kind: str, tmp_path: Path) -> None:
    """What the damaged one has begun to fill is forgotten.

    The save of step 12 waits for that of step 8, so there are two; its own is given up or not, as it happens.
    """
    undisturbed = run_ranks(2, made, kind, tmp_path / "whole", [None])
    run_ranks(2, made, kind, tmp_path / "again", [13])
    newest, _, *_ = committed(tmp_path / "again/checkpoints")
    (data, *_) = sorted(newest.glob("rank-*.safetensors"))
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    again = run_ranks(2, made, kind, tmp_path / "again", [None])
    for mine, other in zip(undisturbed, again, strict=True):
        assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the loop's own figures of ``run.log`` by step. Times and rates would differ between runs."""
    lines = [json.loads(line) for line in (folder / "tensorboard/metrics.jsonl").read_text().splitlines()]
    names = {"step", *(f"train/{name}" for name in ("loss", "lr", "area", "smoothness", "accuracy", "recall"))}
    return [{name: line[name] for name in names & {*line}} for line in lines if "train/loss" in line]


def without_us(session: Session) -> dict[str, Tensor]:
    """Train as in ``ddp`` without any of our calls. The dropout masks are set to ours."""
    seed_for_init(3)
    model = DistributedDataParallel(net())
    optimizer = AdamW(model.parameters(), lr=0.01)
    warm, rest = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 5)
    scheduler = SequentialLR(optimizer, [warm, rest], [2])
    sampler: DistributedSampler[Any] = DistributedSampler(dataset(), session.world_size, session.rank)
    step = count()
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset(), 6, sampler=sampler):
            reseed(3, next(step), session.rank)  # the seed that we give each step
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    return {f"weights/{name}": value.detach() for name, value in model.module.named_parameters()}


def test_it_trains_as_the_same_loop_without_it(tmp_path: Path) -> None:
    for ours, plain in zip(run_ranks(2, made, "ddp", tmp_path, [None]), run_ranks(2, without_us), strict=True):
        assert [name for name in plain if not torch.equal(plain[name], ours[name])] == []
    path = committed(tmp_path / "checkpoints")[-1]
    names = manifest.read(path).tensors
    assert {"model/0.weight", "optim/0.weight/exp_avg", "ema/0.weight", "model/1.running_mean"} <= names.keys()
    assert whole.model_tensors(names, None)[0] == whole.AVERAGE


def go_on(session: Session, folder: Path, steps: int | None) -> tuple[dict[str, Tensor], list[list[float]]]:
    run = begun(session, folder, steps)
    seen: list[list[float]] = []
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    loader = run.loader(dataset(), global_batch_size=BATCH)
    run.resumable(model=model, optimizer=optimizer)
    for batch in run.steps(loader, total=16):
        assert isinstance(batch, Batch)
        seen.append(run.gather(batch.positions[:1].float())[0].tolist())
        optimizer.zero_grad()
        (cross_entropy(model(batch.inputs), batch.targets, reduction="sum") * run.world_size / BATCH).backward()
        optimizer.step()
        run.log(loss=1.0)
    run.finish()
    full = {name: cast(DTensor, value).full_tensor().detach() for name, value in model.named_parameters()}
    run.close()
    return full, seen


def test_sharded_weights_go_on_with_another_number_of_ranks_to_rounding(tmp_path: Path) -> None:
    torch_version.refuse_older([torch_version.SHARDS_ON_CPUS])
    ((expected, _), *_) = run_ranks(2, go_on, tmp_path / "two", None)
    run_ranks(2, go_on, tmp_path / "more", 8)
    for found, _ in run_ranks(3, go_on, tmp_path / "more", None):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


@dataclass
class Odd:
    """No state."""

    values: list[int] = field(default_factory=list)


def refuse(session: Session, folder: Path) -> list[str]:
    """Return the message of each wrong call."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)

    def fails(call: Callable[[TrainingRun], Any]) -> str:
        run = begun(session, folder)
        try:
            call(run)
        except Exception as error:
            return str(error)
        finally:
            run.close()
        return "nothing"

    def twice(run: TrainingRun) -> None:
        run.resumable(model=model)
        run.resumable(model=model)

    def without_total(run: TrainingRun) -> None:
        run.resumable(model=model)
        next(run.steps([1]))

    def without_batches(run: TrainingRun) -> None:
        run.resumable(model=model)
        next(run.steps([], total=3))

    def without_steps(run: TrainingRun) -> None:
        run.resumable(model=model)
        run.finish()

    def log_many(run: TrainingRun) -> None:
        run.log(loss=torch.ones(2))

    calls: list[Callable[[TrainingRun], Any]] = [
        lambda run: next(run.steps([1], total=1)),
        lambda run: run.resumable(),
        lambda run: run.resumable(model=model, best=0.5),
        lambda run: run.resumable(model=model, odd=Odd()),
        lambda run: run.resumable(model=model, optimizer=SGD(other.parameters(), 0.1)),
        lambda run: run.resumable(a=model, one=SGD(model.parameters(), 0.1), two=SGD(model.parameters(), 0.1)),
        twice,
        without_total,
        without_batches,
        without_steps,
        log_many,
    ]
    return list(map(fails, calls))


def diverge(session: Session, folder: Path, on_nan: str) -> tuple[str, int | None]:
    run = begun(session, folder)
    run.config.train.on_nan = on_nan
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), 1.0)
    run.resumable(model=model, optimizer=optimizer)
    said = "trained"
    try:
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=12):
            optimizer.zero_grad()
            loss = model(batch.inputs).sum() * (float("inf") if run.step == 5 else 1.0)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        run.finish()
    except NotFiniteError as error:
        said = str(error)
    run.close()
    return said, newest_step(folder / "checkpoints")


def test_weights_that_are_not_finite_are_not_saved_and_end_the_attempt(tmp_path: Path) -> None:
    ((said, newest), _) = run_ranks(2, diverge, tmp_path / "stop", "stop")
    assert said.startswith("train.on_nan: the loss is not finite, since a step after step 3; look at")
    assert newest == 4
    written = [json.loads(line) for line in (tmp_path / "stop/tensorboard/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written if "train/samples_per_s" in line][-1] == 9, "also of the last window"
    assert run_ranks(2, diverge, tmp_path / "warn", "warn")[0] == ("trained", 12)


def unfreeze(session: Session, folder: Path) -> tuple[str, int | None]:
    run = begun(session, folder)
    layers = nn.Sequential(nn.Linear(8, 4).requires_grad_(False), nn.Linear(4, 2))
    model = DistributedDataParallel(layers)
    optimizer = SGD(layers.parameters(), 0.1)
    run.resumable(model=model, optimizer=optimizer)
    said = "trained"
    try:
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=20):
            layers[0].requires_grad_(run.step >= 5)  # too late: DDP exchanges what was trained when it was made
            optimizer.zero_grad()
            model(batch.inputs).sum().backward()
            optimizer.step()
    except UnsavableStateError as error:
        said = str(error)
    run.close()
    return said, newest_step(folder / "checkpoints")


def test_replicas_that_drift_apart_are_not_saved_and_end_the_attempt(tmp_path: Path) -> None:
    (one, newest), other = run_ranks(2, unfreeze, tmp_path)
    assert one.startswith("the checkpoint of step 8 was not written: model/0.weight declared as replicated")
    assert newest == 4
    assert other == (one, newest)


def with_lbfgs(session: Session, folder: Path, is_mean: bool) -> str:
    run = begun(session, folder)
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = LBFGS(model.parameters(), 1.0, max_iter=4, line_search_fn="strong_wolfe")
    run.resumable(model=model, optimizer=optimizer)
    try:
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=2):

            def closure(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch.inputs), batch.targets)
                loss.backward()
                return sum(run.gather(loss)) / run.world_size if is_mean else loss

            optimizer.step(closure)
    except ConfigError as error:
        return str(error)
    finally:
        run.close()
    return "trained"


def both_lbfgs(session: Session, folder: Path) -> list[str]:
    return [with_lbfgs(session, folder / f"{is_mean}", is_mean) for is_mean in (False, True)]


def test_lbfgs_with_each_ranks_own_loss_is_told_to_return_the_mean(tmp_path: Path) -> None:
    says = (
        r"run\.resumable: .* optimizer is LBFGS.* the mean of all ranks, sum\(run\.gather\(loss\)\) / run\.world_size"
    )
    for said, of_mean in run_ranks(2, both_lbfgs, tmp_path):
        assert re.match(says, said), said
        assert of_mean == "trained"


def with_fabric(session: Session, folder: Path, stops: Iterable[int | None]) -> tuple[list[str], dict[str, Tensor]]:
    """Train a model with BatchNorm that Fabric has wrapped as it does, with DDP inside."""
    # Here, not at the top: it takes seconds, and every rank of every test would wait for it.
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule

    tensors: dict[str, Tensor] = {}
    for stop in stops:
        run = begun(session, folder, stop)
        plain = net()
        model = _FabricModule(DistributedDataParallel(plain), SingleDeviceStrategy(), original_module=plain)
        optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
        run.resumable(model=model, optimizer=optimizer)
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=9):
            optimizer.zero_grad()
            cross_entropy(model(batch.inputs), batch.targets).backward()
            optimizer.step()
        run.close()
        tensors = {name: value.clone() for name, value in plain.state_dict().items()}
    return sorted(manifest.read(committed(folder / "checkpoints")[-1]).tensors), tensors


def fabric_in_parts(session: Session, folder: Path) -> list[tuple[list[str], dict[str, Tensor]]]:
    return [with_fabric(session, folder / f"{len(stops)}", stops) for stops in ([None], [4, None])]


def test_a_module_of_fabric_goes_on_with_the_names_of_the_models(tmp_path: Path) -> None:
    for (names, tensors), (theirs, others) in run_ranks(2, fabric_in_parts, tmp_path):
        assert names == theirs
        assert "model/1.running_mean" in names
        assert "optim/0.weight/momentum_buffer" in names
        assert all(torch.equal(value, others[name]) for name, value in tensors.items())


def unsavable(session: Session, folder: Path, kind: str) -> tuple[str, int]:
    """Return what is said, and after which step. No save is ever due."""
    run = begun(session, folder, every=1000)
    model = nn.Linear(8, 2)
    if kind == "replicas":
        nn.init.constant_(model.bias, run.rank)
    optimizer = SGD(model.parameters(), 0.1)
    thing: dict[str, Any] = {"numbers": []}
    run.resumable(model=model, optimizer=optimizer, thing=thing)
    try:
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=9):
            model(batch.inputs).sum().backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            if kind == "group":
                optimizer.param_groups[0]["curve"] = iter("")
            if kind == "state":
                thing["numbers"].append(1j)
            if kind == "stranger" and run.step == 3:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            if kind == "moved" and run.step == 3:
                optimizer.param_groups[0]["params"] = [model.weight]
                run.save()
            if kind == "stranger" and run.step == 3:
                run.save()
    except (ConfigError, UnsavableStateError) as error:
        return str(error), run.step
    finally:
        run.close()
    return "trained", run.step


@pytest.mark.parametrize(
    ("kind", "step", "says"),
    [
        (
            "group",
            1,
            "run.resumable: optimizer.param_groups[0].curve is of type str_ascii_iterator, which a",
        ),
        ("state", 1, "run.resumable: thing.numbers[0] is of type complex"),
        ("replicas", 1, "model/bias declared as replicated, but rank 1 and rank 0 hold different values"),
        ("stranger", 4, "run.resumable: optimizer has 1 parameters of no model that was handed over (of shape (3,))"),
        ("moved", 4, "run.resumable: optimizer has other parameters in its groups than when it was handed over"),
    ],
)
def test_what_no_save_could_hold_ends_the_attempt_after_its_first_step(
    kind: str, step: int, says: str, tmp_path: Path
) -> None:
    for text, at in run_ranks(2, unsavable, tmp_path, kind):
        assert text.startswith(says)
        assert at == step


def test_wrong_calls_say_what_to_do(tmp_path: Path) -> None:
    said = run_ranks(1, refuse, tmp_path)[0]
    expected = [
        "run.steps: nothing would be saved yet: call run.resumable(model=model, optimizer=optimizer) before",
        "run.resumable: nothing was handed over",
        "run.resumable: best is 0.5, which cannot be filled in place; put it into a dictionary",
        "run.resumable: odd is of type Odd, which has no state_dict()",
        "run.resumable: optimizer has 2 parameters of no model that was handed over",
        "run.resumable: one and two have a parameter of shape (2, 2) in common",
        "run.resumable: called twice",
        "run.steps: say how many",
        "run.steps: the loader has no batch",
        "toolkit.start: the loop has made no step",
        "run.log: train/loss has the shape (2,)",
    ]
    assert [text for text, start in zip(said, expected, strict=True) if not text.startswith(start)] == []


def changed(session: Session, folder: Path, change: str) -> str:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = {"adamw": AdamW, "sgd": partial(SGD, momentum=0.9)}["sgd" if change == "class" else "adamw"]
    groups = [{"params": part.parameters()} for part in model] if change == "groups" else model.parameters()
    run = begun(session, folder)
    try:
        made_by = optimizer(groups, lr=0.1)  # type: ignore[operator]
        run.resumable(model=model, optimizer=made_by)
        for batch in run.steps(run.loader(dataset(), global_batch_size=BATCH), total=5):
            model(batch.inputs).sum().backward()
            made_by.step()
        run.finish()
    except Exception as error:
        return str(error)
    finally:
        run.close()
    return "trained"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("class", "is only in the checkpoint|holds the state of AdamW"),
        ("groups", r"groups of \[4\] parameters, and here is AdamW with \[2, 2\]"),
    ],
)
def test_another_optimizer_is_refused(change: str, says: str, tmp_path: Path) -> None:
    assert run_ranks(1, changed, tmp_path, "nothing") == ["trained"]
    assert re.search(says, run_ranks(1, changed, tmp_path, change)[0])


def first(session: Session, folder: Path) -> tuple[list[str], list[Any]]:
    run = begun(session, folder)
    order = []
    with run.main_first():
        order = (folder / "order").read_text().split() if (folder / "order").exists() else []
        (folder / "order").write_text(" ".join([*order, str(run.rank)]))
    found = [run.gather({"rank": run.rank}), [value.item() for value in run.gather(torch.tensor(run.rank))]]
    run.close()
    return order, found


def test_rank_0_goes_first_and_gather_brings_what_every_rank_has(tmp_path: Path) -> None:
    (zero, found), (one, _) = run_ranks(2, first, tmp_path)
    assert (zero, one) == ([], ["0"])
    assert found == [[{"rank": 0}, {"rank": 1}], [0, 1]]


class Counting(nn.Linear):
    """Counts its batches in a tensor that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return super().forward(x)


def counted(session: Session, folder: Path) -> list[str]:
    said = told_by_us(logging.WARNING)
    run = begun(session, folder)
    model = Counting()
    run.resumable(model=model)
    for x in run.steps(torch.ones(3, 1), total=3):
        model(x)
    run.finish()
    run.close()
    return said


def test_a_tensor_that_changes_and_is_not_saved_is_named_once(tmp_path: Path) -> None:
    first, second = run_ranks(2, counted, tmp_path)
    assert [text[:54] for text in first] == ["model/seen changed in the first step, and no state_dic"]
    assert second == []
