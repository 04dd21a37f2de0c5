"""Grids of ranks: layers that ranks compute together, sharded copies, and their own risks."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from jobs.language_model import next_token
from jobs.llama import Llama, LlamaSizes
from tests.dist import test_trainer as trainer
from tests.dist.objectives import cross_entropy
from tests.dist.ranks import in_run, refused_with, run_ranks
from tests.dist.strategy_cases import CLASSES, FEATURES, STEPS, global_batch, part, rates, snapshot
from tests.dist.test_fsdp import even_model as unseeded_even_model
from tests.dist.test_fsdp import size_bytes
from toolkit.base.errors import ConfigError
from toolkit.config import MeshConfig, OptimConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import PipelineConfig
from toolkit.plugins.methods import auto
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.strategies import Objective, Strategy, build_strategy, criterion_objective
from toolkit.train.optim import build_optimizer

pytestmark = [pytest.mark.dist, pytest.mark.sample(2)]

NEXT_TOKEN = Objective(lambda model, batch: next_token(model(batch.inputs), batch.targets))
LENGTH, WINDOWS = 8, 6


def even_model() -> nn.Module:
    torch.manual_seed(1)
    return unseeded_even_model()


def llama() -> nn.Module:
    torch.manual_seed(1)
    return Llama(LlamaSizes(256, layers=2, width=16, heads=4, kv_heads=4, hidden=24))


def tied_llama() -> nn.Module:
    torch.manual_seed(1)
    return Llama(LlamaSizes(256, layers=2, width=16, heads=4, kv_heads=4, hidden=24, tied=True))


def grouped_llama() -> nn.Module:
    torch.manual_seed(1)
    return Llama(LlamaSizes(256, layers=2, width=16, heads=4, kv_heads=2, hidden=24))


def windows(step: int) -> tuple[Tensor, Tensor]:
    """Return windows of two documents each, which begin at differing places. Some targets do not count."""
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(256, (2, WINDOWS, LENGTH), generator=draw)
    starts = 2 + torch.arange(WINDOWS)[:, None] % 5
    places = torch.arange(LENGTH).expand(WINDOWS, LENGTH)
    places = torch.where(places < starts, places, places - starts)
    targets[:, :-1][places[:, 1:] == 0] = -100
    return torch.stack([tokens, places], -1), targets


def share_of_windows(share: Share, step: int) -> Batch:
    inputs, targets = windows(step)
    start, stop = share.bounds(WINDOWS)
    return Batch((inputs[start:stop], targets[start:stop]), torch.arange(start, stop), WINDOWS)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a large epsilon. A smaller one would amplify the rounding of a key bias's zero gradient."""
    return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1, eps=1e-3)


def tensor(
    *, replicas: int | None = None, shards: int | None = None, size: int | None = 2, **more: Any
) -> StrategyConfig:
    return StrategyConfig("tensor", mesh=MeshConfig(replicas=replicas, shards=shards, tensor=size), **more)


#: On four ranks each: config, how the steps are made, the model.
CUTS: dict[str, tuple[StrategyConfig, TrainConfig, Callable[[], nn.Module]]] = {
    "all ranks": (tensor(size=None), TrainConfig(), llama),
    "two copies": (tensor(activation_checkpointing=True), TrainConfig(accumulate=2), tied_llama),
    "parts of sequences": (tensor(size=4, sequence_parallel=True), TrainConfig(), tied_llama),
    "copies, parts of sequences": (
        tensor(replicas=2, sequence_parallel=True),
        TrainConfig(accumulate=2),
        grouped_llama,
    ),
    "sharded": (tensor(shards=2), TrainConfig(accumulate=2), tied_llama),
    "sharded, parts of sequences": (
        tensor(shards=2, sequence_parallel=True, activation_checkpointing=True),
        TrainConfig(),
        grouped_llama,
    ),
    "pipeline": (StrategyConfig("pipeline", mesh=MeshConfig(replicas=2)), TrainConfig(accumulate=2), grouped_llama),
    "interleaved, recomputed": (
        StrategyConfig(
            "pipeline",
            activation_checkpointing=True,
            pipeline=PipelineConfig("interleaved"),
            mesh=MeshConfig(replicas=2),
        ),
        TrainConfig(),
        grouped_llama,
    ),
    "fsdp": (StrategyConfig("fsdp"), TrainConfig(), grouped_llama),
}


def train_llama(session: Session, names: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for name in names:
        config, train, model = CUTS[name]
        strategy = build_strategy(config, session, train)
        strategy.build(model, adamw, NEXT_TOKEN, share_of_windows(strategy.share, 0))
        losses = [strategy.step(share_of_windows(strategy.share, n), rates(n)).loss.item() for n in range(STEPS)]
        found.append((losses, snapshot(strategy)))
    return found


def llama_alone(make: Callable[[], nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    model = make()
    stepper, losses = adamw(model), []
    for step in range(STEPS):
        inputs, targets = windows(step)
        stepper.param_groups[0]["lr"] = rates(step)
        stepper.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_a_llama_trains_like_one_process_however_its_layers_are_shared() -> None:
    ranks = run_ranks(4, train_llama, list(CUTS), limit_s=120)
    for number, (name, (*_, model)) in enumerate(CUTS.items()):
        losses, weights = llama_alone(model)
        for step, loss in enumerate(losses):
            assert sum(rank[number][0][step] for rank in ranks) == pytest.approx(loss, rel=1e-5), (name, step)
        for rank in ranks:
            for key, weight in weights.items():
                torch.testing.assert_close(
                    rank[number][1][f"model/{key}"], weight, atol=2e-5, rtol=0, msg=f"{name}: {key}"
                )


def limits_after_a_step(session: Session, configs: list[StrategyConfig]) -> set[timedelta]:
    """The time limits of all process groups that this rank is in."""
    session = replace(session, timeout=timedelta(seconds=60))  # that of the group in tests/dist/ranks.py
    for config in configs:
        strategy = build_strategy(config, session)
        strategy.build(even_model, adamw, criterion_objective(cross_entropy), part(strategy.share, 0))
    session.tighten_timeouts()
    groups = distributed_c10d._world.pg_map
    return {g._get_backend(device).options._timeout for g in groups for device in g._device_types}


def test_after_the_first_step_every_group_of_a_mesh_has_the_time_limit_of_steps() -> None:
    meshes = MeshConfig(replicas=2), MeshConfig(tensor=2, shards=2), MeshConfig(stages=2, replicas=2)
    configs = [StrategyConfig(n, mesh=mesh) for n, mesh in zip(("fsdp", "tensor", "pipeline"), meshes, strict=True)]
    assert run_ranks(4, limits_after_a_step, configs) == [{timedelta(seconds=42)}] * 4


def bytes_held(session: Session, configs: list[StrategyConfig]) -> list[tuple[int, int, int]]:
    """Return this rank's bytes of weights, gradients and moments, as the optimizer's step begins."""
    found = []
    for config in configs:
        gradients: list[int] = []

        def optimizer(model: nn.Module, gradients: list[int] = gradients) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(model.parameters(), 0.01)

            def look(*_: Any) -> None:
                grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                gradients.append(size_bytes(getattr(gradient, "_local_tensor", gradient) for gradient in grads))

            made.register_step_pre_hook(look)  # all gradients are there, and none is freed yet
            return made

        strategy = build_strategy(config, session)
        strategy.build(even_model, optimizer, criterion_objective(cross_entropy), part(strategy.share, 0))
        strategy.step(part(strategy.share, 0), 0.1)
        live = strategy.live_state()
        weights = size_bytes(value for key, value in live.items() if key.startswith("weights/"))
        found.append((weights, gradients[-1], size_bytes(value for key, value in live.items() if "/exp_avg" in key)))
    return found


def test_a_rank_keeps_its_part_of_each_layer_that_is_cut_and_of_each_shard() -> None:
    blocks = {"1.into": "colwise", "1.out": "rowwise", "2.into": "colwise", "2.out": "rowwise"}
    ends = {"0": "gathered", "3": "gathered"}
    configs = [
        tensor(tensor_plan=blocks),
        tensor(tensor_plan=blocks | ends, size=4),
        tensor(tensor_plan=blocks | ends, shards=2),
        StrategyConfig("fsdp", mesh=MeshConfig(replicas=2)),
    ]
    sizes = {name: size_bytes([parameter]) for name, parameter in even_model().named_parameters()}
    whole = sum(sizes.values())
    biases = sizes["1.out.bias"] + sizes["2.out.bias"]  # a rowwise layer's is added once, after the sum
    inside = sum(size for name, size in sizes.items() if name[0] in "12") - biases
    expected = [
        whole - inside + inside // 2,
        (whole - biases) // 4 + biases,
        (whole - biases) // 4 + biases // 2,
        whole // 2,
    ]
    for rank in run_ranks(4, bytes_held, configs):
        assert rank == [(size, size, 2 * size) for size in expected]


def made_where(session: Session, config: StrategyConfig) -> tuple[list[str], dict[str, Tensor], bool]:
    devices = []

    def make() -> nn.Module:
        devices.append(torch.empty(()).device.type)
        model = tied_llama()
        if devices[-1] != "meta":
            for parameter in model.parameters():
                parameter.data += session.rank  # only rank 0's counts
        return model

    strategy = build_strategy(config, session)
    strategy.build(make, adamw, NEXT_TOKEN, share_of_windows(strategy.share, 0))
    first = snapshot(strategy)
    strategy.step(share_of_windows(strategy.share, 0), 0.1)
    stepped = snapshot(strategy)
    return devices, first, torch.equal(stepped["model/lm_head.weight"], stepped["model/model.embed_tokens.weight"])


@pytest.mark.parametrize("config", [tensor(), tensor(shards=2, sequence_parallel=True)], ids=["copies", "shards"])
def test_the_first_weights_are_rank_0s_bit_for_bit_and_shared_ones_stay_shared(config: StrategyConfig) -> None:
    ranks = run_ranks(4, made_where, config)
    assert [rank[0] for rank in ranks] == [["cpu"], ["meta"], ["meta"], ["meta"]]
    for _, first, is_tied in ranks:
        assert is_tied
        for name, value in tied_llama().state_dict().items():
            assert torch.equal(first[f"model/{name}"], value), name


def test_copied_shards_are_written_by_one_rank_and_the_files_hold_the_model_once(tmp_path: Path) -> None:
    run_ranks(4, partial(trainer.train, name="hsdp"), tmp_path)
    folder = tmp_path / "checkpoints/step-00000010"
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    headers = {header["file"]: header["size_bytes"] for header in manifest["headers"]}
    first, second = (path.stat().st_size - headers[path.name] for path in sorted(folder.glob("*.safetensors")))
    assert [*headers] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert abs(first - second) < 0.2 * first
    assert len(manifest["tensors"]["model/1.weight"]["parts"]) == 2


def trained_by(session: Session, config: StrategyConfig, memory: int) -> tuple[str, dict[str, Tensor]]:
    """Return the layout chosen for ``memory`` bytes a rank, and the state after steps. Rank 0 has ten times as much."""
    auto.memory_bytes = lambda *_: memory * (1 if session.rank else 10)
    strategy = build_strategy(config, session)
    strategy.build(even_model, adamw, criterion_objective(cross_entropy), part(strategy.share, 0))
    for step in range(3):
        strategy.step(part(strategy.share, step), rates(step))
    assert strategy.evaluates_together == strategy._layout.passes_are_joint  # type: ignore[attr-defined]
    layout = strategy._layout  # type: ignore[attr-defined]
    return f"{type(layout).__name__} {getattr(layout, '_reshards', '')}", snapshot(strategy)


def by_turns(session: Session, folder: Path, memories: list[int]) -> list[Any]:
    found = []
    for attempt, (run, memory) in enumerate([*zip("abc", memories, strict=True), ("a", memories[-1])], 1):
        (folder / run).mkdir(exist_ok=True)
        session = in_run(session, folder / run, attempt)
        found.append(trained_by(session, StrategyConfig("auto"), memory))
    return [*found, trained_by(session, StrategyConfig("fsdp"), 0)]


def test_auto_takes_what_fits_the_smallest_memory_trains_to_its_bits_and_keeps_it(tmp_path: Path) -> None:
    kept = 4 * size_bytes(even_model().parameters())  # weights, gradients, two moments
    plenty, less, little = (int(size / 0.6) + 600 for size in (kept, 0.75 * kept, 0.5 * kept))
    for ranks in run_ranks(2, by_turns, tmp_path, [little, less, plenty]):
        names = [name for name, _ in ranks]
        assert names == ["Shards True", "Shards False", "Replicas ", "Shards True", "Shards True"]
        trainer.assert_same(ranks[0][1], ranks[-1][1])
    assert json.loads((tmp_path / "a/strategy.json").read_text())["strategy"] == "fsdp"


def muon_by_auto(session: Session, folder: Path) -> str:
    strategy = build_strategy(StrategyConfig("auto"), in_run(session, folder))
    strategy.build(
        even_model,
        partial(build_optimizer, OptimConfig("muon")),
        criterion_objective(cross_entropy),
        part(strategy.share, 0),
    )
    return type(strategy._layout).__name__  # type: ignore[attr-defined]


def test_auto_measures_an_optimizer_that_compares_the_parameters_of_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, muon_by_auto, tmp_path) == ["Replicas", "Replicas"]


def offloaded(session: Session) -> list[dict[str, Tensor]]:
    found = []
    for offload in (False, True):
        strategy = build_strategy(StrategyConfig("fsdp", cpu_offload=offload), session, TrainConfig(accumulate=2))
        strategy.build(even_model, adamw, criterion_objective(cross_entropy), part(strategy.share, 0))
        for step in range(3):
            strategy.step(part(strategy.share, step), rates(step))
        found.append(snapshot(strategy))
    return found


def test_without_a_gpu_offloaded_weights_train_to_the_same_bits() -> None:
    for without, with_it in run_ranks(2, offloaded):
        trainer.assert_same(with_it, without)


def hidden(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), *between, nn.Linear(8, CLASSES))


class Counts(nn.Module):
    """A fused attention's worth of heads that two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.into = 3, nn.Linear(FEATURES, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.into(inputs)[:, :CLASSES]


def built(session: Session, model: Callable[[], nn.Module], config: StrategyConfig) -> None:
    strategy = build_strategy(config, session)
    strategy.build(model, adamw, criterion_objective(cross_entropy), part(strategy.share, 0))


def refusals(session: Session, cases: list[Any]) -> list[str]:
    messages = []
    for model, config, _ in cases:
        with pytest.raises(ConfigError) as caught:
            built(session, model, config)
        messages.append(str(caught.value))
    return messages


PAIR = {"0": "colwise", "2": "rowwise"}
REFUSED: list[tuple[Any, StrategyConfig, str]] = [
    (partial(hidden, nn.Tanh()), tensor(tensor_plan={"blocks.*.up": "colwise"}), "is called blocks.*.up; there are: *"),
    (partial(hidden, nn.Tanh()), tensor(tensor_plan={"1": "rowwise"}), "1 is a Tanh, and rowwise is for Linear"),
    (nn.Tanh, tensor(), "a model without a Linear layer that can be cut needs a plan"),
    (partial(hidden, nn.Tanh()), tensor(sequence_parallel=True), "strategy.sequence_parallel needs a plan"),
    (
        partial(nn.Linear, FEATURES, 7),
        tensor(tensor_plan={"": "colwise"}),
        "strategy.mesh.tensor: 2 ranks cannot share the 7 outputs of",
    ),
    (Counts, tensor(tensor_plan={"into": "colwise"}), "cannot share the 3 heads of the model (num_heads)"),
    (partial(hidden, nn.PReLU()), tensor(tensor_plan=PAIR), "1.weight is whole on each rank but sees a part"),
    (
        partial(hidden, nn.LayerNorm(8)),
        tensor(tensor_plan={"0": "rowwise", "2": "colwise"}, sequence_parallel=True),
        "strategy.sequence_parallel: 1.weight, 1.bias in no pattern",
    ),
    (
        tied_llama,
        tensor(tensor_plan={"model.embed_tokens": "rowwise", "lm_head": "rowwise"}),
        "model.embed_tokens.weight, lm_head.weight are one",
    ),
    (Counts, tensor(replicas=2), "strategy.mesh: 2 replicas x 2 tensor = 4, and there are 2 ranks"),
    (Counts, StrategyConfig("ddp", mesh=MeshConfig(shards=2)), "strategy.mesh.shards: strategy.name ddp has no such"),
]


def test_a_plan_or_a_mesh_that_does_not_fit_is_refused_with_the_key_and_the_layer() -> None:
    for messages in run_ranks(2, refusals, REFUSED):
        for message, (_, _, says) in zip(messages, REFUSED, strict=True):
            assert says in message


def cut_evenly(session: Session) -> str:
    strategy: Strategy = build_strategy(tensor(sequence_parallel=True), session)
    batch = share_of_windows(strategy.share, 0)
    return refused_with(lambda: strategy.build(llama, adamw, NEXT_TOKEN, batch.map(lambda tensor: tensor[:, 1:])))


def test_sequences_that_the_ranks_cannot_share_are_refused_with_their_length() -> None:
    assert all("2 ranks cannot share sequences of 7 evenly" in message for message in run_ranks(2, cut_evenly))


def test_the_oracle_is_fed_what_the_ranks_are() -> None:
    """A guard for this file: shares of windows and of samples tile the global batch."""
    assert torch.equal(torch.cat([share_of_windows(Share(i, 4), 0).inputs for i in range(4)]), windows(0)[0])
    assert torch.equal(torch.cat([part(Share(i, 3), 0).inputs for i in range(3)]), global_batch(0)[0])
